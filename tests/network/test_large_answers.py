"""Answers of any size travel: what a node may send follows from what it was asked."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce
from stepping import kinds

pytestmark = pytest.mark.network


class Large(gym.Env):
    """Observations of many bytes, and frames as large."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = spaces.Discrete(2)

    def __init__(self, size=3_000_000, info=0, length=1000):
        self.observation_space = spaces.Box(0, 255, (size,), np.uint8)
        self.size, self.info, self.length = size, info, length
        self.render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        info = {"large": np.full(self.info, self.t, np.uint8)} if self.info else {}
        return self._obs(), 1.0, False, self.t >= self.length, info

    def _obs(self):
        return np.full(self.size, self.t, np.uint8)

    def render(self):
        return np.full((1000, 1000, 3), self.t, np.uint8)


class Small(Large):
    def __init__(self, **kwargs):
        super().__init__(size=4, **kwargs)


def assert_nobody_lost(envs):
    assert {"node_lost", "worker_lost", "env_error"}.isdisjoint(kinds(envs)), envs.events()


def network(workers=1):
    return ce.Loopback(nodes=1, workers_per_node=workers)


def forward(weights, obs):
    return obs[..., :4].astype(np.float32) @ weights["w"]


def policy():
    return ce.NumpyPolicy(forward, {"w": np.ones((4, 2), np.float32)}, dist="categorical")


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_observations_of_megabytes(mode):
    with ce.ClusterEnv(lambda: Large(length=2), 6, backend=network(), autoreset_mode=mode) as envs:
        assert (envs.reset(seed=1)[0] == 0).all()
        for _ in range(2):
            obs, *_, infos = envs.step(np.zeros(6, np.int64))
        if mode == "NextStep":
            assert (obs == 2).all()
        else:
            assert (obs == 0).all() and (np.stack(infos["final_obs"]) == 2).all()
        envs.send(np.zeros(6, np.int64), range(6))
        assert (envs.recv()[0] == (0 if mode == "NextStep" else 1)).all()
        assert_nobody_lost(envs)


def test_a_thousand_stacks_of_frames():
    with ce.ClusterEnv(lambda: Large(size=4 * 84 * 84), 1024, backend=network()) as envs:
        envs.reset(seed=1)
        assert (envs.step(np.zeros(1024, np.int64))[0] == 1).all()
        assert_nobody_lost(envs)


def test_fragments_of_megabytes():
    with ce.ClusterEnv(lambda: Large(size=300_000, length=3), 4, backend=network()) as envs:
        batch = envs.collector(policy(), seed=1).rollout(40)
        assert batch.valid.all() and batch.final_obs.shape == (4 * 13, 300_000)
        assert_nobody_lost(envs)


def test_frames_of_render():
    with ce.ClusterEnv(Small, 30, backend=network()) as envs:
        envs.reset(seed=1)
        frames = envs.render()
        assert len(frames) == 30 and all(frame.shape == (1000, 1000, 3) for frame in frames)
        assert_nobody_lost(envs)


def test_frames_of_evaluations():
    with ce.ClusterEnv(lambda: Small(length=40), 2, backend=network()) as envs:
        played = envs.collector(policy(), seed=1).evaluate(episodes=3, record=2)
        assert [len(frames) for frames in played.frames] == [41, 41]
        assert [frame[0, 0, 0] for frame in played.frames[1]] == list(range(41))
        assert played.lengths.tolist() == [40] * 3
        assert_nobody_lost(envs)


def test_infos_of_megabytes():
    with ce.ClusterEnv(lambda: Small(info=3_000_000), 10, backend=network()) as envs:
        envs.reset(seed=1)
        infos = envs.step(np.zeros(10, np.int64))[4]
        assert infos["large"].shape == (10, 3_000_000) and (infos["large"] == 1).all()
        assert_nobody_lost(envs)
