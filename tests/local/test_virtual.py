"""The virtual cluster: deterministic, and the same pulls and bytes as what it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import clusterenv as ce
from clusterenv.policy.weights import encoding
from clusterenv.testing import Virtual
from policies import net, nudge

ID, SPACES = "CartPole-v1", (2, 4)


def updates(collector, module, count=12, steps=24):
    """Rollouts between which the weights move; returns (version that acted, pulls so far) of each, and the batches."""
    generator = torch.Generator().manual_seed(3)
    seen, batches = [], []
    for _ in range(count):
        batch = collector.rollout(steps)
        seen.append((int(batch.versions[0, 0]), collector.stats()["pulls"]))
        batches.append(batch)
        nudge(module, 0.03, generator)
    return seen, batches


def test_its_nodes_do_what_one_machine_does():
    """Node by node the same slots, seeds, actions, versions and bytes as one driver of two workers."""
    runs = []
    for make in (
        lambda: ce.ClusterEnv(ID, 12, backend=ce.Local(workers=2, preload=("torch",))),
        lambda: ce.ClusterEnv(ID, 12, backend=Virtual(1)),
        lambda: ce.ClusterEnv(ID, 12, backend=Virtual(4)),
    ):
        module = net(*SPACES)
        with make() as envs:
            policy = ce.TorchPolicy(module, dist="categorical")
            collector = envs.collector(policy, seed=5, sync=ce.APS(threshold=0.002))
            seen, batches = updates(collector, module)
            runs.append((seen, batches, collector.stats()))
    (local, local_batches, a), (one, one_batches, b), (four, four_batches, c) = runs
    assert local == one
    assert [(version, 4 * pulls) for version, pulls in one] == four, "all nodes have the same version, so they all pull"
    for first, second, third in zip(local_batches, one_batches, four_batches, strict=True):
        for name in ("obs", "actions", "rewards", "logprobs", "versions", "last_obs", "final_obs", "slots"):
            assert np.array_equal(getattr(first, name), getattr(second, name)), name
            assert np.array_equal(getattr(first, name), getattr(third, name)), name
    for name in ("weight_bytes", "drift_bytes", "fragment_bytes"):
        assert a[name] == b[name] == c[name] / (4 if name == "weight_bytes" else 1), name
    assert 2 < a["pulls"] < 12
    assert len(c["nodes"]) == 4 and sum(node["pulls"] for node in c["nodes"]) == c["pulls"]


def test_always_moves_versions_times_nodes_times_size():
    module = net(*SPACES)
    policy = ce.TorchPolicy(module, dist="categorical")
    with ce.ClusterEnv(ID, 8, backend=Virtual(4)) as cluster:
        collector = cluster.collector(policy, seed=1)
        updates(collector, module, 6, 4)
        size = len(encoding.encode(policy.weights()))
        assert collector.stats()["weight_bytes"] == 6 * 4 * size
        assert [node["pulls"] for node in collector.stats()["nodes"]] == [6] * 4


@pytest.mark.parametrize("queue", [1, 3])
def test_staleness_in_a_stream_is_what_was_chosen(queue):
    """Equal nodes, a version per batch: a fragment waits while every node's queue before it is worked off."""
    module, nodes = net(*SPACES), 4
    policy = ce.TorchPolicy(module, dist="categorical")
    generator = torch.Generator().manual_seed(0)
    with ce.ClusterEnv(ID, 8, backend=Virtual(nodes)) as cluster:
        collector = cluster.collector(policy, seed=1)
        lags = []
        for i, batch in enumerate(collector.stream(4, queue=queue)):
            lags.append(batch.receipts[0].lag)
            assert batch.receipts[0].version == batch.versions[0, 0]
            nudge(module, 0.01, generator)
            collector.publish()
            if i == 40:
                break
        assert collector.rollout(2).valid.all(), "the cluster is usable after a stream"
        counted = sum(sum(node["lags"].values()) for node in collector.stats()["nodes"])
    assert lags[: nodes * queue] == list(range(nodes * queue)), "the queue was filled with version 0"
    assert set(lags[nodes * queue :]) == {nodes * queue}, "begun when the one before it was handed over"
    assert counted == 41 + nodes


def test_a_slow_node_sends_less_and_is_staler():
    module = net(*SPACES)
    policy = ce.TorchPolicy(module, dist="categorical")
    runs = []
    for _ in range(2):
        with ce.ClusterEnv(ID, 4, backend=Virtual(2, (1.0, 5.0))) as cluster:
            collector = cluster.collector(policy, seed=1)
            order = []
            for i, batch in enumerate(collector.stream(4)):
                order.append((batch.receipts[0].worker, batch.receipts[0].version, float(batch.obs.sum())))
                if i == 35:
                    break
            counts = np.bincount([worker for worker, *_ in order])
            assert counts.tolist() == [30, 6]
            runs.append(order)
    assert runs[0] == runs[1], "the same each time"


def test_it_steps_like_any_other_backend():
    def steps(backend):
        with ce.ClusterEnv(ID, 6, backend=backend) as envs:
            obs = [envs.reset(seed=3)[0]]
            for i in range(30):
                obs.append(envs.step(np.arange(6) % 2 ^ i % 2)[0])
            return np.array(obs)

    assert np.array_equal(steps(Virtual(3)), steps(ce.Local(workers=2)))


def test_bad_input():
    with pytest.raises(ce.SpecError, match="fewer nodes"):
        ce.ClusterEnv(ID, 8, backend=Virtual(9))
    with pytest.raises(ce.SpecError, match="2 numbers above 0"):
        Virtual(2, (1.0, 0.0))
