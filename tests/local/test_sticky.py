"""Attributes and calls that outlive an environment: in evaluations, and after a state was loaded."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce


class Level(gym.Env):
    """Pays `level` once, and `bonus` with it."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None) -> None:
        self.level, self.bonus, self.render_mode = 1, 0, render_mode

    def raise_bonus(self, by):
        self.bonus += by

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(self.level + self.bonus), True, False, {}

    def render(self):
        return np.zeros((2, 2, 3), np.uint8)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluations_have_the_attributes_of_the_environments(workers):
    thunks = [lambda: Level("rgb_array")] * 2
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=workers)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)

        def returns(record=0):
            return collector.evaluate(episodes=4, deterministic=False, record=record).returns.tolist()

        assert returns() == [1.0] * 4
        envs.set_attr("level", 5)
        envs.call("raise_bonus", 10, sticky=True)
        assert returns() == [15.0] * 4
        assert returns(record=2) == [15.0] * 4, "each call is repeated once for each environment"
        envs.set_attr("level", 7)
        assert returns(record=1) == [17.0] * 4
        state = envs.state_dict()
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=workers)) as envs:
        envs.load_state_dict(state)
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        assert collector.evaluate(episodes=4, deterministic=False).returns.tolist() == [17.0] * 4


def test_after_load_state_dict_a_call_asks_for_the_reset():
    with ce.ClusterEnv([Level] * 2, backend=ce.Local(workers=0)) as envs:
        envs.reset(seed=1)
        envs.set_attr("level", [3, 4])
        state = envs.state_dict()
        envs.load_state_dict(state)
        with pytest.raises(ce.UsageError, match=r"get_attr\('level'\) after load_state_dict\(\).*call reset\(\) first"):
            envs.get_attr("level")
        envs.reset(seed=1)
        assert envs.get_attr("level") == (3, 4) and not envs.stats()["events"].get("env_error")
