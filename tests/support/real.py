"""Real clusters for tests that request them by marker: started before the first of these, ended after the last.

They start outside of tests, because the leak check around each test would blame the first one for the cluster.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

KINDS = ("slurm", "gridengine", "ray", "kubernetes")
running: dict[str, Any] = {}
_stack = contextlib.ExitStack()


def start(kinds: set[str]) -> None:
    if "slurm" in kinds:
        from slurm_cluster import SlurmCluster

        running["slurm"] = _stack.enter_context(SlurmCluster())

    if "gridengine" in kinds:
        from grid_engine import GridEngine

        running["gridengine"] = _stack.enter_context(GridEngine())

    if "ray" in kinds:
        from ray_cluster import RayCluster

        running["ray"] = _stack.enter_context(RayCluster())
        import ray

        # Once, and not in each test: what it keeps open must not count as a test's leak.
        ray.init(running["ray"].address, log_to_driver=False)
        _stack.callback(ray.shutdown)

        class First:  # within a function, so that it is pickled by value
            def call(self) -> None: ...

        first = [ray.remote(First).options(num_cpus=1, scheduling_strategy="SPREAD").remote() for _ in range(4)]
        ray.get([actor.call.remote() for actor in first])  # opens what Ray opens for the first actors
        for actor in first:
            ray.kill(actor)

    if "kubernetes" in kinds:
        from kube import KubeCluster

        running["kubernetes"] = _stack.enter_context(KubeCluster(mounts=[Path(tempfile.gettempdir())]))


def daemons() -> set[int]:
    """Return the processes of the clusters themselves, which a test may kill and restart."""
    return {pid for cluster in running.values() for pid in getattr(cluster, "pids", ())}


def stop() -> None:
    _stack.close()
    running.clear()
