"""Weights that arrive damaged, or whose node dies while it pulls: the old ones are kept, and no step mixes versions."""

from __future__ import annotations

import threading

import numpy as np
import psutil
import pytest

import clusterenv as ce
from clusterenv.cluster.head import Head
from clusterenv.cluster.weight_server import WeightServer
from clusterenv.wire.frames import CHUNK
from prefork import agents
from toys import linear

pytestmark = [pytest.mark.network, pytest.mark.guarantee(27)]

ID = "CartPole-v1"
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))
WIDTH = 40_000
"""Columns of an array that the policy does not use: with it, weights are sent in several pieces."""


class Learner:
    """Publishes weights, and checks that each transition was acted by the weights of the version that it names."""

    def __init__(self, envs: ce.ClusterEnv) -> None:
        self._weights = {"w": np.ones((4, 2), np.float32), "unused": np.zeros((4, WIDTH), np.float32)}
        self._of_version: dict[int, np.ndarray] = {}
        self.collector = envs.collector(ce.NumpyPolicy(linear, self._weights, dist="categorical"), seed=5)
        self._note(self.collector.publish())

    def _note(self, version: int) -> None:
        self._of_version[version] = self._weights["w"].copy()

    def publish(self) -> int:
        # Every number changes: a mixture of two versions would give other log-probabilities.
        self._weights["w"][:] = np.random.default_rng(len(self._of_version)).normal(0, 3, (4, 2))
        self._weights["unused"] += 1.0
        self._note(self.collector.publish())
        return max(self._of_version)

    def check(self, batch: ce.Rollout) -> None:
        assert batch.valid.all()
        for version in np.unique(batch.versions):
            logits = batch.obs @ self._of_version[int(version)]
            chosen = np.take_along_axis(logits, batch.actions[..., None], -1)[..., 0]
            expected = chosen - np.logaddexp.reduce(logits, axis=-1)
            acted = batch.versions == version
            assert np.allclose(batch.logprobs[acted], expected[acted], atol=1e-3), f"not acted by version {version}"


def flip(piece: bytes) -> bytes:
    return bytes([piece[0] ^ 0xFF]) + bytes(piece[1:])


DAMAGE = {"flipped": flip, "cut off": lambda piece: bytes(piece[:-1]), "empty": lambda piece: b""}


class Spoiler:
    """Damages pieces of weights: the first one from the byte `at` on, `left` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.damage, self.at, self.left = flip, 0, 0
        self._answer = WeightServer.answer
        monkeypatch.setattr(WeightServer, "answer", lambda *args: self._spoil(*args))

    def _spoil(self, server, pull, session):
        messages = list(self._answer(server, pull, session))
        for i, (message, frames) in enumerate(messages):
            if self.left and frames and message.at >= self.at and (self.at or not message.at):
                self.left -= 1
                messages[i] = message, [self.damage(frames[0])]
                break
        return iter(messages)


def test_damaged_weights_are_pulled_again_and_reported(monkeypatch):
    spoiler = Spoiler(monkeypatch)
    with ce.ClusterEnv(ID, 4, backend=ce.Loopback(nodes=1), recovery=RECOVERY) as envs:
        learner = Learner(envs)
        learner.check(learner.collector.rollout(8))
        cases = [(damage, at) for damage in DAMAGE for at in (0, CHUNK)]
        for count, (damage, at) in enumerate(cases, 1):
            newest = learner.publish()
            spoiler.damage, spoiler.at, spoiler.left = DAMAGE[damage], at, 1
            batch = learner.collector.rollout(8, timeout_s=30)
            learner.check(batch)
            assert not spoiler.left and (batch.versions == newest).all()
            assert envs.stats()["events"]["weights_damaged"] == count, (damage, at)
        event = next(event for event in envs.events() if event.kind == "weights_damaged")
        assert "node 0" in event.reason and "wrong checksum" in event.reason
        assert "node_lost" not in envs.stats()["events"]


def test_a_node_that_gets_only_damaged_weights_is_replaced(monkeypatch):
    spoiler = Spoiler(monkeypatch)
    with ce.ClusterEnv(ID, 2, backend=ce.Loopback(nodes=1), recovery=RECOVERY) as envs:
        learner = Learner(envs)
        learner.check(learner.collector.rollout(8))
        newest = learner.publish()
        spoiler.left = 3
        batch = learner.collector.rollout(8, timeout_s=60)
        learner.check(batch)
        assert not spoiler.left and (batch.versions == newest).all()
        assert envs.stats()["events"]["weights_damaged"] == 3
        (lost,) = [event.reason for event in envs.events() if event.kind == "node_lost"]
        assert "wrong checksum 3 times" in lost


@pytest.mark.parametrize("moment", ["offered", "half"])
def test_a_node_that_dies_while_it_pulls(monkeypatch, moment):
    """One of two nodes is killed when its weights are offered, or after a part of them; a stream goes on."""
    give, pulls, is_armed = Head._give, [], threading.Event()
    victim: list[psutil.Process] = []

    def kill_within(self, pull, peer):
        if is_armed.is_set() and peer.node == 0 and pull.size > 0:
            pulls.append(pull)
            if moment == "offered" or len(pulls) == 2:
                is_armed.clear()
                victim[0].kill()
        give(self, pull, peer)

    monkeypatch.setattr(Head, "_give", kill_within)
    backend = ce.Loopback(nodes=2, heartbeat_s=(0.2, 5.0, 10.0))
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        learner = Learner(envs)
        victim.append(agents()[0])
        stream = learner.collector.stream(4, timeout_s=60)
        for _ in range(4):
            learner.check(next(stream))
        newest = learner.publish()
        is_armed.set()
        seen: set[int] = set()
        while "node_lost" not in envs.stats()["events"] or seen != {0, 1, 2, 3}:
            batch = next(stream)
            learner.check(batch)
            if not is_armed.is_set() and (batch.versions == newest).all():
                seen |= set(batch.slots.tolist())
        stream.close()
        assert pulls and not victim[0].is_running()
        lost = [event.reason for event in envs.events() if event.kind == "node_lost"]
        assert len(lost) == 1 and lost[0].startswith("node 0"), lost
