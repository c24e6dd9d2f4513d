"""Run environments written in JAX inside ClusterEnv's workers: those of gymnax and brax, or one's own.

    from clusterenv import ClusterEnv
    from clusterenv.integrations.jax import gymnax

    envs = ClusterEnv(gymnax("CartPole-v1"), num_envs=1024)

Every worker compiles one function that steps all its slots. JAX is needed where the workers run, not where the learner
runs. It is imported after workers are forked: threads, which it starts when it first computes, do not survive that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clusterenv.errors import ClosedError, UsageError
from clusterenv.rollout import map_arrays
from clusterenv.spec import Vector

__all__ = ["JaxVectorEnv", "PureEnv", "brax", "gymnax", "jax_env"]

_UINT32 = 2**32


class PureEnv(NamedTuple):
    """A single environment as pure functions, which JAX can compile."""

    reset: Callable[[Any], tuple[Any, Any]]
    """key → observation, state"""
    step: Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any]]
    """key, state, action → observation, state, reward, terminated, truncated. Does not reset."""
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]


def jax_env(make: Callable[[], PureEnv]) -> Vector:
    """Return environments of your own for `ClusterEnv`; `make` is called in every worker, after JAX is imported."""
    return Vector(functools.partial(JaxVectorEnv, make))


def gymnax(env_id: str, *, params: dict[str, Any] | None = None, **kwargs: Any) -> Vector:
    """Return gymnax environments for `ClusterEnv`.

    `params` replace the environment's default parameters; `kwargs` go to `gymnax.make`. Needs gymnax 1.0 or later,
    which tells time limits from endings.
    """
    return jax_env(functools.partial(_gymnax, env_id, params or {}, kwargs))


def brax(env_name: str, *, episode_length: int = 1000, **kwargs: Any) -> Vector:
    """Return brax environments for `ClusterEnv`, truncated after `episode_length` steps; `kwargs` go to brax."""
    return jax_env(functools.partial(_brax, env_name, episode_length, kwargs))


class JaxVectorEnv(VectorEnv[Any, Any, Any]):
    """Environments that one compiled function steps together. Autoreset mode: SAME_STEP.

    Each slot has its own stream of random numbers, begun by its seed modulo 2**32: episodes do not depend on how slots
    are divided among workers.
    """

    def __init__(self, make: Callable[[], PureEnv], num_envs: int, seeds: Sequence[int]) -> None:
        # One thread per worker, as for numpy and torch. Read by JAX when it first computes.
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
        import jax

        self._jax = jax
        self._env = env = make()
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._keys = self._new_keys(list(seeds))
        self._begin = jax.jit(self._reset_masked)
        everyone = np.ones(num_envs, dtype=np.bool_)
        self._obs, self._state = jax.eval_shape(jax.vmap(env.reset), self._keys)
        self._obs, self._state = jax.tree.map(
            lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), (self._obs, self._state)
        )
        self._keys, self._obs, self._state = self._begin(everyone, self._keys, self._obs, self._state)
        # Compiled here, which may take a minute: steps have a timeout of their own.
        actions = self._batch([self.single_action_space.sample() for _ in range(num_envs)])
        self._compiled = jax.jit(self._step_all).lower(self._keys, self._state, actions).compile()
        self._was_reset = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`; without a seed they continue their streams."""
        if self.closed:
            raise ClosedError("the environments were closed")
        if other := sorted((options or {}).keys() - {"reset_mask"}):
            raise UsageError(f"JAX environments take no option but reset_mask, got {other}")
        mask = np.ones(self.num_envs, dtype=np.bool_)
        if options and options.get("reset_mask") is not None:
            mask = np.asarray(options["reset_mask"], dtype=np.bool_)
        if seed is not None:
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, (int, np.integer)) else list(seed)
            self._keys = self._new_keys([s if is_reset else None for s, is_reset in zip(seeds, mask, strict=True)])
        self._keys, self._obs, self._state = self._begin(mask, self._keys, self._obs, self._state)
        self._was_reset = True
        return self._arrays(self._obs), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if not self._was_reset or self.closed:
            raise UsageError("step before reset, or after close: call reset() first")
        self._keys, self._state, self._obs, last, *rest = self._compiled(self._keys, self._state, self._batch(actions))
        rewards, terminated, truncated = map(np.asarray, rest)
        ended = terminated | truncated
        infos: dict[str, Any] = {}
        if ended.any():
            finals = np.full(self.num_envs, None, dtype=object)
            arrays = self._arrays(last)
            for i in np.flatnonzero(ended).tolist():
                finals[i] = map_arrays(lambda leaf, i=i: leaf[i].copy(), arrays)
            infos = {"final_obs": finals, "_final_obs": ended, "final_info": {}, "_final_info": ended}
        return self._arrays(self._obs), rewards.astype(np.float64), terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        self._keys = self._obs = self._state = None

    # -- compiled ---------------------------------------------------------------------------------------------

    def _reset_masked(self, mask: Any, keys: Any, obs: Any, state: Any) -> tuple[Any, Any, Any]:
        """Begin episodes in the environments of `mask`."""
        both = self._split(keys, 2)
        fresh = self._jax.vmap(self._env.reset)(both[1])
        obs, state = self._where(mask, fresh, (obs, state))
        return self._where(mask, both[0], keys), obs, state

    def _step_all(self, keys: Any, state: Any, actions: Any) -> tuple[Any, ...]:
        jax = self._jax
        keys, to_step, to_reset = self._split(keys, 3)
        last, state, rewards, terminated, truncated = jax.vmap(self._env.step)(to_step, state, actions)
        terminated, truncated = (flag.astype(bool) for flag in (terminated, truncated))
        truncated &= ~terminated
        ended = terminated | truncated
        obs, state = jax.lax.cond(  # most steps end no episode, and a reset may cost more than a step
            ended.any(),
            lambda: self._where(ended, jax.vmap(self._env.reset)(to_reset), (last, state)),
            lambda: (last, state),
        )
        return keys, state, obs, last, rewards, terminated, truncated

    def _split(self, keys: Any, parts: int) -> Any:
        """Split each key: [N, 2] → [parts, N, 2]."""
        return self._jax.vmap(lambda key: self._jax.random.split(key, parts), out_axes=1)(keys)

    def _where(self, mask: Any, chosen: Any, others: Any) -> Any:
        """Choose by row, for every leaf."""

        def of_leaf(a: Any, b: Any) -> Any:
            return self._jax.numpy.where(mask.reshape(-1, *(1,) * (a.ndim - 1)), a, b).astype(b.dtype)

        return self._jax.tree.map(of_leaf, chosen, others)

    # -- edges ------------------------------------------------------------------------------------------------

    def _new_keys(self, seeds: list[int | None]) -> Any:
        """Return a key for each slot; None: the one that it has."""
        numbers = np.array([(seed or 0) % _UINT32 for seed in seeds], dtype=np.uint32)
        keys = self._jax.vmap(self._jax.random.PRNGKey)(numbers)
        if None in seeds:
            has_seed = np.array([seed is not None for seed in seeds])
            keys = self._where(has_seed, keys, self._keys)
        return keys

    def _batch(self, actions: Any) -> Any:
        space = self.action_space
        dtype = space.dtype if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)) else None
        return np.asarray(actions, dtype=np.int32 if dtype == np.int64 else dtype)

    def _arrays(self, obs: Any) -> Any:
        return _as_declared(self.single_observation_space, obs)


def _as_declared(space: spaces.Space[Any], obs: Any) -> Any:
    """Return arrays of the space's own types where that loses nothing: JAX has no 64-bit integers by default."""
    if isinstance(space, spaces.Dict):
        return {key: _as_declared(part, obs[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_as_declared(part, item) for part, item in zip(space, obs, strict=True))
    array = np.asarray(obs)
    fits = space.dtype is not None and np.can_cast(array.dtype, space.dtype, "same_kind")
    return array.astype(space.dtype, copy=False) if fits else array


def _gymnax(env_id: str, changed: dict[str, Any], kwargs: dict[str, Any]) -> PureEnv:
    import gymnax as library
    from gymnax.environments.spaces import gymnax_space_to_gym_space

    env, params = library.make(env_id, **kwargs)
    params = params.replace(**changed)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return obs, state, reward, terminated, env.is_truncated(state, params)

    return PureEnv(
        lambda key: env.reset_env(key, params),
        step,
        gymnax_space_to_gym_space(env.observation_space(params)),
        gymnax_space_to_gym_space(env.action_space(params)),
    )


def _brax(env_name: str, episode_length: int, kwargs: dict[str, Any]) -> PureEnv:
    from brax import envs as library

    env = library.create(env_name, episode_length=episode_length, auto_reset=False, **kwargs)
    limits = np.asarray(env.sys.actuator.ctrl_range, dtype=np.float32)

    def reset(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return state.obs, state

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        state = env.step(state, action)
        is_cut = state.info["truncation"] > 0
        return state.obs, state, state.reward, (state.done > 0) & ~is_cut, is_cut

    shape = (int(env.observation_size),)
    return PureEnv(
        reset,
        step,
        spaces.Box(-np.inf, np.inf, shape, np.float32),
        spaces.Box(limits[:, 0], limits[:, 1], dtype=np.float32),
    )
