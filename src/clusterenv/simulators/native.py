"""Find the vector form of an environment: `ClusterEnv("ALE/Pong-v5", num_envs=256, simulator="native")`.

EnvPool has some environments under Gymnasium's names; others are registered with a `vector_entry_point`, such as the
Atari games of ale-py. Rewards and dynamics are those of the environment; random numbers are the simulator's own, and
Atari games come as ale-py and EnvPool preprocess them (84 x 84, grey, four frames).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from clusterenv.errors import SpecError
from clusterenv.events import emit
from clusterenv.simulators.envpool import envpool
from clusterenv.spec import Vector, find_spec

__all__ = ["Simulator", "native"]

Simulator = Literal["native", "envpool", "vector_entry_point"]


def native(env: str | EnvSpec, simulator: Simulator, env_kwargs: Mapping[str, Any] | None) -> Vector:
    """Return this environment as a `Vector`. Raises SpecError if there is no such form."""
    if not isinstance(env, (str, EnvSpec)):
        raise SpecError(f"simulator={simulator!r} goes with an environment id; for your own one, write Vector(fn)")
    spec, kwargs = find_spec(env), dict(env_kwargs or {})
    tried = []
    if simulator in ("native", "envpool"):
        reason = _not_in_envpool(spec.id)
        if reason is None:
            emit(logging.INFO, f"{spec.id}: EnvPool's C++ environment, one pool per worker")
            return envpool(spec.id, **kwargs)
        tried.append(reason)
    if simulator in ("native", "vector_entry_point"):
        if spec.vector_entry_point is not None:
            name = _name(spec.vector_entry_point)
            emit(logging.INFO, f"{spec.id}: the vector environment that it is registered with, {name}")
            return Vector(functools.partial(_EntryPoint, spec, kwargs))
        tried.append("it is registered without a vector_entry_point")
    raise SpecError(f"{spec.id} has no vector form for simulator={simulator!r}: {'; '.join(tried)}")


def _not_in_envpool(task_id: str) -> str | None:
    """Return why EnvPool does not have this environment; None: it has."""
    if importlib.util.find_spec("envpool") is None:
        return "EnvPool is not installed"
    import envpool as library

    return None if task_id in library.list_all_envs() else "EnvPool has no environment of this name"


if TYPE_CHECKING:
    _Wrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    _Wrapper = VectorWrapper  # not generic before Gymnasium 1.4


class _EntryPoint(_Wrapper):
    """The vector environment of a spec, with seeds in the form that it takes.

    Most take one integer, from which the random numbers of all their environments follow: how slots are divided among
    workers then matters. ale-py takes an array with a seed for each.
    """

    def __init__(self, spec: EnvSpec, kwargs: Mapping[str, Any], num_envs: int, seeds: Sequence[int]) -> None:
        entry: Any = spec.vector_entry_point
        takes = inspect.signature(load_env_creator(entry) if isinstance(entry, str) else entry).parameters
        given = dict(kwargs)
        if "autoreset_mode" in takes:  # needs no steps for resets
            given.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
        if "num_threads" in takes:  # by default one for each core, in each worker
            given.setdefault("num_threads", 1)
        mode = gym.VectorizeMode.VECTOR_ENTRY_POINT
        venv: VectorEnv[Any, Any, Any] = gym.make_vec(spec, num_envs, vectorization_mode=mode, **given)
        super().__init__(venv)
        self._takes_array = _name(entry).startswith("ale_py.")
        self._resets_some = self._takes_array or isinstance(venv.unwrapped, (SyncVectorEnv, AsyncVectorEnv))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments; of a list of seeds with None in it, only those of `reset_mask` count."""
        if not self._resets_some and not np.all((options or {}).get("reset_mask", True)):
            name = type(self.env.unwrapped).__name__
            raise ValueError(f"{name} ignores reset_mask, and would end the episodes of all its slots: reset them all")
        return self.env.reset(seed=self._seed(seed, options), options=options)

    def _seed(self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None) -> Any:
        if seed is None or isinstance(seed, (int, np.integer)):
            return seed
        if not self._takes_array:
            return next((int(value) for value in seed if value is not None), None)
        mask = (options or {}).get("reset_mask", np.ones(len(seed), dtype=np.bool_))
        wanted = [value for value, is_reset in zip(seed, mask, strict=True) if is_reset]
        return np.array([-1 if value is None else value % 2**31 for value in wanted])


def _name(entry: Any) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
