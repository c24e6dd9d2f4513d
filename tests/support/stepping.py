"""Step environments while nodes come and go."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import clusterenv as ce


def kinds(envs: ce.ClusterEnv) -> list[str]:
    return [event.kind for event in envs.events()]


def joined(envs: ce.ClusterEnv) -> int:
    """Return how often a node joined."""
    return kinds(envs).count("node_joined")


def step_until(envs: ce.ClusterEnv, condition: Callable[[], bool], timeout_s: float = 60.0) -> tuple[float, list[int]]:
    """Step until the condition holds; return the seconds that it took, and the slots reported lost on the way."""
    begin, lost = time.monotonic(), []
    while not condition():
        assert time.monotonic() - begin < timeout_s, envs.events()
        infos = envs.step(np.zeros(envs.num_envs, np.int64))[4]
        if "transition_valid" in infos:
            lost += np.flatnonzero(~infos["transition_valid"]).tolist()
    return time.monotonic() - begin, lost
