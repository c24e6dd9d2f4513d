"""Environments that fail occasionally and record their seeds, for runs whose head is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tools.seed_ledger import WritesSeeds, read, repeated

__all__ = ["Fragile", "environment", "make", "read", "repeated"]

_PATH = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


class Fragile(gym.Env):
    """An environment with endless episodes that raises in its `fails_at`-th step."""

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


def environment() -> dict[str, str]:
    """Return the environment variables for scripts that import this module."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*_PATH, os.environ.get("PYTHONPATH", "")])}
