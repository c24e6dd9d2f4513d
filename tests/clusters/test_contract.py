"""The contract that every backend passes, over the backends of this package."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time

import psutil
import pytest

import clusterenv as ce
import real
from clusterenv.testing.backends import BackendContract
from namespace_cluster import pods


@pytest.mark.network
class TestLoopback(BackendContract):
    def make_backend(self, folder, **options):
        return ce.Loopback(folder=str(folder), **options)


@pytest.mark.slurm
class TestSlurm(BackendContract):
    def make_backend(self, folder, **options):
        return ce.Slurm(interface="lo", folder=str(folder), extra={"exclusive": None}, **options)

    def ask_to_leave(self, envs, slot, after_s):
        (place,) = envs.call("place", slots=[slot])
        job = psutil.Process(place["agent"]).environ()["SLURM_JOB_ID"]
        threading.Timer(after_s, subprocess.run, (["scancel", job],), {"check": True}).start()

    def left_behind(self):
        command = ["squeue", "--noheader", "--format=%j %T"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.gridengine
class TestGridEngine(BackendContract):
    def make_backend(self, folder, **options):
        # Grid Engine's jobs inherit no variables; the tests may run from a source tree.
        paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        return ce.Command.sge(bind="lo", folder=str(folder), poll_s=1.0, env_vars=paths, **options)

    def ask_to_leave(self, envs, slot, after_s):
        (place,) = envs.call("place", slots=[slot])
        job = psutil.Process(place["agent"]).environ()["JOB_ID"]
        threading.Timer(
            after_s, subprocess.run, (["qdel", job],), {"check": True, "stdout": subprocess.DEVNULL}
        ).start()

    def left_behind(self):
        return real.running["gridengine"].queue()


@pytest.mark.ray
class TestRay(BackendContract):
    def make_backend(self, folder, **options):
        return ce.Ray(bind="lo", folder=str(folder), address=real.running["ray"].address, **options)

    def left_behind(self):
        from ray.util import list_named_actors

        return [actor["name"] for actor in list_named_actors(all_namespaces=True)]


@pytest.mark.kubernetes
class TestKubernetes(BackendContract):
    def make_backend(self, folder, **options):
        return pods(real.running["kubernetes"], folder=str(folder), **options)

    def kill_node(self, envs, slot):
        """The agent is process 1 of its pod, which nobody inside can kill; deleting the pod would warn it."""
        pod = self._pod()
        (agent,) = [process for process in psutil.Process().children(recursive=True) if is_agent(process, pod)]
        killed_at = time.time()
        agent.kill()
        return killed_at

    def ask_to_leave(self, envs, slot, after_s):
        command = ("delete", "--wait=false", f"pod/{self._pod()}")
        threading.Timer(after_s, real.running["kubernetes"].kubectl, command).start()

    def _pod(self):
        """The first one of node 0, which has slot 0."""
        (name,) = [name.removeprefix("pod/") for name in self._get("pod") if name.endswith("-0-1")]
        return name

    def _get(self, kinds, *options):
        label = "app.kubernetes.io/name=clusterenv"
        return real.running["kubernetes"].kubectl("get", kinds, "-l", label, "-o", "name", *options).split()

    def left_behind(self):
        return self._get("pod,secret,configmap")

    def running(self):
        """Pods whose containers have ended stay until their run is removed."""
        return self._get("pod", "--field-selector=status.phase=Running")


def is_agent(process, pod):
    with contextlib.suppress(psutil.NoSuchProcess):
        return "--mounted" in process.cmdline() and process.environ().get("HOSTNAME") == pod
    return False
