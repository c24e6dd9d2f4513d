"""Play whole episodes in a worker on a separate vector environment: what `Collector.evaluate` runs over a `Vector`."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.memory.progress import INIT, POLICY, RESET, STEP, TICK
from clusterenv.memory.rows import assemble, coerce, flatten
from clusterenv.rollout import to_numpy
from clusterenv.wire.requests import Evaluate, PlayedEpisode
from clusterenv.worker.evaluate import Evaluator, Player
from clusterenv.worker.policy import WorkerPolicy
from clusterenv.worker.single_env import close_env
from clusterenv.worker.vector_env import VectorGroup, has_rows, make_vector, row_of
from clusterenv.worker.vector_rows import only

__all__ = ["VectorEvaluator"]

_UNUSED = 1 << 40
"""First of the numbers of streams that belong to no episode."""


class VectorEvaluator(Evaluator):
    """Play episodes on a vector environment of its own, of up to as many environments as the worker has slots."""

    def __init__(self, group: VectorGroup, policy: WorkerPolicy, observation_space: Any, by_repr: bool = False) -> None:
        super().__init__(group, policy, observation_space, by_repr)
        self._vector = group.vector
        self._venv: Any = None

    def _play_all(self, request: Evaluate) -> list[PlayedEpisode]:
        episodes, seed = request.episodes, request.seed
        count = min(len(episodes), len(self._slots))
        if self._venv is None or self._venv.num_envs < count:
            self.close()
            self._at[0], self._at[1] = self._slots[0], INIT
            seeds = [seed + j for j in episodes[:count]]
            self._venv = make_vector(self._vector, count, seeds, request.stickies[:count])
        if any(j < request.record for j in episodes) and self._venv.render_mode != "rgb_array":
            raise ValueError(
                f"record: the vector environment's render_mode is {self._venv.render_mode!r}; make it with "
                'render_mode="rgb_array" in the function of Vector(fn)'
            )
        count = self._venv.num_envs
        done: list[PlayedEpisode] = []
        for i in range(0, len(episodes), count):
            done += self._play(request, episodes[i : i + count])
        return done

    def _play(self, request: Evaluate, episodes: list[int]) -> list[PlayedEpisode]:
        """Play one episode in each of the first environments; the others, and those that have ended, step unused."""
        venv, at, count = self._venv, self._at, len(episodes)
        mode = venv.metadata.get("autoreset_mode")
        is_same_step = mode is AutoresetMode.SAME_STEP
        unused = venv.num_envs - count
        # Streams of their own: two rows with the same one would each take numbers from it.
        player = Player(self._policy, request, episodes + [_UNUSED + i for i in range(unused)])
        records = [j < request.record for j in episodes]
        at[0], at[1], self._now = self._slots[0], RESET, (episodes[0], 0)
        obs, infos = venv.reset(seed=[request.seed + j for j in episodes + episodes[:1] * unused])
        frames: list[list[Any]] = [[] for _ in episodes]
        ends: list[tuple[dict[str, Any], str]] = [({}, "")] * count
        returns, lengths = np.zeros(count), np.zeros(count, dtype=np.int64)
        running = np.ones(count, dtype=np.bool_)
        masks = self._masks(infos)
        t = 0
        while True:
            if any(records):
                images = venv.render()
                for k in np.flatnonzero(running & records).tolist():
                    frames[k].append(images[k])
            at[1] = POLICY
            actions = player.act(self._batch(obs), masks)
            t += 1
            at[1], self._now = STEP, (episodes[int(np.argmax(running))], t)
            obs, *values, infos = venv.step(actions)
            rewards, terminations, truncations = map(to_numpy, values)
            at[TICK] = t
            ended = np.logical_or(terminations, truncations)
            returns += np.where(running, rewards[:count], 0.0)
            lengths += running
            for k in np.flatnonzero(running & ended[:count]).tolist():
                ends[k] = self._end(_last_info(infos, k, venv.num_envs, is_same_step))
            running &= ~ended[:count]
            if not running.any():
                break
            masks = self._masks(infos)
            if mode is AutoresetMode.DISABLED and ended.any():
                obs, infos = venv.reset(options={"reset_mask": ended})
                after = self._masks(infos)
                masks = [after[k] if ended[k] else own for k, own in enumerate(masks)]
        return [
            PlayedEpisode(j, float(returns[k]), int(lengths[k]), frames[k] if records[k] else None, *ends[k])
            for k, j in enumerate(episodes)
        ]

    def _masks(self, infos: dict[str, Any]) -> list[Any]:
        """Return the action mask of each environment, if the policy uses any."""
        mask = self._policy.mask
        if mask is None:
            return []
        wanted = only(infos, (mask,))
        count = self._venv.num_envs
        return [row_of(wanted, k, count).get(mask) for k in range(count)]

    def _batch(self, obs: Any) -> Any:
        leaves = [
            coerce(to_numpy(value), leaf, "observation", self._venv.num_envs).astype(leaf.dtype, copy=False)
            for leaf, value in zip(self._leaves, flatten(self._space, obs), strict=True)
        ]
        return assemble(self._space, iter(leaves))

    def close(self) -> None:
        close_env(self._venv)
        self._venv = None


def _last_info(infos: dict[str, Any], k: int, num_envs: int, is_same_step: bool) -> dict[str, Any]:
    """Return the info of the step that ended an episode in environment k."""
    if is_same_step:
        last: Any = infos.get("final_info")
        if has_rows(last, num_envs):  # an info for each environment, as before Gymnasium 1.0
            return last[k] if isinstance(last[k], dict) else {}
        return row_of(last, k, num_envs) if isinstance(last, dict) else {}
    return row_of(infos, k, num_envs)
