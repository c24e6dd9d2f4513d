"""Slow links: messages that take longer than the silence that is taken for death, and packed fragments."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce
from clusterenv.testing import chaos
from namespace_cluster import Namespaces
from netns import Network
from stepping import kinds
from toys import linear

pytestmark = pytest.mark.network


class Stacked(gym.Env):
    """Noise, in stacks of four frames; the first pixel of a frame is its number."""

    observation_space = spaces.Box(0, 255, (4, 64, 64), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.frames = np.stack([self._frame() for _ in range(4)])
        return self.frames, {}

    def step(self, action):
        self.frames = np.stack([*self.frames[1:], self._frame()])
        return self.frames, 0.0, False, False, {}

    def _frame(self):
        frame = self.np_random.integers(0, 256, (64, 64)).astype(np.uint8)
        self.t, frame[0, 0] = self.t + 1, self.t
        return frame


def weights(numbers):
    return {"w": np.ones((4, 2), np.float32), "more": np.random.default_rng(0).random(numbers, np.float32)}


@pytest.mark.parametrize(
    ("direction", "bytes_per_s", "numbers", "num_steps"),
    [("to_client", 20e3, 100_000, 8), ("to_target", 10e3, 1, 2_000)],
    ids=["weights", "fragment"],
)
def test_a_link_so_slow_that_a_message_takes_longer_than_the_timeout_loses_no_node(
    direction, bytes_per_s, numbers, num_steps
):
    """Weights to a node (400 kB), or a fragment from it, whose pieces of 64 kB take 6.5 s. Four seconds are death.

    The proxy loses nothing and never pauses. Over a link that drops packets, TCP itself may be silent for longer.
    """
    policy = ce.NumpyPolicy(linear, weights(numbers), dist="categorical")
    backend = chaos.LinkedLoopback(nodes=1, heartbeat_s=(0.5, 4.0, 10.0))
    with ce.ClusterEnv("CartPole-v1", 2, backend=backend, recovery=ce.Recovery(backoff_s=(0.05, 0.1))) as envs:
        envs.reset(seed=1)
        backend.links[0].limit(bytes_per_s, direction)
        collector = envs.collector(policy, seed=1)
        began = time.monotonic()
        try:
            batch = collector.rollout(num_steps, timeout_s=90)
        finally:
            backend.links[0].limit(None, direction)
        assert time.monotonic() - began > 8, "it was slow"
        assert batch.valid.all() and "node_lost" not in kinds(envs)


def test_stacked_frames_over_a_slow_link_are_sent_once():
    """Nodes measure the link with the first fragments, and pack the next ones."""
    with Network(nodes=1) as net, ce.ClusterEnv(Stacked, 4, backend=Namespaces(net)) as envs:
        envs.reset(seed=1)
        net.nodes[0].limit(5e6, "out")
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        for _ in range(4):
            before = collector.stats()
            batch = collector.rollout(32, timeout_s=60)
            numbers = batch.obs[..., 0, 0].astype(int)  # [T, N, 4]
            assert (np.diff(numbers, axis=2) == 1).all() and (np.diff(numbers, axis=0) == 1).all()
        stats = collector.stats()
        assert stats["nodes"][0]["compression"]["observation"].startswith("frames once")
        sent, raw = (stats[name] - before[name] for name in ("fragment_bytes_sent", "fragment_bytes"))
        assert 3 * sent < raw and "node_lost" not in kinds(envs)
