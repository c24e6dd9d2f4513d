"""Small environments and comparisons shared by tests; importable in workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def linear(weights: Any, obs: Any) -> Any:
    """Run the forward pass of a policy, in a module that does not import torch."""
    return obs @ weights["w"]


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert that both are equal in structure, types, dtypes and values."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        assert isinstance(a, np.ndarray) and isinstance(b, np.ndarray), (where, type(a), type(b))
        assert a.dtype == b.dtype and a.shape == b.shape, (where, a.dtype, b.dtype, a.shape, b.shape)
        if a.dtype == object:
            for i, (x, y) in enumerate(zip(a.flat, b.flat, strict=True)):
                same(x, y, f"{where}[{i}]")
        else:
            assert np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"), (where, a, b)
    elif isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys(), (where, a, b)
        for key in a:
            same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (tuple, list)):
        assert type(a) is type(b) and len(a) == len(b), (where, a, b)
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    else:
        assert type(a) is type(b), (where, type(a), type(b), a, b)
        assert a == b, (where, a, b)


class SpaceEnv(gym.Env):
    """An environment that draws observations from any space with its own generator; not every step has all infos."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, observation_space, action_space, length=5, info="none", truncates=False):
        self.observation_space = observation_space
        self.action_space = action_space
        self.length = length
        self.info = info
        self.truncates = truncates
        self.render_mode = "rgb_array"
        self.bonus = 0.0
        self.last_action = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.last_action = None
        return self._obs(), self._info({"options": options is not None} if self.info != "none" else {})

    def step(self, action):
        self.t += 1
        moved = 0.0 if self.last_action is None else _number(action) - _number(self.last_action)
        self.last_action = action
        end = self.t >= self.length
        reward = _number(action) + moved + self.bonus
        return self._obs(), reward, end and not self.truncates, end and self.truncates, self._info({})

    def _obs(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def _info(self, extra):
        if self.info == "none":
            return extra
        rich = {"t": self.t, "share": self.t / self.length, **extra}
        if self.info == "rich":
            rich["array"] = self.np_random.random(3).astype(np.float32)
            rich["nested"] = {"name": f"t{self.t}", "deep": {"flag": self.t % 2 == 0}}
            rich["nothing"] = None
            if self.t % 3 == 1:
                rich["sometimes"] = np.float32(self.np_random.random())
        return rich

    def render(self):
        return np.full((2, 2, 3), self.t, dtype=np.uint8)

    def add(self, x, y=0):
        return x + y + self.t


def _number(action: Any) -> float:
    """Return any action as one number."""
    if isinstance(action, dict):
        return sum(_number(v) for v in action.values())
    if isinstance(action, (tuple, list)):
        return sum(_number(v) for v in action if v is not None)
    if isinstance(action, str):
        return float(sum(map(ord, action)))
    return float(np.asarray(action, dtype=np.float64).sum())


class Trouble(gym.Env):
    """Counts its steps; fails at a chosen step of its first incarnation.

    The observation is (slot, incarnation seen by this object, episode, t). A file counts the incarnations, so that the
    replacement does not fail again unless `always`.
    """

    observation_space = spaces.Box(-1e6, 1e6, (4,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, slot=0, what=None, at=3, memory=None, always=False, length=10):
        self.slot, self.what, self.at, self.length = slot, what, at, length
        self.memory, self.always = memory, always
        self.episode = -1
        self.t = 0
        self.life = 0
        if memory is not None:
            path = Path(f"{memory}.{slot}")
            with path.open("a") as file:
                file.write("x")
            self.life = path.stat().st_size - 1
        if what == "raise_in_init":
            raise OSError("no simulator licence")

    def _obs(self):
        return np.array([self.slot, self.life, self.episode, self.t], dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        if self.what == "raise_in_reset" and (self.always or (self.life == 0 and self.episode == 1)):
            raise RuntimeError("reset failed")
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        if self.what and self.t == self.at and (self.always or self.life == 0):
            self._fail()
        obs = self._obs()
        if self.what == "nan" and self.t == self.at and (self.always or self.life == 0):
            obs[3] = np.nan
        if self.what == "shape" and self.t == self.at and (self.always or self.life == 0):
            obs = obs[:3]
        reward = float("inf") if self.what == "inf_reward" and self.t == self.at and self.life == 0 else 1.0
        return obs, reward, self.t >= self.length, False, {}

    def _fail(self):
        if self.what == "raise":
            raise ZeroDivisionError("simulator exploded")
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "segfault":
            import ctypes

            ctypes.string_at(0)
        if self.what == "exit":
            raise SystemExit(3)
        if self.what == "hang":
            time.sleep(1000)
        if self.what == "hang_with_gil":
            import ctypes

            ctypes.PyDLL(None).sleep(1000)
        if self.what == "slow":
            time.sleep(0.05)


class DiesOnce(gym.Wrapper):
    """Ends its worker process in the third step, unless it has done so before."""

    def __init__(self, env: gym.Env, marker: Path) -> None:
        super().__init__(env)
        self.marker = marker
        self.steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and not self.marker.exists():
            self.marker.touch()
            os._exit(1)
        return super().step(action)


class ReportsImports(gym.Env):
    """Tells which modules its process has imported, and how many threads it has."""

    observation_space, action_space = spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(5, np.float32), {}

    def step(self, action):
        return np.zeros(5, np.float32), 0.0, False, False, {}

    def imported(self, name):
        return name in sys.modules

    def native_threads(self):
        return len(os.listdir("/proc/self/task"))


class Hanging(gym.Wrapper):
    """Hangs in `where_it_hangs` as soon as the file `flag` exists."""

    def __init__(self, env, flag):
        super().__init__(env)
        self.flag = flag

    def step(self, action):
        if self.flag.exists():
            where_it_hangs()
        return super().step(action)


def where_it_hangs():
    time.sleep(60)
