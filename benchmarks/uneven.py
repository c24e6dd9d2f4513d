"""Measure two nodes of which one is half as fast: `python -m benchmarks.uneven [--seconds S] [--json FILE]`.

A step takes 4 ms on the fast node and 8 ms on the slow one, spent asleep, so that a busy machine changes little. The
sum of speeds is that of each node alone, measured first, with the same rate of the slow node. `rollout`, balanced
`rollout`, `rollout(deadline_s=...)` and `stream` are compared with it, by steps per second after a warm-up; then the
same while the slow node becomes the fast one, and the other way round, every few seconds (what OmniLearn, arXiv
2503.17469, calls varying availability).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import clusterenv as ce

FAST_S, SLOW_S = 0.004, 0.008
ENVS_PER_NODE = 4
STEPS = 64
WARM_S = 3.0
SWITCH_S = 10.0
"""How long one node stays the slow one where it changes."""


class Timed(gym.Env[Any, int]):
    """Takes `FAST_S` or `SLOW_S` for a step, divided by the environments of its node, which step one after another."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    due_s = 0.0
    """When the step of the environment before this one was to end; of all environments of a process."""

    def __init__(self, node: int, changes_from: float | None) -> None:
        self._node, self._changes_from = node, changes_from

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> Any:
        slow = 1
        if self._changes_from is not None:
            slow = 1 - int((time.monotonic() - self._changes_from) / SWITCH_S) % 2
        step_s = (SLOW_S if self._node == slow else FAST_S) / ENVS_PER_NODE
        now = time.perf_counter()
        # Sleeps end late; what a sleep took too long is taken from the next one.
        Timed.due_s = max(Timed.due_s, now - step_s) + step_s
        time.sleep(max(0.0, Timed.due_s - now))
        return np.zeros(4, np.float32), 1.0, False, False, {}


@contextmanager
def opened(nodes: list[int], changes_from: float | None = None) -> Iterator[ce.Collector]:
    thunks = [lambda node=node: Timed(node, changes_from) for node in nodes for _ in range(ENVS_PER_NODE)]
    backend = ce.Loopback(nodes=len(nodes), workers_per_node=1)
    with ce.ClusterEnv(thunks, backend=backend) as envs:
        yield envs.collector(ce.RandomPolicy(), seed=1)


def rate(collector: ce.Collector, seconds: float, take: Callable[[], ce.Rollout]) -> float:
    """Return valid rows per second, after a warm-up."""
    begin = time.monotonic()
    while time.monotonic() - begin < WARM_S:
        take()
    begin, rows = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        rows += int(np.count_nonzero(take().valid))
    return rows / (time.monotonic() - begin)


def streamed(nodes: list[int], seconds: float, changes_from: float | None = None) -> float:
    with opened(nodes, changes_from) as collector, closing(collector.stream(STEPS)) as batches:
        return rate(collector, seconds, lambda: next(batches))


def rolled(seconds: float, changes: bool, **options: Any) -> float:
    with opened([0, 1], time.monotonic() if changes else None) as collector:
        return rate(collector, seconds, lambda: collector.rollout(STEPS, **options))


def shares(seconds: float, changes: bool, total: float) -> Iterator[tuple[str, float]]:
    late_s = STEPS * FAST_S * 1.1
    yield "rollout", rolled(seconds, changes) / total
    yield "rollout(balance=True)", rolled(seconds, changes, balance=True) / total
    yield f"rollout(deadline_s={late_s:.2f})", rolled(seconds, changes, deadline_s=late_s) / total
    yield "stream", streamed([0, 1], seconds, time.monotonic() if changes else None) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    alone = [streamed([node], options.seconds) for node in (0, 1)]
    found: dict[str, Any] = {"alone": alone}
    print(f"alone: {alone[0]:.0f} and {alone[1]:.0f} steps/s", flush=True)
    for changes in (False, True):
        for name, share in shares(options.seconds, changes, sum(alone)):
            name += ", changing" if changes else ""
            found[name] = share
            print(f"{name:36s} {share:.3f} of the sum", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
