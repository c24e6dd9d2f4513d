"""The environments of a simulated run: their observations are numbers in the ledger; their faults are drawn."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from simulation.world import Died, Hangs, Produced, World

__all__ = ["ACTIONS", "SimulatedEnv", "SimulatedRows", "SimulatedVector"]

ACTIONS = 3
OBSERVATION_SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float64)
ACTION_SPACE = spaces.Discrete(ACTIONS)


class SimulatedEnv(gym.Env[Any, Any]):
    """Episodes of a drawn length. Reward and observation are the number of the transition."""

    observation_space = OBSERVATION_SPACE
    action_space = ACTION_SPACE

    def __init__(self, world: World, slot: int) -> None:
        self.world = world
        self.slot = slot
        self.number = world.new_env(slot)
        self.episode = -1
        self.last = 0
        self.t = 0
        self.total = 0.0
        self.mark = 0
        self.metadata = {}
        self.render_mode = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._fault("reset")
        self.world.envs[self.number].seed = seed
        self.episode += 1
        self.t, self.total, self.last = 0, 0.0, 0
        obs = self._produce(0, False, False)
        self._fault_after("reset")
        return obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._fault("step")
        self.t += 1
        choices = self.world.choices
        end = choices.draw(12) if not self.world.envs[self.number].is_evaluating else 10 * (self.t >= 2)
        obs = self._produce(int(action), end == 10, end == 11)
        self._fault_after("step")
        if self.world.happens("nan"):
            self.world.event("nan", f"slot {self.slot}")
            obs = np.array([np.nan, np.nan])
        return obs, float(self.last), end == 10, end == 11, {"number": self.last} if end == 9 else {}

    def identify(self) -> tuple[int, int]:
        """Return slot and number; called through `ClusterEnv.call`."""
        return self.identity

    @property
    def identity(self) -> tuple[int, int]:
        self._fault("call")
        return self.slot, self.number

    def close(self) -> None:
        self.world.env_gone(self.number)

    def _produce(self, action: int, terminated: bool, truncated: bool) -> Any:
        world = self.world
        number = len(world.produced) + 1
        self.total += number if self.t else 0.0
        world.produce(
            Produced(
                number,
                self.slot,
                self.number,
                self.episode,
                self.t,
                self.last,
                action,
                terminated,
                truncated,
                self.total,
                self.mark,
            )
        )
        self.last = number
        return np.array([number, number % 5], np.float64)

    def _fault(self, phase: str) -> None:
        world = self.world
        world.at = (self.slot, phase)
        if world.happens("raise") or (self._is_coming_back(phase) and world.happens("raise in reset")):
            world.event("raise", f"slot {self.slot} in {phase}")
            raise ValueError(f"planned in {phase}")
        if world.happens("die"):
            world.event("die", f"slot {self.slot} in {phase}")
            raise Died
        if world.happens("hang"):
            world.event("hang", f"slot {self.slot} in {phase}")
            raise Hangs
        if world.happens("slow"):
            world.clock.now_s += 0.002
        if world.happens("part"):
            world.clock.now_s += 0.0011

    def _is_coming_back(self, phase: str) -> bool:
        return phase == "reset" and self.episode < 0 and not self.world.envs[self.number].is_evaluating

    def _fault_after(self, phase: str) -> None:
        world = self.world
        if world.happens("raise_after"):
            world.event("raise", f"slot {self.slot} after {phase}")
            raise ValueError(f"planned after {phase}")


class SimulatedVector(VectorEnv[Any, Any, Any]):
    """The environments of consecutive slots as one vector environment, which fails as a whole."""

    single_observation_space = OBSERVATION_SPACE
    single_action_space = ACTION_SPACE

    def __init__(self, world: World, first: int, num_envs: int, mode: AutoresetMode) -> None:
        self.num_envs = num_envs
        self.observation_space = batch_space(OBSERVATION_SPACE, num_envs)
        self.action_space = batch_space(ACTION_SPACE, num_envs)
        self.metadata = {"autoreset_mode": mode}
        self.render_mode = None
        self.mode = mode
        self.envs = [SimulatedEnv(world, first + i) for i in range(num_envs)]
        self._over = [False] * num_envs
        self._obs = np.zeros((num_envs, 2))

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask", [True] * self.num_envs)
        for i in np.flatnonzero(mask):
            self._obs[i], _ = self.envs[i].reset(seed=None if seed is None else seed[i])
            self._over[i] = False
        return self._obs.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._step(list(range(self.num_envs)), actions)

    def _step(self, rows: list[int], actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step some of the environments; their results in this order."""
        rewards = np.zeros(len(rows))
        ends = np.zeros((2, len(rows)), dtype=np.bool_)
        infos: dict[str, Any] = {}
        for i, row in enumerate(rows):
            env = self.envs[row]
            if self._over[row] and self.mode is AutoresetMode.NEXT_STEP:
                self._obs[row], _ = env.reset()
                self._over[row] = False
                continue
            self._obs[row], rewards[i], ends[0, i], ends[1, i], info = env.step(actions[i])
            self._over[row] = bool(ends[:, i].any())
            if self._over[row] and self.mode is AutoresetMode.SAME_STEP:
                info = {"final_obs": self._obs[row].copy(), "final_info": info}
                self._obs[row], _ = env.reset()
            infos = self._add_info(infos, info, i)
        return self._obs[rows], rewards, *ends, infos

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = [getattr(env, name) for env in self.envs]
        return tuple(each(*args, **kwargs) if callable(each) else each for each in found)

    def set_attr(self, name: str, values: Any) -> None:
        for env, value in zip(self.envs, values, strict=True):
            setattr(env, name, value)

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()


class SimulatedRows(SimulatedVector):
    """A vector environment whose environments can be stepped apart; which of them are done first is drawn."""

    def __init__(self, world: World, first: int, num_envs: int, mode: AutoresetMode) -> None:
        super().__init__(world, first, num_envs, mode)
        self._world = world
        self._sent: dict[int, Any] = {}

    def send_rows(self, actions: Any, rows: Any) -> None:
        assert not self._sent.keys() & set(rows.tolist()), "an environment is stepped that has not stepped yet"
        self._sent |= dict(zip(rows.tolist(), actions, strict=True))

    def recv_rows(self) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        draw = self._world.choices.draw
        rows = [row for row in self._sent if draw(2)] or [next(iter(self._sent))]
        actions = [self._sent.pop(row) for row in rows]
        return np.array(rows), *self._step(rows, actions)
