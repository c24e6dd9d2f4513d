"""On a real SLURM: what the scheduler does to nodes, and what is left when a run is over."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import clusterenv as ce
import real
from closing import close_while, stopped
from clusterenv.backends.contract import agent_command
from clusterenv.backends.slurm import grace_options, job_script, srun_command
from clusterenv.cli import main
from clusterenv.spec import blueprint
from container import MARK, Podman
from experiments.arms import TASKS, Arm
from experiments.run import run_arm
from stepping import joined, step_until

ID = "CartPole-v1"
FAST = (0.2, 1.5, 4.0)
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))
on_slurm = pytest.mark.slurm


def slurm(tmp_path, nodes=2, **kwargs):
    settings = {"interface": "lo", "folder": str(tmp_path / "keys"), "extra": {"exclusive": None}, "heartbeat_s": FAST}
    return ce.Slurm(nodes=nodes, **{**settings, **kwargs})


def make(tmp_path, n=4, nodes=2, **kwargs):
    return ce.ClusterEnv(ID, n, backend=slurm(tmp_path, nodes, **kwargs), recovery=RECOVERY)


def policy():
    return ce.NumpyPolicy(lambda weights, obs: obs @ weights["w"], {"w": np.ones((4, 2), np.float32)})


def jobs():
    return [line.split()[0] for line in real.running["slurm"].queue()]


def scontrol(*args):
    subprocess.run(["scontrol", *args], check=True, capture_output=True)


def await_empty_queue(timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while queue := real.running["slurm"].queue():
        assert time.monotonic() < deadline, queue
        time.sleep(0.2)


# -- what is submitted --------------------------------------------------------------------------------------------


def test_every_value_is_quoted():
    ours = ce.Slurm(
        nodes=2,
        workers_per_node=4,
        cpus_per_worker=2,
        mem="8G",
        partition="a b;rm -rf /",
        time_limit="1:00:00",
        env_vars={"NAME": "it's $HOME"},
        setup=["module load gcc"],
        extra={"exclusive": None, "nice": 5},
    )
    script = job_script(ours, "job", ["python", "-m", "x y"], Path("/logs/100%/n.log"), Path("/my work"))
    assert script.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=job",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        "#SBATCH --output=/logs/100%%/n.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --chdir='/my work'",
        "#SBATCH --signal=B:TERM@30",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --mem=8G",
        "#SBATCH --partition='a b;rm -rf /'",
        "#SBATCH --time=1:00:00",
        "#SBATCH --exclusive",
        "#SBATCH --nice=5",
        """export NAME='it'"'"'s $HOME'""",
        "module load gcc",
        "exec python -m 'x y'",
    ]
    assert srun_command(ours, "n1", Path("/f/n.sh"))[-2:] == ["bash", "/f/n.sh"]


@pytest.mark.parametrize(
    ("options", "signal", "grace_s"),
    [
        ({}, "B:TERM@30", 30),
        ({"grace_s": 120}, "B:TERM@120", 120),
        ({"extra": {"signal": "B:TERM@90"}}, "B:TERM@90", 90),
        ({"extra": {"signal": "SIGTERM"}}, "SIGTERM", 60),
        ({"extra": {"signal": "B:USR1@90"}}, "B:USR1@90", 30),
    ],
)
def test_nodes_know_what_slurm_grants_them_to_leave(options, signal, grace_s):
    ours = ce.Slurm(nodes=1, **options)
    command = agent_command(Path("/keys/node-0.key"), grace_options(ours))
    script = job_script(ours, "job", command, Path("/logs/n.log"), Path("/work"))
    assert f"#SBATCH --signal={signal}" in script and f"node-0.key --grace-s {grace_s}\n" in script


def test_what_nodes_are_started_through():
    key, log = Path("/keys/node-0.key"), Path("/logs/n.log")
    for wrap in (["podman", "run", "--volume=/my work:/w", "image"], "podman run '--volume=/my work:/w' image"):
        ours = ce.Slurm(nodes=1, setup=["module load podman"], wrap=wrap, python="/opt/bin/python3")
        script = job_script(ours, "job", agent_command(key, python=ours.python), log, Path("/work"))
        assert script.splitlines()[-2:] == [
            "module load podman",
            "exec podman run '--volume=/my work:/w' image /opt/bin/python3 -m clusterenv node --join /keys/node-0.key",
        ]
    assert agent_command(key)[0] == sys.executable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrap": "podman 'run"}, r"wrap=\"podman 'run\"\): expected a string or a list of words"),
        ({"wrap": ["podman", 1]}, "list of strings"),
        ({"wrap": 1}, "list of strings"),
        ({"wrap": ["a\nb"]}, "line break"),
        ({"python": ""}, "python=''.*interpreter"),
        ({"partition": "a\nb"}, "line break"),
        ({"setup": "module load"}, "expected a list of strings"),
        ({"mode": "magic"}, "srun"),
        ({"nodes": 0}, "1 or more"),
        ({"min_nodes": 3}, "between 1 and nodes=2"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ce.SpecError, match=message):
        ce.Slurm(**{"nodes": 2, **options})


def test_script_on_the_command_line(capsys):
    assert main(["script", "slurm", "nodes=4", "partition=cpu", 'setup=["module load x"]']) == 0
    assert "#SBATCH --partition=cpu\nmodule load x\nexec " in capsys.readouterr().out
    assert main(["script", "slurm", "folder=/keys", "wrap=conda run -n x", "python=python3"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    agent = "python3 -m clusterenv node --join /keys/clusterenv-RUN/node-0.key --lease-s 300 --grace-s 30"
    assert last == f"exec conda run -n x {agent}"
    assert main(["script", "slurm", "partitoin=cpu"]) == 2
    assert "partitoin" in capsys.readouterr().err


def test_no_slurm_here(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ce.StartError, match="no sbatch on PATH"):
        make(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ce.StartError, match="within an allocation"):
        make(tmp_path, mode="srun")


# -- what the scheduler answers -----------------------------------------------------------------------------------


@on_slurm
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"time_limit": "soon"}, "time"),
        ({"extra": {"no-such-option": 1}}, "no-such-option"),
    ],
)
def test_what_sbatch_refuses_is_quoted(tmp_path, options, message):
    with pytest.raises(ce.StartError, match=f"(?s)sbatch says: .*{message}"):
        make(tmp_path, **options)
    await_empty_queue()  # a job of the test before may still be on its way out
    assert not list((tmp_path / "keys").glob("clusterenv-*"))


@on_slurm
def test_what_slurm_would_never_run(tmp_path):
    with pytest.raises(ce.StartError, match=r"will never run: SLURM job \d+ is PENDING \(PartitionConfig\)"):
        make(tmp_path, cpus_per_worker=64)
    await_empty_queue()


@on_slurm
def test_more_nodes_than_there_are(tmp_path):
    with pytest.raises(ce.StartError, match=r"4/5 nodes, .* waiting for node \d: PENDING \(Resources\)"):
        make(tmp_path, n=5, nodes=5, start_timeout_s=12)
    await_empty_queue()


@on_slurm
def test_beginning_with_fewer_nodes(tmp_path):
    """The missing node's slots are on the others; it may come later."""
    with make(tmp_path, n=10, nodes=5, min_nodes=3) as envs:
        collector = envs.collector(policy(), seed=1)
        assert collector.rollout(16).valid.all() and joined(envs) == 4
        late = envs.stats()["missing_nodes"]
        assert len(late) == 1
        running = next(line.split()[0] for line in real.running["slurm"].queue() if "RUNNING" in line)
        subprocess.run(["scancel", running], check=True)
        step_until(envs, lambda: late[0] not in envs.stats()["missing_nodes"])
        assert collector.rollout(8).obs.shape == (8, 10, 4)
    await_empty_queue()


# -- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee(17)
@on_slurm
@pytest.mark.smoke
def test_scancel_costs_one_node_which_is_replaced(tmp_path, record_property):
    with make(tmp_path) as envs:
        envs.reset(seed=1)
        assert len(jobs()) == 2
        subprocess.run(["scancel", jobs()[0]], check=True)
        _, lost = step_until(envs, lambda: joined(envs) == 3 and not envs.stats()["missing_nodes"])
        for _ in range(10):
            envs.step(np.zeros(4, np.int64))
        assert len(lost) == len(set(lost)) and set(lost) <= {0, 1}
        record_property("lost_steps", len(lost))
        assert "preempted" in "".join(event.reason for event in envs.events())
        assert len(jobs()) == 2
    await_empty_queue()
    logs = list((tmp_path / "keys" / "logs").glob("*/node-*.log"))
    assert len(logs) == 2 and not list((tmp_path / "keys").glob("clusterenv-*")), "logs stay, keys do not"


@on_slurm
def test_a_requeued_job_comes_back_by_itself(tmp_path):
    with make(tmp_path) as envs:
        envs.reset(seed=1)
        before = jobs()
        scontrol("requeue", before[1])
        step_until(envs, lambda: joined(envs) == 3, 150)
        assert sorted(jobs()) == sorted(before), "nobody submitted another one"
    await_empty_queue()


@pytest.mark.guarantee(3)
@on_slurm
def test_a_machine_that_is_gone(tmp_path, record_property):
    cluster = real.running["slurm"]
    with make(tmp_path) as envs:
        collector = envs.collector(policy(), seed=1)
        collector.rollout(8)
        done = subprocess.run(["squeue", "--noheader", "--format=%N"], capture_output=True, text=True)
        name = done.stdout.split()[0]
        begin = time.time()
        cluster.kill_node(name)
        try:
            deadline = time.monotonic() + 100
            while joined(envs) < 3:
                assert time.monotonic() < deadline, envs.events()
                assert collector.rollout(32).obs.shape == (32, 4, 4)
            record_property("detected_s", next(e.time_s for e in envs.events() if e.kind == "node_lost") - begin)
            assert collector.rollout(8).valid.all()
        finally:
            cluster.start_node(name)
    await_empty_queue()
    deadline = time.monotonic() + 60
    while cluster.states().count("idle") < 4:
        assert time.monotonic() < deadline, cluster.states()
        time.sleep(0.5)


@pytest.mark.guarantee(17)
@on_slurm
@pytest.mark.timeout(200)
def test_the_time_limit(tmp_path):
    """SLURM counts in minutes: the job is told to go within its first, and another takes its place."""
    with make(tmp_path, nodes=1, time_limit="1") as envs:
        collector = envs.collector(policy(), seed=1)
        deadline = time.monotonic() + 120
        while joined(envs) < 2:
            assert time.monotonic() < deadline, envs.events()
            collector.rollout(64)
        assert "preempted" in next(event.reason for event in envs.events() if event.kind == "node_lost")
        assert collector.rollout(8).valid.all()
    await_empty_queue()


HEAD = """
import time, numpy as np, clusterenv as ce
options = dict(interface="lo", folder={folder!r}, extra={{"exclusive": None}}, heartbeat_s={fast})
backend = ce.Slurm(nodes=5, min_nodes=4, **options)
envs = ce.ClusterEnv("CartPole-v1", 5, backend=backend)
envs.reset(seed=1)
envs.step(np.zeros(5, np.int64))
print("running", flush=True)
time.sleep(100)
"""


# A machine of its own: another name, and process numbers that mean nothing outside.
ELSEWHERE = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]


@pytest.mark.guarantee(13)
@on_slurm
@pytest.mark.smoke
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_nothing_runs_after_its_head_was_killed_and_gc_removes_the_rest(tmp_path, capsys, where, record_property):
    folder = tmp_path / "keys"
    command = [sys.executable, "-c", HEAD.format(folder=str(folder), fast=FAST)]
    if where == "elsewhere":
        command = [*ELSEWHERE, 'hostname compute-1; exec "$0" "$@"', *command]
    head = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None and head.stdout.readline() == "running\n"
    main(["gc", "--folder", str(folder)])
    told = {"here": "its head is running", "elsewhere": "its head may be running (process 1 on compute-1"}
    assert told[where] in capsys.readouterr().out and len(real.running["slurm"].queue()) == 5
    os.kill(head.pid, signal.SIGKILL)
    head.wait()
    head.stdout.close()
    begin = time.monotonic()
    while any("RUNNING" in line for line in real.running["slurm"].queue()):
        assert time.monotonic() < begin + FAST[2] + 15, real.running["slurm"].queue()
        time.sleep(0.2)
    record_property("gone_s", time.monotonic() - begin)
    if where == "elsewhere":
        (note,) = folder.glob("clusterenv-*/head.json")
        os.utime(note, (time.time() - FAST[2] - 200,) * 2)
    main(["gc", "--folder", str(folder), "--dry-run"])
    assert list(folder.glob("clusterenv-*/node-0.key"))
    assert main(["gc", "--folder", str(folder)]) == 0
    assert re.search(r"SLURM jobs named clusterenv-\w+ are cancelled", capsys.readouterr().out)
    assert not list(folder.glob("clusterenv-*"))
    await_empty_queue()


@contextlib.contextmanager
def sleeping_scancel(folder):
    """In a folder that is first on PATH."""
    (folder / "scancel").write_text("#!/bin/sh\nexec sleep 1000\n")
    (folder / "scancel").chmod(0o755)
    yield
    (folder / "scancel").unlink()


@pytest.mark.guarantee(16)
@on_slurm
@pytest.mark.parametrize("what", ["scancel", "slurmctld"])
def test_close_while_slurm_hangs(tmp_path, monkeypatch, what, record_property):
    """Five nodes are wanted, and there are four: one job waits, and is held, so that it would wait for ever."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    cluster, folder = real.running["slurm"], tmp_path / "keys"

    def hanging():
        scontrol("hold", next(line.split()[0] for line in cluster.queue() if "PENDING" in line))
        return sleeping_scancel(tmp_path / "bin") if what == "scancel" else stopped(cluster.controller)

    closed = close_while(hanging, slurm(tmp_path, nodes=5, min_nodes=4), 5)
    assert closed.seconds < 10 and closed.exit_seconds < 5, closed
    record_property("closed_s", closed.seconds)
    (left,) = folder.glob("clusterenv-*")
    assert f"5 SLURM jobs named {left.name}" in closed.told and f"clusterenv gc --folder {folder}" in closed.told
    assert {path.read_text() for path in left.glob("*.key")} == {"closed\n"}
    deadline = time.monotonic() + 30
    while [line.split()[1] for line in cluster.queue()] != ["PENDING"]:
        assert time.monotonic() < deadline, cluster.queue()  # the four were told to leave
        time.sleep(0.2)
    assert main(["gc", "--folder", str(folder)]) == 0 and not left.exists()
    await_empty_queue()


@on_slurm
def test_a_controller_that_does_not_answer_is_told(tmp_path):
    with make(tmp_path) as envs:
        envs.reset(seed=1)

        def told(kind):
            return any(event.kind == kind for event in envs.events())

        with stopped(real.running["slurm"].controller):
            step_until(envs, lambda: told("scheduler_lost"))
        step_until(envs, lambda: told("scheduler_back"))
    await_empty_queue()


INSIDE = """
import logging, os, clusterenv as ce, gymnasium as gym, numpy as np
class Seen(gym.Wrapper):
    wrapped = property(lambda self: os.environ.get("WRAPPED"))
logging.basicConfig(level=logging.INFO)
options = dict(interface="lo", folder={folder!r}, heartbeat_s={fast}, wrap="env WRAPPED=yes")
backend = ce.Slurm(nodes=2, mode="srun", **options)
with ce.ClusterEnv([lambda: Seen(gym.make("CartPole-v1"))] * 4, backend=backend) as envs:
    print("wrapped", envs.get_attr("wrapped"))
    batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(16)
    print("valid", batch.valid.all(), [e.kind for e in envs.events()])
try:
    ce.ClusterEnv("CartPole-v1", 4, backend=ce.Slurm(nodes=3, mode="srun", interface="lo", folder={folder!r}))
except ce.StartError as error:
    print(error)
"""


@on_slurm
def test_steps_within_an_allocation(tmp_path):
    """The head's own node is not used unasked."""
    script = tmp_path / "train.py"
    script.write_text(INSIDE.format(folder=str(tmp_path / "keys"), fast=FAST))
    log = tmp_path / "log"
    batch = f"#!/bin/bash\nexec {sys.executable} {script}\n"
    command = ["sbatch", "--wait", "--nodes=3", "--exclusive", f"--output={log}", f"--chdir={tmp_path}"]
    done = subprocess.run(command, input=batch, capture_output=True, text=True, timeout=100)
    text = log.read_text()
    assert done.returncode == 0, text
    assert "valid True" in text and "2 steps on node" in text
    assert f"wrapped {('yes',) * 4}" in text
    own = re.search(r"has 2 nodes besides (node\d), where this script runs", text)
    assert own is not None and own[1] not in re.search(r"2 steps on (.*);", text)[1]
    await_empty_queue()


def collect_until(collector, condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        collector.rollout(32)


class Inside(gym.Wrapper):
    @property
    def is_in_the_image(self):
        return MARK.exists()


@on_slurm
@pytest.mark.timeout(900)  # the image is made on the first run
def test_nodes_started_through_a_container(tmp_path):
    """Another interpreter, in a container: it joins, collects, hears SIGTERM, and leaves nothing."""
    interpreter = str(Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}"))
    thunks = [lambda: Inside(gym.make(ID))] * 4
    with Podman() as podman:
        backend = slurm(tmp_path, wrap=podman.command(mounts=[tmp_path]), python=interpreter)
        with ce.ClusterEnv(thunks, backend=backend, recovery=RECOVERY) as envs:
            assert envs.get_attr("is_in_the_image") == (True,) * 4 and not MARK.exists()
            collector = envs.collector(policy(), seed=1)
            assert collector.rollout(16).valid.all() and len(podman.containers()) == 2
            first, second = jobs()
            # As before a time limit: to podman alone, which hands it on.
            subprocess.run(["scancel", "--batch", "--signal=TERM", first], check=True)
            collect_until(collector, lambda: joined(envs) == 3)
            # To all processes of the job, but not of the container: there the head tells the agent.
            subprocess.run(["scancel", second], check=True)
            collect_until(collector, lambda: joined(envs) == 4)
            lost = [event.reason for event in envs.events() if event.kind == "node_lost"]
            assert len(lost) == 2 and "preempted" in lost[0], lost
            assert collector.rollout(8).valid.all() and len(podman.containers()) == 2
        await_empty_queue()
        deadline = time.monotonic() + 20
        while left := podman.containers():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@on_slurm
def test_four_nodes_pull_what_the_virtual_cluster_pulls(tmp_path):
    """An arm of the experiments, on jobs and on logical nodes: the same learning, pulls and bytes."""
    arm = Arm("LunarLander PPO, quick", "APS(0.02)", "auto")
    backend = ce.Slurm(nodes=4, interface="lo", folder=str(tmp_path / "keys"), extra={"exclusive": None})
    real_one = run_arm(arm, 1, steps_share=0.2, backend=backend)
    virtual = run_arm(arm, 1, steps_share=0.2)
    for name in ("versions", "pulls", "pulled", "forms", "weight_bytes", "late_return", "final_return"):
        assert real_one[name] == virtual[name], name
    assert real_one["pulls"] > 4 * 2
    code = len(blueprint(TASKS[arm.task].env, 4, None, is_remote=True).payload)  # which a virtual node has already
    assert real_one["sent_bytes"] == pytest.approx(virtual["sent_bytes"] + 4 * code, rel=0.05)
    print({name: (real_one[name], virtual[name]) for name in ("pulls", "weight_bytes", "sent_bytes")})
