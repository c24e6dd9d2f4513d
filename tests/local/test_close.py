"""`close()` takes 10 s at most, whatever a scheduler does. What is left is said, and removed by `clusterenv gc`."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

import clusterenv as ce
import fake_slurm
from clusterenv.backends import starting
from clusterenv.backends.contract import Plan
from clusterenv.backends.kubernetes import _Pods
from clusterenv.backends.kubernetes_api import Api
from clusterenv.backends.slurm_jobs import SlurmJobs
from clusterenv.cli import main

pytestmark = pytest.mark.guarantee(16)

ID = "CartPole-v1"
BOUND_S = 10.0


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A scheduler gets 8 s of the 10; in tests on real clusters, that is."""
    monkeypatch.setattr(starting, "_CLOSE_TIMEOUT_S", 1.0)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return fake_slurm.install(tmp_path / "slurm", monkeypatch)


def make(tmp_path, **kwargs):
    backend = ce.Slurm(nodes=2, interface="lo", folder=str(tmp_path / "keys"), heartbeat_s=(0.2, 1.5, 4.0), **kwargs)
    return ce.ClusterEnv(ID, 2, backend=backend)


def seconds_of_close(envs):
    start = time.monotonic()
    envs.close()
    return time.monotonic() - start


def test_a_scancel_that_hangs(slurm, tmp_path, caplog):
    envs = make(tmp_path)
    envs.reset(seed=1)
    (slurm / "hang-scancel").touch()
    assert seconds_of_close(envs) < BOUND_S
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "scancel did not answer" in told[0], told
    (folder,) = (tmp_path / "keys").glob("clusterenv-*")
    assert (
        f"2 SLURM jobs named {folder.name} (1, 2)" in told[0] and f"clusterenv gc --folder {folder.parent}" in told[0]
    )
    assert {path.read_text() for path in folder.glob("*.key")} == {"closed\n"}, "the note stays, the secrets are gone"
    assert main(["gc", "--folder", str(folder.parent), "--dry-run"]) == 0
    (slurm / "hang-scancel").unlink()
    assert main(["gc", "--folder", str(folder.parent)]) == 0, "though this process, the head, is alive"
    assert (slurm / "scancelled").read_text() == f"--quiet --name={folder.name}\n" and not folder.exists()


def test_a_squeue_that_hangs_delays_nothing(slurm, tmp_path):
    (slurm / "hang-squeue").touch()
    envs = make(tmp_path)
    envs.reset(seed=1)
    assert seconds_of_close(envs) < BOUND_S
    assert (slurm / "scancelled").exists() and not list((tmp_path / "keys").glob("clusterenv-*"))


def test_steps_that_do_not_end(slurm, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    envs = make(tmp_path, mode="srun", on_head_node=True)
    envs.reset(seed=1)
    assert seconds_of_close(envs) < BOUND_S
    assert "srun did not end its steps on node1, node2, and was killed" in caplog.text


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "run").mkdir()
    key = tmp_path / "run" / "node-0.key"
    key.write_text("key")
    return Plan("abc", tmp_path / "run", (key,), 60.0, True, "tcp://127.0.0.1:1", threading.Event())


def test_an_sbatch_that_hangs_when_the_run_is_closed(slurm, plan, monkeypatch):
    """It is killed, and its job may come all the same: that is cancelled by name, and not trusted to be gone."""
    monkeypatch.setattr("clusterenv.backends.slurm_jobs._LAST_COMMAND_S", 0.1)
    jobs = SlurmJobs(ce.Slurm(nodes=1), plan)
    (slurm / "hang-sbatch").touch()
    plan.closing.set()
    with pytest.raises(ce.StartError, match="sbatch did not answer"):
        jobs.start(0)
    with pytest.raises(ce.StartError, match="may still be submitted"):
        jobs.stop(time.monotonic() + 5)
    assert (slurm / "scancelled").read_text() == "--quiet --name=clusterenv-abc\n"


@pytest.fixture
def silent_api(tmp_path):
    """A kubeconfig whose server takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.getsockname()[1]}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        yield path


def test_an_api_server_that_does_not_answer(silent_api, plan):
    backend = ce.Kubernetes(nodes=1, image="x", kubeconfig=str(silent_api))
    pods = _Pods(backend, plan, Api(str(silent_api)), "default")
    start = time.monotonic()
    with pytest.raises(ce.StartError, match="Kubernetes cannot be reached"):
        pods.stop(start + 1.0)
    assert time.monotonic() - start < 3.0


def test_gc_keeps_the_note_of_what_it_cannot_remove(slurm, silent_api, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("clusterenv.backends.gc._COLLECT_S", 0.3)
    server = json.loads(silent_api.read_text())["clusters"][0]["cluster"]["server"]
    facts = {
        "slurm": {"name": "clusterenv-a", "conf": None},
        "kubernetes": {
            "kubeconfig": str(silent_api),
            "context": "x",
            "server": server,
            "namespace": "default",
            "run": "b",
        },
        "magic": {},
    }
    (slurm / "hang-scancel").touch()
    folders = [closed_run(tmp_path, kind, {kind: facts[kind]}) for kind in facts]
    assert main(["gc", "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert all(folder.exists() for folder in folders)
    assert "scancel did not answer" in told and "Kubernetes cannot be reached" in told and "'magic'" in told
    assert "3 could not be removed" in told


def closed_run(place: Path, name: str, jobs) -> Path:
    """The folder of a run that was closed and left these."""
    path = place / f"clusterenv-{name}"
    path.mkdir()
    note = {"run": name, "host": "h", "machine": "m", "pid": 1, "started": "1", "lease_s": 60, "left": "it hung"}
    (path / "head.json").write_text(json.dumps({**note, "jobs": jobs}))
    return path
