"""The contract that every backend passes, over the backends of this package."""

from __future__ import annotations

import subprocess

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

    def left_behind(self):
        command = ["squeue", "--noheader", "--format=%j %T"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


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
        """The agent is process 1 of its pod, which nobody inside can kill."""
        name = next(name for name in self.left_behind() if name.startswith("pod/") and "-0-1" in name)
        real.running["kubernetes"].kubectl("delete", "--wait=false", "--grace-period=0", "--force", name)

    def left_behind(self):
        label = "app.kubernetes.io/name=clusterenv"
        return real.running["kubernetes"].kubectl("get", "pod,secret,configmap", "-l", label, "-o", "name").split()
