"""Train with Stable-Baselines3 on a cluster of environments.

A Gymnasium `VectorEnv` that autoresets in the same step becomes an SB3 `VecEnv`, for any algorithm:

    from stable_baselines3 import PPO
    from clusterenv.integrations.sb3 import make_sb3

    PPO("MlpPolicy", make_sb3("CartPole-v1", num_envs=8)).learn(100_000)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from clusterenv.env import ClusterEnv
from clusterenv.errors import EnvError, SpecError
from clusterenv.integrations._rows import check_same_step, row_of, rows_of

try:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv, VecMonitor
except ImportError as error:
    raise ImportError('Stable-Baselines3 is not installed: pip install "clusterenv[sb3]"') from error

Indices = int | Iterable[int] | None


def make_sb3(env: Any, num_envs: int | None = None, *, monitor: bool = True, **kwargs: Any) -> VecEnv:
    """Return `ClusterEnv(env, num_envs, **kwargs)` for Stable-Baselines3.

    Like SB3's `make_vec_env`, it records the episodes' returns and lengths, unless the environments already have
    SB3's `Monitor` or `monitor=False`.

    >>> envs = make_sb3("CartPole-v1", num_envs=4)
    >>> envs.reset().shape
    (4, 4)
    >>> envs.close()
    """
    envs = SB3VecEnv(ClusterEnv(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **kwargs))
    if monitor and not any(envs.env_is_wrapped(Monitor)):
        return _WholeEpisodesMonitor(envs)
    return envs


class SB3VecEnv(VecEnv):
    """An SB3 `VecEnv` over any Gymnasium `VectorEnv` in `SAME_STEP` autoreset.

    If an environment or its worker was lost, the step's info has `transition_valid=False`, and
    `terminal_observation` is the last observation that arrived: SB3 bootstraps from it, as at a time limit, and never
    joins two episodes.

    >>> envs = SB3VecEnv(ClusterEnv("CartPole-v1", 2, autoreset_mode=AutoresetMode.SAME_STEP))
    >>> envs.num_envs
    2
    >>> envs.close()
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        check_same_step(envs, "Stable-Baselines3 needs ended episodes reset in the same step")
        self.envs: Any = envs
        self._actions: Any = None
        self._obs: Any = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Reset all environments; the seeds of `seed()` and the options of `set_options()` are used once."""
        seeds = self._seeds if any(seed is not None for seed in self._seeds) else None
        options = self._options[0]
        if any(other != options for other in self._options):
            raise SpecError("set_options with different options per environment: a VectorEnv takes one for all")
        self._obs, infos = self.envs.reset(seed=seeds, options=options or None)
        self.reset_infos = rows_of(infos, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return self._obs

    def step_async(self, actions: Any) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        before = self._obs
        self._obs, rewards, terminations, truncations, infos = self.envs.step(self._actions)
        dones = np.logical_or(terminations, truncations)
        rows = rows_of(infos, self.num_envs)
        timeouts = np.logical_and(truncations, ~np.asarray(terminations)).tolist()
        for row, timeout in zip(rows, timeouts, strict=True):
            row["TimeLimit.truncated"] = timeout
        for i in np.flatnonzero(dones):
            rows[i] = self._ended(int(i), rows[i], before)
        return self._obs, np.asarray(rewards, dtype=np.float32), dones, rows

    def _ended(self, i: int, row: dict[str, Any], before: Any) -> dict[str, Any]:
        """Return the info of the step that ended the episode; the rest of the row belongs to the following reset."""
        timeout = row.pop("TimeLimit.truncated")
        last = row.pop("final_obs", None)
        ended: dict[str, Any] = row.pop("final_info", {})
        for key in ("transition_valid", "worker_lost", "loss_reason"):
            if key in row:
                ended[key] = row.pop(key)
        self.reset_infos[i] = row
        ended["TimeLimit.truncated"] = timeout
        ended["terminal_observation"] = row_of(before, i) if last is None else last
        return ended

    def close(self) -> None:
        self.envs.close()

    def get_images(self) -> Sequence[Any]:
        if self.render_mode != "rgb_array":
            warnings.warn(f"render_mode is {self.render_mode}: images need rgb_array", stacklevel=2)
            return [None] * self.num_envs
        frames = self.envs.render()
        return [None] * self.num_envs if frames is None else list(frames)

    def has_attr(self, attr_name: str) -> bool:
        try:
            self.get_attr(attr_name)
        except (AttributeError, EnvError):
            return False
        return True

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        if attr_name == "render_mode":  # SB3 reads it in its constructor; asking workers would cost a round trip
            values: Sequence[Any] = [self.envs.render_mode] * self.num_envs
        elif indices is not None and isinstance(self.envs, ClusterEnv):
            return list(self.envs.get_attr(attr_name, list(self._get_indices(indices))))
        else:
            values = self.envs.get_attr(attr_name)
        return [values[i] for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        chosen = sorted(set(self._get_indices(indices)))
        if len(chosen) == self.num_envs:
            self.envs.set_attr(attr_name, [value] * self.num_envs)
        elif isinstance(self.envs, ClusterEnv):
            self.envs.set_attr(attr_name, [value] * len(chosen), chosen)
        else:  # other vector environments set all, so the rest get their present values
            values = list(self.get_attr(attr_name))
            for i in chosen:
                values[i] = value
            self.envs.set_attr(attr_name, values)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of every environment; `indices` must be all, because a `VectorEnv` cannot call only some."""
        chosen = list(self._get_indices(indices))
        if sorted(chosen) != list(range(self.num_envs)):
            raise SpecError(f"env_method({method_name!r}, indices={chosen}): a VectorEnv calls all environments")
        results = self.envs.call(method_name, *method_args, **method_kwargs)
        return [results[i] for i in chosen]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Indices = None
    ) -> list[bool]:
        """Return whether each environment has that wrapper, compared by name: the objects stay on the workers."""
        names = _names(wrapper_class)
        texts = self.envs.call("__str__")
        return [not names.isdisjoint(_wrappers(texts[i])) for i in self._get_indices(indices)]


class _WholeEpisodesMonitor(VecMonitor):
    """SB3's `VecMonitor` without the episodes that were lost with an environment or a worker."""

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        obs, rewards, dones, infos = super().step_wait()
        for i in np.flatnonzero(dones):
            if not infos[i].get("transition_valid", True):
                del infos[i]["episode"]
        return obs, rewards, dones, infos


def _names(cls: type) -> set[str]:
    subclasses: list[type] = cls.__subclasses__()
    return {cls.__name__}.union(*map(_names, subclasses))


def _wrappers(text: str) -> list[str]:
    """Return the names in `<TimeLimit<OrderEnforcing<CartPoleEnv<CartPole-v1>>>>`, as Gymnasium prints it."""
    nested = re.match(r"(?:<\w+)*", text)
    return nested.group().split("<")[1:] if nested else []
