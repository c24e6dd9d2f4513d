"""On a real Grid Engine: what the scheduler says about jobs, and what is left when a run is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import clusterenv as ce
import real
from closing import close_while, stopped
from clusterenv.cli import main
from killed_heads import run
from seed_ledger import read, repeated
from stepping import joined, step_until

pytestmark = pytest.mark.gridengine

ID = "CartPole-v1"
FAST = (0.2, 1.5, 4.0)
INHERITED = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
"""Grid Engine's jobs inherit no variables; the tests may run from a source tree."""


def grid_engine(folder, nodes=2, **options):
    settings = {"bind": "lo", "folder": str(folder), "heartbeat_s": FAST, "poll_s": 1.0, "env_vars": INHERITED}
    return ce.Command.sge(nodes, **{**settings, **options})


def make(tmp_path, n=4, nodes=2, **options):
    recovery = ce.Recovery(backoff_s=(0.05, 0.1))
    return ce.ClusterEnv(ID, n, backend=grid_engine(tmp_path / "keys", nodes, **options), recovery=recovery)


def queue():
    return real.running["gridengine"].queue()


def await_empty_queue(timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while jobs := queue():
        assert time.monotonic() < deadline, jobs
        time.sleep(0.2)


def test_what_qsub_refuses_is_quoted(tmp_path):
    with pytest.raises(ce.StartError, match=r"(?s)qsub says: .*nowhere"):
        make(tmp_path, options="-q nowhere")
    assert not queue() and not list((tmp_path / "keys").glob("clusterenv-*"))


def test_a_job_that_waits_is_shown_with_its_reason(tmp_path):
    message = r"4/5 nodes, .* waiting for node \d: qw \(queue instance .* dropped because it is full\)"
    with pytest.raises(ce.StartError, match=message):
        make(tmp_path, n=5, nodes=5, start_timeout_s=15)
    await_empty_queue()


def test_a_job_in_an_error_state_ends_the_start(tmp_path):
    start = time.monotonic()
    with pytest.raises(ce.StartError, match=r"will never run: job \d+ is Eqw \(.*can't chdir to /nowhere"):
        make(tmp_path, options="-wd /nowhere")
    assert time.monotonic() - start < 30
    await_empty_queue()


def test_a_job_that_fails_at_its_start_names_its_log(tmp_path):
    message = r"(?s)qstat does not list job \d+ any more \(3 times.*keys/logs/\w+/node-0.log:\n.*/no-such-python"
    with pytest.raises(ce.StartError, match=message):
        make(tmp_path, nodes=1, python="/no-such-python")
    await_empty_queue()


@pytest.mark.guarantee(17)
@pytest.mark.smoke
def test_qdel_costs_one_node_which_is_replaced(tmp_path):
    with make(tmp_path) as envs:
        envs.reset(seed=1)
        jobs = [line.split()[0] for line in queue()]
        assert len(jobs) == 2
        subprocess.run(["qdel", jobs[0]], check=True, stdout=subprocess.DEVNULL)
        step_until(envs, lambda: joined(envs) == 3 and not envs.stats()["missing_nodes"])
        assert "preempted" in "".join(event.reason for event in envs.events()), "it was warned, and left by itself"
    await_empty_queue()
    assert not list((tmp_path / "keys").glob("clusterenv-*"))


HEAD = """
import sys, time, numpy as np, clusterenv as ce
from clusterenv import Command
envs = ce.ClusterEnv("CartPole-v1", 5, backend={backend!r})
envs.reset(seed=1)
envs.step(np.zeros(5, np.int64))
print("running", flush=True)
time.sleep(100)
"""


@pytest.mark.guarantee(13)
@pytest.mark.smoke
def test_gc_cancels_the_jobs_of_a_killed_head(tmp_path, capsys):
    """Four nodes run, and end with their lease; the fifth waits, and would wait for ever."""
    folder = tmp_path / "keys"
    backend = grid_engine(folder, 5, min_nodes=4)
    head = subprocess.Popen([sys.executable, "-c", HEAD.format(backend=backend)], stdout=subprocess.PIPE, text=True)
    with head:
        assert head.stdout is not None and head.stdout.readline() == "running\n"
        main(["gc", "--folder", str(folder)])
        assert "its head is running" in capsys.readouterr().out and len(queue()) == 5
        head.send_signal(signal.SIGKILL)
    assert main(["gc", "--folder", str(folder)]) == 0
    assert "5 jobs are cancelled or have ended" in capsys.readouterr().out
    await_empty_queue()
    assert not list(folder.glob("clusterenv-*"))


@pytest.mark.guarantee(16)
def test_close_is_bounded_while_the_master_hangs(tmp_path):
    folder = tmp_path / "keys"
    closed = close_while(lambda: stopped(real.running["gridengine"].master), grid_engine(folder), 2)
    assert closed.seconds < 10 and "did not answer" in closed.told and "clusterenv gc" in closed.told, closed
    assert main(["gc", "--folder", str(folder)]) == 0
    await_empty_queue()


@pytest.mark.guarantee(13)
def test_jobs_that_outlive_their_head_join_the_next_one(tmp_path):
    made = grid_engine(tmp_path)
    names = ("submit", "status", "cancel", "status_line", "is_stuck", "end_signal", "poll_s", "env_vars")
    with run(tmp_path, "Command", **{name: getattr(made, name) for name in names}) as it:
        it.start()
        it.begun()
        before, pids = [line.split()[0] for line in queue()], set(it.pids)
        assert len(before) == 2
        it.kill_head(signal.SIGKILL)
        it.start()
        it.begun()
        assert [line.split()[0] for line in queue()] == before and it.pids == pids, "nothing was started again"
        it.end()
        await_empty_queue()
        assert repeated(read(it.ledger)) == [] and not it.journal.exists()


def test_steps_on_every_node(tmp_path):
    with make(tmp_path, n=6, nodes=3) as envs:
        envs.reset(seed=1)
        for _ in range(50):
            assert "transition_valid" not in envs.step(np.zeros(6, np.int64))[4]
        assert len(queue()) == 3
    await_empty_queue()
