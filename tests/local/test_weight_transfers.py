"""Weights on their way to nodes over a network: counted as they travel, and patient."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import clusterenv as ce
from clusterenv.cluster.head import Head
from clusterenv.policy.weights import encoding
from clusterenv.wire.messages import Withdrawn
from policies import net, nudge
from prefork import agents
from toys import linear

ID = "CartPole-v1"
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))


def test_weights_sent_again_to_a_replaced_node_are_counted():
    weights = {"w": np.ones((4, 2), np.float32)}
    backend = ce.Loopback(nodes=2, heartbeat_s=(0.2, 1.5, 4.0))
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        policy = ce.NumpyPolicy(linear, weights, dist="categorical")
        collector = envs.collector(policy, seed=5)
        collector.rollout(8)
        size = len(encoding.encode(policy.weights()))
        assert [node["weight_bytes"] for node in collector.stats()["nodes"]] == [size, size]
        agents()[0].kill()
        while not envs.stats()["events"].get("node_lost"):
            collector.rollout(8)
        assert collector.rollout(8).valid.all()
        stats = collector.stats()
    assert [node["pulls"] for node in stats["nodes"]] == [2, 1], "the one that was replaced pulled the same again"
    assert [node["weight_bytes"] for node in stats["nodes"]] == [2 * size, size]
    assert [node["pushed_bytes"] for node in stats["nodes"]] == [2 * size, size], "so would `Always`: this is its rule"
    assert stats["held_version"] == stats["version"] == 0


def test_no_worker_is_taken_for_hung_while_its_weights_travel(monkeypatch):
    """The head answers no pull of the second version for six times the step's limit."""
    limit_s, give, turn = 1.0, Head._give, Head._advance
    held_up: list[tuple[object, ...]] = []
    is_slow = threading.Event()

    def keep(self, *pull):
        held_up.append((self, *pull)) if is_slow.is_set() else give(self, *pull)

    def catch_up(self, timeout_s):
        while held_up and not is_slow.is_set():
            give(*held_up.pop(0))
        turn(self, min(timeout_s, 0.1))

    monkeypatch.setattr(Head, "_give", keep)
    monkeypatch.setattr(Head, "_advance", catch_up)
    recovery = ce.Recovery(backoff_s=(0.05, 0.1), step_timeout_s=limit_s)
    weights = {"w": np.ones((4, 2), np.float32)}
    with ce.ClusterEnv(ID, 4, backend=ce.Loopback(nodes=2), recovery=recovery) as envs:
        collector = envs.collector(ce.NumpyPolicy(linear, weights, dist="categorical"), seed=5)
        collector.rollout(64)
        time.sleep(1.5)  # a beat tells the head in which phase the workers are
        weights["w"] *= 2.0
        is_slow.set()
        timer = threading.Timer(6 * limit_s, is_slow.clear)
        timer.start()
        batch = collector.rollout(8, timeout_s=60)
        timer.join()
        assert batch.valid.all() and (batch.versions == 1).all()
        assert [event.reason for event in envs.events() if event.kind == "worker_lost"] == []


def test_a_machine_with_two_shards_pulls_once():
    """One node is gone for good: the other has both shards, and one copy of the weights."""
    module, generator = net(2, 4), torch.Generator().manual_seed(0)
    backend = ce.Loopback(nodes=2, heartbeat_s=(0.2, 1.5, 4.0))
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        policy = ce.TorchPolicy(module, dist="categorical")
        collector = envs.collector(policy, seed=5)
        collector.rollout(8)
        size = len(encoding.encode(policy.weights()))
        envs.scale(nodes=1)
        before = collector.stats()["weight_bytes"]
        for version in (1, 2, 3):
            nudge(module, 0.02, generator)
            batch = collector.rollout(8)
            assert batch.valid.all() and (batch.versions == version).all()
        assert collector.stats()["weight_bytes"] - before == 3 * size
        assert [node["pulls"] for node in collector.stats()["nodes"]] == [4, 1]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nobody_acts_with_weights_that_were_withdrawn(monkeypatch, which):
    """The node joins anew and is sent everything again, whatever lies in its memory: nothing, or older weights."""
    give, withdrawn = Head._give, []

    def withdraw_once(self, pull, peer):
        if not withdrawn and pull.size > 0 and len(published) > which:
            withdrawn.append(pull)
            self._send(peer.node, Withdrawn(pull.weights))
        else:
            give(self, pull, peer)

    monkeypatch.setattr(Head, "_give", withdraw_once)
    weights, published = {"w": np.ones((4, 2), np.float32)}, []
    with ce.ClusterEnv(ID, 2, backend=ce.Loopback(nodes=1), recovery=RECOVERY) as envs:
        collector = envs.collector(ce.NumpyPolicy(linear, weights, dist="categorical"), seed=5)
        for version in range(4):
            weights["w"][:, 0] = 2.0 * version
            published.append(version)
            batch = collector.rollout(16, timeout_s=60)
            assert batch.valid.all() and (batch.versions == version).all()
            logits = batch.obs @ weights["w"]
            chosen = np.take_along_axis(logits, batch.actions[..., None], -1)[..., 0]
            expected = chosen - np.log(np.exp(logits).sum(-1))
            assert np.allclose(batch.logprobs, expected, atol=1e-4), "acted with the weights that it says"
        assert len(withdrawn) == 1
        assert envs.stats()["events"]["node_lost"] == 1
