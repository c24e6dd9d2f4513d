"""Environments for tests of Gymnasium's vector API: custom spaces, autoreset, calls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Anything(spaces.Space):
    """A space without shape or dtype, of a class that Gymnasium does not know."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "abc"[self.np_random.integers(3)]

    def contains(self, x: Any) -> bool:
        return 0 <= x <= 10  # like the one in Gymnasium's tests, which does not fit its environment's values

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Anything)


class Echo(gym.Env):
    """An environment whose observation is its last call as text. The action `FAIL` raises."""

    FAIL = "fail"

    def __init__(self) -> None:
        self.observation_space = Anything()
        self.action_space = Anything()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "reset", {"seeded": seed is not None}

    def step(self, action):
        if action == self.FAIL:
            raise RuntimeError("as asked")
        return f"step({action:s})", 1.0, action == "end", False, {}


class History(gym.Env):
    """An environment whose observation is one list, which grows with every step."""

    observation_space = spaces.Sequence(spaces.Discrete(99))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = [0]
        return self.seen, {}

    def step(self, action):
        self.seen.append(len(self.seen))
        return self.seen, 0.0, False, False, {}


class Counter(gym.Env):
    """An environment whose observation is its number of steps, and whose reward is the action. `FAIL` raises."""

    FAIL = 9
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(10)

    def __init__(self, slot: int) -> None:
        self.slot, self.length, self.added = slot, 1000, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.count, {"slot": self.slot}

    def step(self, action):
        if action == self.FAIL:
            raise RuntimeError("as asked")
        self.count += 1
        return self.count, float(action), self.count == self.length, False, {"last": np.int64(action)}

    def add(self, number, times=1):
        self.added += number * times
        return self.added + self.slot

    def hands(self, slots):
        return slots


class Gated(Counter):
    """Waits in every call until the file `gate` exists."""

    def __init__(self, slot: int, gate: str) -> None:
        super().__init__(slot)
        self.gate = Path(gate)

    def reset(self, *, seed=None, options=None):
        self.passed()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.passed()
        return super().step(action)

    def passed(self):
        while not self.gate.exists():
            time.sleep(0.005)
        return self.slot
