"""`Command` on a fake scheduler: what it submits, what it shows, and what it leaves when commands fail or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import clusterenv as ce
import fake_scheduler
from clusterenv.backends import starting
from clusterenv.backends.command import _run_lines
from clusterenv.backends.command_jobs import CommandJobs, Queue, cancel_noted
from clusterenv.backends.contract import Hopeless, Plan
from clusterenv.cli import main

BOUND_S = 10.0


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    return fake_scheduler.install(tmp_path / "scheduler", monkeypatch)


def command(tmp_path, nodes=2, **options):
    settings = {"bind": "lo", "folder": str(tmp_path / "keys"), "heartbeat_s": (0.2, 1.5, 4.0), "poll_s": 0.2}
    return ce.Command(nodes, **{**fake_scheduler.OPTIONS, **settings, **options})


def make(tmp_path, **options):
    return ce.ClusterEnv("CartPole-v1", 2, backend=command(tmp_path, **options))


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "run").mkdir()
    keys = tuple(tmp_path / "run" / f"node-{node}.key" for node in range(2))
    return Plan("abc", tmp_path / "run", keys, 60.0, True, "tcp://127.0.0.1:1", threading.Event())


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("submit", ["fsub {script}", "fsub"], ids=["file", "standard input"])
def test_nodes_are_jobs(scheduler, tmp_path, submit):
    with make(tmp_path, submit=submit) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        assert len(list((scheduler / "states").iterdir())) == 2
    deadline = time.monotonic() + 10
    while subprocess.run(["fstat"], capture_output=True, text=True, check=True).stdout != "JOB STATE\n":
        assert time.monotonic() < deadline, "jobs are left"
        time.sleep(0.05)
    assert (
        not list((tmp_path / "keys").glob("clusterenv-*")) and len(list(tmp_path.glob("keys/logs/*/node-*.log"))) == 2
    )


def test_a_job_that_waits_is_shown_with_its_reason(scheduler, tmp_path):
    (scheduler / "state").write_text("PENDING")
    with pytest.raises(
        ce.StartError, match=r"waiting for node 0: PENDING \(the job 1 waits; for a slot\), node 1: PEND"
    ):
        make(tmp_path, start_timeout_s=3.0, reason="fwhy {job}")
    assert (scheduler / "cancelled").read_text() == "1\n2\n"


def test_a_job_that_will_never_run_ends_the_start(scheduler, tmp_path):
    (scheduler / "state").write_text("Error at start")
    start = time.monotonic()
    with pytest.raises(ce.StartError, match=r"node 0 will never run: job 1 is Error at start \(the job 1 waits"):
        make(tmp_path, is_stuck="^Error", reason="fwhy {job}")
    assert time.monotonic() - start < 20.0 and not list((scheduler / "states").iterdir())


def test_a_job_that_fails_names_its_log(scheduler, tmp_path):
    message = r"(?s)fstat does not list job \d any more \(3 times.*keys/logs/\w+/node-0.log:\n.*no-such-python"
    with pytest.raises(ce.StartError, match=message):
        make(tmp_path, nodes=1, python="/no-such-python")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"submit": "fsub-that-is-missing {script}"},
            r"Command\(submit=...\): there is no fsub-that-is-missing on PATH",
        ),
        (
            {"job_id": r"\d*"},
            r"fsub answered 'Job <1> is submitted', in which job_id='.*' finds no job",
        ),
        (
            {"job_id": r"number (\d+)"},
            r"fsub answered 'Job <1> is submitted', in which job_id='number .*' finds no job",
        ),
    ],
)
def test_what_cannot_be_submitted(scheduler, tmp_path, options, message):
    (scheduler / "state").write_text("PENDING")
    with pytest.raises(ce.StartError, match=message):
        make(tmp_path, **options)


def test_a_refusal_is_quoted(scheduler, tmp_path):
    (scheduler / "fail-fsub").touch()
    with pytest.raises(ce.StartError, match="fsub says: fsub: no answer from the master"):
        make(tmp_path)


# -- commands that hang or fail -----------------------------------------------------------------------------------


@pytest.mark.guarantee(16)
@pytest.mark.parametrize("name", ["fdel", "fstat"])
def test_close_is_bounded(scheduler, tmp_path, monkeypatch, caplog, name):
    monkeypatch.setattr(starting, "_CLOSE_TIMEOUT_S", 2.0)
    envs = make(tmp_path)
    envs.reset(seed=1)
    (scheduler / f"hang-{name}").touch()
    # Jobs that do not leave by themselves, so that they must be cancelled.
    for pid in (scheduler / "pids").iterdir():
        os.killpg(int(pid.read_text()), signal.SIGSTOP)
    start = time.monotonic()
    envs.close()
    seconds = time.monotonic() - start
    for pid in (scheduler / "pids").iterdir():
        os.killpg(int(pid.read_text()), signal.SIGCONT)
    assert seconds < BOUND_S
    if name == "fstat":
        assert (scheduler / "cancelled").read_text() == "1\n2\n", "they are cancelled without knowing their states"
        return
    (folder,) = (tmp_path / "keys").glob("clusterenv-*")
    assert "fdel did not answer" in caplog.text and f"clusterenv gc --folder {folder.parent}" in caplog.text
    assert {path.read_text() for path in folder.glob("*.key")} == {"closed\n"}
    (scheduler / "hang-fdel").unlink()
    assert main(["gc", "--folder", str(folder.parent)]) == 0 and not folder.exists()


def test_a_submission_without_an_answer(scheduler, plan, tmp_path, monkeypatch):
    monkeypatch.setattr("clusterenv.backends.command_jobs._LAST_COMMAND_S", 0.1)
    jobs = CommandJobs(command(tmp_path), plan)
    (scheduler / "hang-fsub").touch()
    plan.closing.set()
    with pytest.raises(ce.StartError, match="fsub did not answer"):
        jobs.start(0)
    with pytest.raises(ce.StartError, match="may still be submitted"):
        jobs.stop(time.monotonic() + 5)


def replace_program(scheduler, name, body):
    (scheduler / "bin" / name).write_text(f"#!/bin/bash\ncd {scheduler}\n{body}\n")


def test_output_in_another_encoding(scheduler, plan, tmp_path):
    """It must not look like a failure: the job would be submitted twice, and never cancelled."""
    replace_program(scheduler, "fsub", r"printf 'Job 12, caf\351\n'")
    replace_program(scheduler, "fstat", r"echo x >> asked; printf '12 RUN caf\351\n'")
    replace_program(scheduler, "fdel", 'echo "$@" >> cancelled')
    jobs = CommandJobs(command(tmp_path, poll_s=60.0), plan)
    jobs.start(0)
    for _ in range(3):
        assert jobs.look() == {} and jobs.state(0) == "RUN caf\N{REPLACEMENT CHARACTER}"
    assert (scheduler / "asked").read_text() == "x\n"
    jobs.stop(time.monotonic() + 5)
    assert (scheduler / "cancelled").read_text() == "12\n"


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_child_that_keeps_the_output_open(scheduler, plan, tmp_path, monkeypatch, is_closing):
    """`ssh` with ControlPersist leaves such a child: the program has answered when it has ended."""
    monkeypatch.setattr("clusterenv.backends.command_jobs._COMMAND_S", 5.0)
    body = "setsid sleep 60 & echo $! > child; echo 'Job 12 submitted'; head -c 100000 /dev/zero >&2"
    replace_program(scheduler, "fsub", body)
    if is_closing:
        plan.closing.set()
    jobs = CommandJobs(command(tmp_path), plan)
    start = time.monotonic()
    jobs.start(0)
    seconds = time.monotonic() - start
    os.kill(int((scheduler / "child").read_text()), signal.SIGKILL)  # it was left alone
    assert seconds < 4.0 and (plan.folder / "jobs.txt").read_text() == "0 12\n"


def test_a_child_of_a_program_that_failed(scheduler, plan, tmp_path):
    replace_program(scheduler, "fsub", "setsid sleep 60 & echo $! > child; echo 'no such queue' >&2; exit 1")
    with pytest.raises(ce.StartError, match="fsub says: no such queue"):
        CommandJobs(command(tmp_path), plan).start(0)
    os.kill(int((scheduler / "child").read_text()), signal.SIGKILL)


def test_a_scheduler_that_does_not_answer_ends_no_job(scheduler, plan, tmp_path):
    (scheduler / "state").write_text("PENDING")
    jobs = CommandJobs(command(tmp_path, poll_s=0.01), plan)
    jobs.start(0)
    assert jobs.look() == {} and jobs.state(0) == "PENDING"
    (scheduler / "fail-fstat").touch()
    time.sleep(0.02)
    for _ in range(2):
        with pytest.raises(ce.StartError, match="fstat says: fstat: no answer"):
            jobs.look()
    (scheduler / "fail-fstat").unlink()
    time.sleep(0.02)
    assert jobs.look() == {}
    (scheduler / "states/1").write_text("DONE")
    time.sleep(0.02)
    assert jobs.look() == {}, "is_over does not say that DONE is an end"
    (scheduler / "states/1").unlink()
    time.sleep(0.02)
    assert jobs.look() == {0: "ended: fstat does not list job 1 any more"}


def test_states_of_jobs(scheduler, plan, tmp_path):
    (scheduler / "state").write_text("PENDING")
    jobs = CommandJobs(command(tmp_path, poll_s=0.01, is_over="^DONE", is_stuck="^HELD"), plan)
    jobs.start(0)
    jobs.start(1)
    (scheduler / "states/1").write_text("DONE 3")
    (scheduler / "states/2").write_text("HELD by root")
    found = jobs.look()
    assert found == {0: "ended: job 1 is DONE 3", 1: "will never run: job 2 is HELD by root"}
    assert isinstance(found[1], Hopeless) and not isinstance(found[0], Hopeless)
    jobs.start(1)
    assert (scheduler / "cancelled").read_text() == "2\n", "the stuck one does not stay in the queue"
    assert jobs.describe().startswith("3 jobs submitted by fsub (1, 2, 3); logs in ")
    jobs.stop(time.monotonic() + 5)
    assert (scheduler / "cancelled").read_text() == "2\n3\n", "the one that is over is not cancelled"


def test_a_job_that_is_never_listed(scheduler, plan, tmp_path, monkeypatch):
    """It may have ended before the first query; one that was just submitted may not be listed yet."""
    (scheduler / "state").write_text("PENDING")
    jobs = CommandJobs(command(tmp_path, poll_s=0.01), plan)
    jobs.start(0)
    (scheduler / "states/1").unlink()
    assert jobs.look() == {}
    monkeypatch.setattr("clusterenv.backends.command_jobs._LISTED_S", 0.0)
    time.sleep(0.02)
    assert jobs.look() == {0: "ended: fstat does not list job 1 any more"}


@pytest.mark.parametrize(
    "cancel",
    [
        "fdel {jobs}",
        "fdel {job}",
        ["sh", "-c", 'for job in "$@"; do fdel ${job} || code=1; done; exit ${code:-0}', "sh", "{jobs}"],
    ],
)
def test_a_job_that_has_just_ended_is_no_failure(scheduler, plan, tmp_path, cancel):
    (scheduler / "state").write_text("PENDING")
    jobs = CommandJobs(command(tmp_path, cancel=cancel), plan)
    jobs.start(0)
    jobs.start(1)
    (scheduler / "states/1").unlink()  # fdel refuses it, and cancels the other
    jobs.stop(time.monotonic() + 5)
    assert (scheduler / "cancelled").read_text() == "2\n"


def test_a_job_that_cannot_be_cancelled(scheduler, plan, tmp_path):
    (scheduler / "state").write_text("PENDING")
    jobs = CommandJobs(command(tmp_path), plan)
    jobs.start(0)
    (scheduler / "fail-fdel").touch()
    with pytest.raises(ce.StartError, match="fdel says: fdel: no answer"):
        jobs.stop(time.monotonic() + 1.5)
    with pytest.raises(ce.StartError, match="fdel says"):
        cancel_noted(jobs.note(), time.monotonic() + 1.5)
    (scheduler / "fail-fdel").unlink()
    assert cancel_noted(jobs.note(), time.monotonic() + 5) == "1 jobs are cancelled or have ended: 1"


def test_a_later_head_knows_the_jobs(scheduler, plan, tmp_path):
    (scheduler / "state").write_text("PENDING")
    first = CommandJobs(command(tmp_path, poll_s=0.01), plan)
    first.start(1)
    second = CommandJobs(command(tmp_path, poll_s=0.01), plan)
    assert second.look() == {} and second.state(1) == "PENDING"
    second.stop(time.monotonic() + 5)
    assert (scheduler / "cancelled").read_text() == "1\n"


def test_nothing_to_end(scheduler):
    (scheduler / "fail-fdel").touch()
    queue = Queue({}, ["fstat"], ["fdel", "{jobs}"], r"(?P<job>\d+) (?P<state>.*)", None)
    queue.end([], time.monotonic() + 1)
    queue.end(["7"], time.monotonic() + 1)


# -- the script ---------------------------------------------------------------------------------------------------


def test_a_signal_that_only_announces_the_end():
    """Grid Engine sends SIGUSR2 to all processes of a job: the node must not die of it, and must get SIGTERM."""
    node = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up', flush=True)"
    lines = _run_lines(f'{sys.executable} -c "{node}; time.sleep(60)"', "USR2")
    job = subprocess.Popen(["bash", "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with job:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        os.killpg(job.pid, signal.SIGUSR1)
        os.killpg(job.pid, signal.SIGUSR2)
        assert job.wait(20) == 7


def test_an_agent_that_ends_at_once():
    lines = _run_lines("sh -c 'exit 3'", "USR2")
    at = next(i for i, line in enumerate(lines) if line.startswith("trap 'kill"))
    lines.insert(at, "sleep 0.5")
    assert subprocess.run(["bash", "-c", "\n".join(lines)], timeout=20).returncode == 3


def test_script_on_the_command_line(capsys):
    options = ["submit=fsub -n {cores} {script}", "status=fstat", "cancel=fdel {jobs}", "workers_per_node=4"]
    options += [
        "folder=/keys",
        "python=python3",
        "wrap=conda run -n x",
        'setup=["module load x"]',
        'env_vars={"A": "b c"}',
    ]
    agent = "python3 -m clusterenv node --join /keys/clusterenv-RUN/node-0.key --lease-s 300 --grace-s 30"
    assert main(["script", "command", *options]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "#!/bin/bash",
        "# submitted by: fsub -n 4 /keys/clusterenv-RUN/node-0.sh",
        "exec >> /keys/logs/RUN/node-0.log 2>&1",
        f"cd {Path.cwd()}",
        "export PYTHONUNBUFFERED=1",
        "export A='b c'",
        "module load x",
        f"exec conda run -n x {agent}",
    ]
    assert main(["script", "command", *options[:2]]) == 2
    assert "Command needs cancel" in capsys.readouterr().err
