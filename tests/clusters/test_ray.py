"""On a real Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import clusterenv as ce
import real
from closing import close_while, stopped
from clusterenv.cli import main
from stepping import joined, step_until

ID = "CartPole-v1"
FAST = (0.2, 1.5, 4.0)
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))
pytestmark = pytest.mark.ray


def make(n=4, nodes=2, **kwargs):
    backend = ce.Ray(nodes=nodes, bind="lo", heartbeat_s=FAST, **kwargs)
    return ce.ClusterEnv(ID, n, backend=backend, recovery=RECOVERY)


def agents():
    """Node agents below Ray's own processes."""
    found = []
    for pid in real.running["ray"].pids:
        try:
            process = psutil.Process(pid)
            if "clusterenv" in process.cmdline() and "node" in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def await_no_agents(timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while left := agents():
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def files():
    """In the temporary directory, of actors. Folders with a note belong to runs of other processes on this machine."""
    found = Path(tempfile.gettempdir()).glob("clusterenv-*")
    return {path.name for path in found if not (path / "head.json").exists()}


@pytest.mark.guarantee(3, 15)
@pytest.mark.smoke
def test_a_killed_actor_is_replaced_and_nothing_is_left(tmp_path, record_property):
    before = files()
    with make(folder=str(tmp_path)) as envs:
        envs.reset(seed=1)
        assert len(agents()) == 2
        actor = agents()[0].parent()
        assert actor is not None and "NodeActor" in " ".join(actor.cmdline())
        begin = time.time()
        actor.kill()
        _, lost = step_until(envs, lambda: joined(envs) == 3 and not envs.stats()["missing_nodes"])
        record_property("detected_s", next(e.time_s for e in envs.events() if e.kind == "node_lost") - begin)
        record_property("lost_steps", len(lost))
        for _ in range(5):
            envs.step(np.zeros(4, np.int64))
        assert len(lost) == len(set(lost)) and (set(lost) <= {0, 1} or set(lost) <= {2, 3}), "one node's episodes"
        assert len({process.parent().pid for process in agents()}) == 2
    await_no_agents()
    assert files() <= before and not list(tmp_path.iterdir()), "also no key of the actor that was killed"


def test_nodes_are_spread():
    import ray

    with make() as envs:
        envs.reset(seed=1)
        busy = [node for node in ray.nodes() if node["Alive"]]
        assert len(busy) == 2
        raylets = {process.parent().ppid() for process in agents()}
        assert len(raylets) == 2, "an actor on each node"


def test_more_than_ray_has():
    with pytest.raises(ce.StartError, match=r"waiting for .*not placed by Ray yet, which has [\d.]+ CPU free"):
        make(nodes=3, cpus_per_node=2, start_timeout_s=8, n=3)
    await_no_agents()


def test_bad_input(monkeypatch):
    with pytest.raises(ce.SpecError, match="cpus_per_node=-1"):
        ce.Ray(nodes=1, cpus_per_node=-1)
    code = (
        "import clusterenv as ce\n"
        "try:\n    ce.ClusterEnv('CartPole-v1', 2, backend=ce.Ray(nodes=1, address='127.0.0.1:9'))\n"
        "except ce.StartError as error:\n    print('refused:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "refused: Ray('127.0.0.1:9') cannot be reached" in done.stdout, done.stderr


HEAD = """
import time, numpy as np, clusterenv as ce
backend = ce.Ray(nodes=2, address={address!r}, bind="lo", heartbeat_s={fast}, folder={folder!r})
envs = ce.ClusterEnv("CartPole-v1", 2, backend=backend)
envs.reset(seed=1)
print("running", flush=True)
time.sleep(100)
"""


@pytest.mark.guarantee(13)
def test_nothing_runs_after_its_head_was_killed(tmp_path, record_property):
    code = HEAD.format(address=real.running["ray"].address, fast=FAST, folder=str(tmp_path))
    head = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    while (line := head.stdout.readline()) != "running\n":
        assert line, "it ended"
    assert len(agents()) == 2
    os.kill(head.pid, signal.SIGKILL)
    begin = time.monotonic()
    head.wait()
    head.stdout.close()
    await_no_agents(FAST[2] + 15)
    record_property("gone_s", time.monotonic() - begin)


@pytest.mark.guarantee(16)
def test_close_while_ray_hangs(tmp_path, capsys, record_property):
    """Its control service is stopped; a script that ends then is held up by Ray itself, and is killed here."""
    cluster = real.running["ray"]
    service = [pid for pid in cluster.pids if "gcs_server" in psutil.Process(pid).name()]
    backend = ce.Ray(nodes=2, address=cluster.address, bind="lo", heartbeat_s=FAST, folder=str(tmp_path))
    closed = close_while(lambda: stopped(*service), backend, 2, kills=True)
    assert closed.seconds < 10, closed
    record_property("closed_s", closed.seconds)
    (left,) = tmp_path.glob("clusterenv-*")
    assert f"2 Ray actors named {left.name}-*" in closed.told and f"clusterenv gc --folder {tmp_path}" in closed.told
    await_no_agents()
    assert main(["gc", "--folder", str(tmp_path)]) == 0 and not left.exists()


def test_gc_kills_the_actors_of_a_run(tmp_path, monkeypatch, capsys):
    """As it may be where the script goes on, though Ray did not answer when its run was closed."""
    import ray

    from clusterenv.backends.ray import _Actors

    monkeypatch.setattr(_Actors, "stop", fail)
    with make(folder=str(tmp_path)) as envs:
        envs.reset(seed=1)
        (folder,) = tmp_path.glob("clusterenv-*")
        names = {item["name"] for item in ray.util.list_named_actors(all_namespaces=True)}
    assert {f"{folder.name}-0-1", f"{folder.name}-1-2"} <= names
    assert main(["gc", "--folder", str(tmp_path)]) == 0 and not folder.exists()
    assert f"2 Ray actors named {folder.name}-* are killed" in capsys.readouterr().out
    deadline = time.monotonic() + 20
    while any(item["name"] in names for item in ray.util.list_named_actors(all_namespaces=True)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    await_no_agents()


def fail(self, deadline):
    raise ce.StartError("Ray does not answer")
