"""Run CleanRL's scripts, and others written for Gymnasium 0.29's vector environments, on today's Gymnasium.

Two lines of a script change:

    from clusterenv.integrations import cleanrl

    envs = cleanrl.make([make_env(args.env_id, i, ...) for i in range(args.num_envs)])

Gymnasium 1.0 moved the reset of an ended episode to the next step, renamed `final_observation` and batched
`final_info`; scripts that were not adapted train on wrong data without an error (cleanrl#499).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from clusterenv.env import ClusterEnv
from clusterenv.integrations._rows import check_same_step, row_of, rows_of


def make(env: Any, num_envs: int | None = None, **kwargs: Any) -> Gymnasium029:
    """Return `ClusterEnv(env, num_envs, **kwargs)` with the infos of Gymnasium 0.29.

    >>> import gymnasium as gym
    >>> envs = make([lambda: gym.make("CartPole-v1", max_episode_steps=1)] * 2)
    >>> _ = envs.reset(seed=0)
    >>> *_, infos = envs.step([0, 1])
    >>> infos["final_observation"][0].shape
    (4,)
    >>> envs.close()
    """
    return Gymnasium029(ClusterEnv(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **kwargs))


class Gymnasium029(VectorWrapper):
    """Infos of Gymnasium 0.29 over any `VectorEnv` that autoresets in the same step.

    In a step that ends episodes, `infos["final_info"]` and `infos["final_observation"]` are `[N]` arrays of
    objects with `None` where no episode ended. If an environment or its worker was lost, the last observation that
    arrived replaces the final one, and `final_info` is `None`, so that a script does not log half an episode as a
    whole one.

    The single spaces are copies, because scripts assign to them (`single_observation_space.dtype = ...`), and
    `reset(seed=...)` seeds the single action space, from which scripts draw their exploration.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        check_same_step(env, "Gymnasium 0.29 reset ended episodes in the same step")
        self.single_observation_space = copy.deepcopy(env.single_observation_space)
        self.single_action_space = copy.deepcopy(env.single_action_space)
        self._obs: Any = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            first = seed[0] if isinstance(seed, list) else int(seed)
            self.single_action_space.seed(first)
        self._obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        return self._obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        before = self._obs
        self._obs, rewards, terminations, truncations, infos = self.env.step(actions)
        done = np.logical_or(terminations, truncations)
        if done.any():
            infos = self._as_before_1_0(infos, done, before)
        return self._obs, rewards, terminations, truncations, infos

    def _as_before_1_0(self, infos: dict[str, Any], done: Any, before: Any) -> dict[str, Any]:
        lost = ~infos.get("transition_valid", np.ones(self.num_envs, dtype=np.bool_))
        rows = rows_of(infos, self.num_envs)
        final_obs = np.full(self.num_envs, None, dtype=object)
        final_info = np.full(self.num_envs, None, dtype=object)
        for i in np.flatnonzero(done):
            final_obs[i] = rows[i]["final_obs"] if "final_obs" in rows[i] else row_of(before, int(i))
            if not lost[i]:
                final_info[i] = rows[i].get("final_info")
        kept = {key: v for key, v in infos.items() if key not in ("final_obs", "_final_obs")}
        return {
            **kept,
            "final_observation": final_obs,
            "_final_observation": done,
            "final_info": final_info,
            "_final_info": done & ~lost,
        }
