"""An environment that writes down its seeds, for runs whose head is killed; and scripts that use it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SUPPORT = str(Path(__file__).parent)


class WritesSeeds(gym.Wrapper):
    """Writes every seed that it is reset with to a file, before anything else happens."""

    def __init__(self, env: gym.Env, ledger: str) -> None:
        super().__init__(env)
        self._ledger = ledger

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            with open(self._ledger, "ab", buffering=0) as file:  # noqa: PTH123
                file.write(b"%d\n" % seed)
        return super().reset(seed=seed, options=options)


class Fragile(gym.Env):
    """Never ends an episode; raises in its `fails_at`-th step."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fails_at: int = 0) -> None:
        self._fails_at, self._steps = fails_at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(3, dtype=np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == self._fails_at:
            raise RuntimeError("fails once in a while")
        return self.np_random.random(3, dtype=np.float32), 1.0, False, False, {}


def make(ledger: str, fails_at: int = 0) -> gym.Env:
    return WritesSeeds(Fragile(fails_at), ledger)


def read(ledger: Path) -> list[int]:
    """Return the seeds in the order in which they were used; a last line that is cut off is left out."""
    return [int(line) for line in ledger.read_bytes().split(b"\n")[:-1]] if ledger.exists() else []


def repeated(seeds: list[int]) -> list[int]:
    return [seed for seed, times in Counter(seeds).items() if times > 1]


def environment() -> dict[str, str]:
    """For scripts that import this module."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])}
