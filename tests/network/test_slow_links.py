"""Links so slow that half a megabyte takes longer than the silence that is taken for death."""

from __future__ import annotations

import numpy as np
import pytest

import clusterenv as ce
from namespace_cluster import Namespaces
from netns import Network
from stepping import kinds
from toys import linear

pytestmark = pytest.mark.network
SLOW = 20e3  # bytes per second: about a third of a megabit


def weights(numbers):
    return {"w": np.ones((4, 2), np.float32), "more": np.random.default_rng(0).random(numbers, np.float32)}


@pytest.mark.parametrize(("direction", "numbers", "num_steps"), [("in", 150_000, 8), ("out", 1, 10_000)])
def test_half_a_megabyte_over_a_slow_link_loses_no_node(direction, numbers, num_steps):
    """Weights to a node, or a fragment from it: about 600 kB. Ten seconds of silence are taken for death."""
    policy = ce.NumpyPolicy(linear, weights(numbers), dist="categorical")
    with Network(nodes=1) as net:
        backend = Namespaces(net, heartbeat_s=(0.5, 10.0, 10.0))
        recovery = ce.Recovery(backoff_s=(0.05, 0.1))
        with ce.ClusterEnv("CartPole-v1", 2, backend=backend, recovery=recovery) as envs:
            envs.reset(seed=1)
            net.nodes[0].limit(SLOW, direction)
            collector = envs.collector(policy, seed=1)
            try:
                batch = collector.rollout(num_steps, timeout_s=90)
            finally:
                net.nodes[0].unlimit(direction)
                print([(event.kind, event.reason) for event in envs.events()], envs.stats())
            assert batch.valid.all() and "node_lost" not in kinds(envs)
