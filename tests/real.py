"""Real clusters for tests that ask for them by marker: started before the first of these, ended after the last.

Before the tests, because a leak check around each would blame the first one for the cluster.
"""

from __future__ import annotations

import contextlib
from typing import Any

KINDS = ("slurm", "ray", "kubernetes")
running: dict[str, Any] = {}
_stack = contextlib.ExitStack()


def start(kinds: set[str]) -> None:
    if "slurm" in kinds:
        from slurm_cluster import SlurmCluster

        running["slurm"] = _stack.enter_context(SlurmCluster())


def daemons() -> set[int]:
    """Processes of the clusters themselves, which a test may kill and start again."""
    return {pid for cluster in running.values() for pid in cluster.pids}


def stop() -> None:
    _stack.close()
    running.clear()
