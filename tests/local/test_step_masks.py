"""`step(agent)` obeys the action masks of the infos, also of slow environments, whose rows are answered one by one."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np

import clusterenv as ce


class OneAllowed(gym.Env):
    """Allows one action at a time, another in every step, and counts those that were not allowed."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {"mask": self._mask()}

    def _mask(self):
        return np.arange(4) == self.t % 4

    def step(self, action):
        time.sleep(0.003)  # a row that takes so long is answered before the others are done
        is_allowed = action == self.t % 4
        self.t += 1
        return np.zeros(2, np.float32), float(is_allowed), False, False, {"mask": self._mask()}


def test_masks_of_slow_environments_are_those_of_their_last_step():
    policy = ce.NumpyPolicy(lambda weights, obs: np.zeros((len(obs), 4)), {}, action_mask="mask")
    with ce.ClusterEnv(OneAllowed, 4, backend=ce.Local(workers=1)) as envs:
        envs.reset(seed=0)
        for _ in range(6):
            rewards = envs.step(policy)[1]
            assert rewards.tolist() == [1.0] * 4
