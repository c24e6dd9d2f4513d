"""`BareLoop`: an environment with a method that steps it in a loop which records and sends nothing. Runs in workers.

Apart from `bare.py`, so that workers do not import the head's modules.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from clusterenv.spec import refuse_other

__all__ = ["BareLoop", "Loop", "Made"]

_ACTIONS = 512
_KEPT_STEPS = 2000
"""How many single step times a loop returns, at most."""


class Loop(NamedTuple):
    """What one loop counted."""

    steps: int
    elapsed_s: float
    cpu_s: float
    """Of all threads."""
    queued_s: float
    """How long the process could have computed, had others not had the cores."""
    step_s: Any  # [<= _KEPT_STEPS]
    resets: int
    reset_s: float  # of all resets
    lengths: list[int]


class Made(NamedTuple):
    """What making a second environment in the same process took."""

    make_s: float
    memory_bytes: int
    is_single: bool


class BareLoop(gym.Env[Any, Any]):
    """An environment with a method that steps it in a loop."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._env = make()
        refuse_other(self._env, make)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.metadata = getattr(self._env, "metadata", {})
        self._actions: list[Any] = []
        self._length = 0
        self._made = _make_another(make)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()

    def made(self) -> Made:
        return self._made

    def loop(self, seconds: float) -> Loop:
        """Step for this time; episodes go on from call to call. The actions are drawn before."""
        env = self._env
        if not self._actions:
            self.action_space.seed(0)
            self._actions = [self.action_space.sample() for _ in range(_ACTIONS)]
            env.reset(seed=0)
        step_s, lengths, reset_s = [], [], 0.0
        actions = itertools.cycle(self._actions)
        clock = time.perf_counter
        cpu, queued = time.process_time(), _queued_s()
        begin = now = clock()
        until = begin + seconds
        while True:
            _, _, terminated, truncated, _ = env.step(next(actions))
            after = clock()
            step_s.append(after - now)
            now = after
            self._length += 1
            if terminated or truncated:
                env.reset()
                after = clock()
                reset_s += after - now
                now = after
                lengths.append(self._length)
                self._length = 0
            if now >= until:
                break
        cpu, queued = time.process_time() - cpu, _queued_s() - queued
        kept = np.array(step_s)
        if len(kept) > _KEPT_STEPS:
            kept = np.random.default_rng(0).choice(kept, _KEPT_STEPS, replace=False)
        return Loop(len(step_s), now - begin, cpu, queued, kept, len(lengths), reset_s, lengths)


def _make_another(make: Callable[[], Any]) -> Made:
    """Make a second environment, and close it: the first one also imports packages."""
    before, begin = _resident_bytes(), time.perf_counter()
    try:
        other = make()
        other.reset(seed=0)
    except Exception:  # simulators with one port, window or license per process raise anything
        return Made(time.perf_counter() - begin, 0, True)
    made = Made(time.perf_counter() - begin, max(0, _resident_bytes() - before), False)
    other.close()
    return made


def _queued_s() -> float:
    """Return how long this process has been ready to run, but waited for a core."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError):  # a kernel without these figures
        return 0.0


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
