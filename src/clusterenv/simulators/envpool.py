"""Run EnvPool's C++ environments inside ClusterEnv's workers.

Every worker builds one pool for its slots. EnvPool alone stops at one machine, and two of its processes made with the
same arguments play the same episodes; here each slot of the whole run has its own seed.

    from clusterenv import ClusterEnv
    from clusterenv.integrations.envpool import envpool

    envs = ClusterEnv(envpool("CartPole-v1", num_threads=2), num_envs=1024)

EnvPool is needed where the workers run, not where the learner runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clusterenv.errors import ClosedError, SpecError, UsageError
from clusterenv.rollout import map_arrays
from clusterenv.spec import Vector

_OURS = frozenset({"num_envs", "seed", "env_type", "gym_reset_return_info"})
_INT32 = 2**31


def envpool(
    task_id: str,
    *,
    num_threads: int = 1,
    batch_size: int | None = None,
    info_keys: Sequence[str] = (),
    **kwargs: Any,
) -> Vector:
    """Return EnvPool environments for `ClusterEnv`; `kwargs` go to `envpool.make`, `num_threads` is per worker.

    With a `batch_size` smaller than the number of environments of a worker, a collector acts for the first so many
    environments that have stepped, while the others still step: useful with several threads, if steps take different
    times. Every environment still has all its rows in a rollout.

    Only the infos of `info_keys` leave the worker: EnvPool has some in every step (`elapsed_step`, Atari's
    128 bytes of `ram`), and sending them can cost as much as stepping.

    >>> from clusterenv import ClusterEnv
    >>> with ClusterEnv(envpool("CartPole-v1", max_episode_steps=200), num_envs=8) as envs:
    ...     envs.reset(seed=1)[0].shape
    (8, 4)
    """
    if taken := sorted(_OURS & kwargs.keys()):
        raise SpecError(f"{', '.join(taken)}: set by ClusterEnv for every worker; leave it out of envpool(...)")
    options = {"num_threads": num_threads, "batch_size": batch_size, "info_keys": tuple(info_keys), **kwargs}
    return Vector(functools.partial(EnvPoolVectorEnv, task_id, **options))


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """One EnvPool as a proper Gymnasium `VectorEnv` (EnvPool's own class reports unbatched spaces).

    Autoreset is EnvPool's: `NEXT_STEP`. EnvPool takes seeds only when it is built, so a `reset` with seeds
    rebuilds the pool; without seeds it continues the random streams. Seeds are taken modulo 2**31.
    """

    def __init__(
        self,
        task_id: str,
        num_envs: int,
        seeds: Sequence[int],
        *,
        num_threads: int = 1,
        batch_size: int | None = None,
        info_keys: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise SpecError(f"envpool(batch_size={batch_size}): expected at least 1, or None")
        self._library = _import_envpool()
        self._task_id = task_id
        self._info_keys = tuple(info_keys)
        self._batch = num_envs if batch_size is None else min(batch_size, num_envs)
        # EnvPool returns whole batches only: if fewer of our environments are stepping, others make up the number.
        self._fillers = 0 if self._batch == num_envs else self._batch - 1 + (1 - num_envs) % self._batch
        self._kwargs = {**kwargs, "num_envs": num_envs + self._fillers, "num_threads": num_threads}
        if self._fillers:
            self._kwargs["batch_size"] = self._batch
        self.num_envs = num_envs
        self._rows = np.arange(num_envs, dtype=np.int32)
        self._sent = 0  # environments that are stepping
        self._sent_rows: Any = None  # by the last call
        self._seeds = self._checked(seeds)
        # Seeds for environments that a later `reset` gives no seed; the same in every run.
        self._spare = np.random.default_rng(self._seeds)
        with _quiet_spaces():
            spec = self._library.make_spec(task_id, **self._kwargs)
            self.single_observation_space = spec.gymnasium_observation_space
            self.single_action_space = spec.gymnasium_action_space
        if spec.config.max_num_players != 1:
            raise SpecError(f"{task_id} has several players: EnvPool returns no fixed number of rows for it")
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.render_mode = kwargs.get("render_mode")
        self.metadata = {"render_modes": ["rgb_array", "human"], "autoreset_mode": AutoresetMode.NEXT_STEP}
        # Built by the first reset, whose seeds it needs, so that an Atari or MuJoCo pool is not built twice.
        self._pool: Any = None
        self._obs: Any = None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`; seeds rebuild the pool."""
        if self.closed:
            raise ClosedError("the pool was closed")
        if other := sorted((options or {}).keys() - {"reset_mask"}):
            raise UsageError(f"EnvPool takes no option but reset_mask, got {other}")
        mask = (options or {}).get("reset_mask")
        if mask is not None:
            if seed is not None:
                raise UsageError("EnvPool cannot seed some environments of a pool: reset_mask goes without seed")
            return self._reset_some(np.asarray(mask, dtype=np.bool_))
        if seed is not None:
            self._pool = None
            self._seeds = self._checked(seed)
        if self._pool is None:
            self._pool = self._build()
        self._obs, infos = self._reset_rows(self._rows)
        if unknown := set(self._info_keys) - infos.keys():
            raise SpecError(f"info_keys: {self._task_id} has no {sorted(unknown)}, only {sorted(infos)}")
        return self._obs, self._masked(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._pool is None:
            raise UsageError("step before reset, or after close: call reset() first")
        if not self._fillers:
            self._obs, rewards, terminations, truncations, infos = self._pool.step(actions)
            return self._obs, rewards, terminations, truncations, self._masked(infos)
        self.send_rows(actions, self._rows)
        self._obs, rewards, terminations, truncations, infos = self._recv_all(self.num_envs)[1]
        return self._obs, rewards, terminations, truncations, self._masked(infos)

    def send_rows(self, actions: Any, rows: Any) -> None:
        """Step these environments; those whose episode has ended are reset instead."""
        if self._pool is None:
            raise UsageError("step before reset, or after close: call reset() first")
        self._pool.send(actions, rows)
        self._sent += len(rows)
        self._sent_rows = rows

    def recv_rows(self) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        """Wait for a batch of the environments that are stepping; return their rows, and the results of `step`."""
        if self._sent < self._batch and self._fillers:
            self._step_fillers(self._batch - self._sent)
        rows, result = self._recv()
        if not self._fillers:
            rows = self._sent_rows  # all of them, in the order in which they were sent
        obs, rewards, terminations, truncations, infos = result
        return rows, obs, rewards, terminations, truncations, self._masked(infos, rows=len(rows))

    def render(self) -> tuple[Any, ...] | None:
        if self._pool is None or self.render_mode != "rgb_array":
            return None
        return tuple(self._pool.render(env_ids=np.arange(self.num_envs, dtype=np.int32)))

    def close_extras(self, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None  # EnvPool's threads end with the object, not with close()

    def _build(self) -> Any:
        seeds = self._seeds + [int(self._spare.integers(_INT32)) for _ in range(self._fillers)]
        pool = self._library.make_gymnasium(self._task_id, seed=seeds, **self._kwargs)
        with _quiet_spaces():
            _ = pool.observation_space, pool.action_space  # made on first use, which is inside step()
        return pool

    def _step_fillers(self, count: int) -> None:
        space = self.single_action_space
        action = np.clip(np.zeros(space.shape), space.low, space.high) if isinstance(space, spaces.Box) else 0
        actions = np.broadcast_to(np.asarray(action, dtype=space.dtype), (count, *(space.shape or ())))
        self._pool.send(actions, np.arange(self.num_envs, self.num_envs + count, dtype=np.int32))
        self._sent += count

    def _recv(self, is_reset: bool = False) -> tuple[Any, tuple[Any, ...]]:
        """Receive a batch; return the rows of our environments in it, and its results for them."""
        result = self._pool.recv(is_reset)
        rows = result[-1]["env_id"]
        self._sent -= len(rows)
        if not self._fillers or (ours := rows < self.num_envs).all():
            return rows, result
        return rows[ours], map_arrays(lambda values: values[ours], result)

    def _recv_all(self, count: int, is_reset: bool = False) -> tuple[Any, Any]:
        """Receive this many of our environments, ascending."""
        parts = []
        while count:
            if self._sent < self._batch:
                self._step_fillers(self._batch - self._sent)
            parts.append(self._recv(is_reset))
            count -= len(parts[-1][0])
        rows = np.concatenate([rows for rows, _ in parts])
        order = np.argsort(rows)
        results = map_arrays(lambda *values: np.concatenate(values)[order], *(result for _, result in parts))
        return rows[order], results

    def _reset_rows(self, rows: Any) -> Any:
        """Reset these environments; return their observations and infos, ascending."""
        if not self._fillers:
            return self._pool.reset(rows)
        if len(rows) == self.num_envs:  # the first time all have to be reset, the fillers too
            self._pool.async_reset()
            self._sent += self.num_envs + self._fillers
        else:
            self._pool._reset(rows)  # `reset` would wait for one batch, and `async_reset` resets all
            self._sent += len(rows)
        return self._recv_all(len(rows), is_reset=True)[1]

    def _reset_some(self, mask: Any) -> tuple[Any, dict[str, Any]]:
        if self._pool is None:
            raise UsageError("reset_mask before the first reset: call reset() first")
        rows = np.flatnonzero(mask).astype(np.int32)
        if mask.shape != (self.num_envs,) or not len(rows):
            raise UsageError(f"reset_mask must be [{self.num_envs}] booleans with one of them true, got {mask}")
        obs, infos = self._reset_rows(rows)
        self._obs = _placed(self._obs, obs, rows)
        placed = {
            key: _placed(np.zeros((self.num_envs, *value.shape[1:]), value.dtype), value, rows)
            for key, value in infos.items()
            if key in self._info_keys
        }
        return self._obs, self._masked(placed, mask)

    def _masked(self, infos: dict[str, Any], mask: Any = True, rows: int | None = None) -> dict[str, Any]:
        """Return the infos of `info_keys`, with Gymnasium's masks."""
        masked: dict[str, Any] = {}
        for key in self._info_keys:
            masked[key] = infos[key]
            masked[f"_{key}"] = np.full(self.num_envs if rows is None else rows, mask, dtype=np.bool_)
        return masked

    def _checked(self, seed: int | Sequence[int | None]) -> list[int]:
        if isinstance(seed, (int, np.integer)):
            seeds: list[int | None] = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise SpecError(f"{len(seeds)} seeds for {self.num_envs} environments: one each is needed")
        return [int(self._spare.integers(_INT32)) if s is None else int(s) % _INT32 for s in seeds]


def _placed(old: Any, new: Any, rows: Any) -> Any:
    """Return a copy of `old` with `rows` replaced; EnvPool's partial reset returns only those rows."""

    def place(whole: Any, part: Any) -> Any:
        out = whole.copy()
        out[rows] = part
        return out

    return map_arrays(place, old, new)


@contextmanager
def _quiet_spaces() -> Iterator[None]:
    """Suppress Gymnasium's warning about the float64 bounds that EnvPool gives its float32 boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield


def _import_envpool() -> Any:
    try:
        import envpool as library
    except ImportError as error:
        raise ImportError(
            'EnvPool is not installed where this worker runs: pip install "clusterenv[envpool]"'
        ) from error
    return library
