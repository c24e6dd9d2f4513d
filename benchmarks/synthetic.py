"""Environments with a known cost: `bench/Pixels-v0`, `bench/Stragglers-v0` and `bench/Burn-v0`.

Importing this module registers the ids with Gymnasium. Worker processes load the classes by name, so the repository's
root must be on their path; the runner sets it.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

EPISODE_STEPS = 200
FRAME_SHAPE = (84, 84, 4)
BURN_S = 100e-6
LONG_BURN_S = 3e-3
STEP_S = 1e-3
SLOW_STEP_S = 10e-3
SLOW_SHARE = 0.1


class Pixels(gym.Env[np.ndarray, np.int64]):
    """Burns 100 µs of CPU and returns a fresh frame: the cost and the traffic of an Atari-like game."""

    observation_space = spaces.Box(0, 255, FRAME_SHAPE, np.uint8)
    action_space = spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._shade = 0
        return self._frame(), {}

    def step(self, action: np.int64):
        # CPU time, not wall time: a process that is preempted here must not get that time for free.
        until = time.thread_time() + BURN_S
        self._shade = (self._shade + 1) % 256
        frame = self._frame()
        while time.thread_time() < until:
            pass
        return frame, 1.0, False, False, {}

    def _frame(self) -> np.ndarray:
        return np.full(FRAME_SHAPE, self._shade, np.uint8)


class Stragglers(gym.Env[np.ndarray, np.int64]):
    """Sleeps 1 ms a step, and 10 ms in one step of ten, chosen by the environment's seed."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64):
        time.sleep(SLOW_STEP_S if self.np_random.random() < SLOW_SHARE else STEP_S)
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Burn(gym.Env[np.ndarray, np.int64]):
    """Burns 3 ms of CPU a step: a simulator that costs much more than everything around it."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64):
        until = time.thread_time() + LONG_BURN_S
        while time.thread_time() < until:
            pass
        return np.zeros(4, np.float32), 1.0, False, False, {}


gym.register("bench/Pixels-v0", "benchmarks.synthetic:Pixels", max_episode_steps=EPISODE_STEPS)
gym.register("bench/Stragglers-v0", "benchmarks.synthetic:Stragglers", max_episode_steps=EPISODE_STEPS)
gym.register("bench/Burn-v0", "benchmarks.synthetic:Burn", max_episode_steps=EPISODE_STEPS)
