"""Messages of a node that come in another order, or again in a later session: no row twice, none of another request."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import clusterenv as ce
import reordering_agent
from clusterenv.cluster.head import Head
from clusterenv.testing import chaos
from loopback_agents import Loopback
from stepping import joined

pytestmark = [pytest.mark.network, pytest.mark.guarantee(24)]

N = 8
ENVS_PER_WORKER = 2
RECOVERY = ce.Recovery(backoff_s=(0.02, 0.1), max_restarts=1000)


def agent_command(agents, node):
    command = agents.command(node)
    return [sys.executable, reordering_agent.__file__, *command[command.index("node") + 1 :]]


class Run:
    """Environments that number their transitions, and a ledger of what is delivered."""

    def __init__(self, envs: ce.ClusterEnv, folder: Path) -> None:
        self.envs = envs
        self.ledger = chaos.Ledger(folder, N, expected_action=lambda version: version % chaos.ACTIONS)
        self.ledger.reset(envs.reset(seed=1)[0])
        self._weights = {"w": np.zeros(chaos.ACTIONS, np.float32)}
        self._publish(0)
        self._collector = envs.collector(ce.NumpyPolicy(chaos.logits, self._weights, dist="categorical"), seed=1)
        self._version = -1  # the first rollout acts with version 0

    def _publish(self, version: int) -> None:
        self._weights["w"][:] = -1e9
        self._weights["w"][version % chaos.ACTIONS] = 0.0

    def step(self) -> None:
        actions = self.envs.action_space.sample()
        self.ledger.step(actions, self.envs.step(actions), self.envs.events())

    def send(self) -> None:
        """Step some slots only: each worker answers for its own."""
        slots = np.flatnonzero(np.random.default_rng(len(self.envs.events())).random(N) < 0.7)
        actions = self.envs.action_space.sample()
        self.envs.send(actions[slots], slots)
        for _ in range(len(slots)):
            result = self.envs.recv(1)
            self.ledger.step(actions[result[4]["slot"]], result, self.envs.events())
            slots = np.setdiff1d(slots, result[4]["slot"])
            if not len(slots):
                return

    def rollout(self) -> None:
        self._version += 1
        self._publish(self._version)
        self.ledger.batch(self._collector.rollout(8, timeout_s=60), self.envs.events())

    def stream(self, batches: int) -> None:
        before = self._collector.stats()["dropped_fragments"]
        stream = self._collector.stream(8, timeout_s=60)
        for _ in range(batches):
            self.ledger.batch(next(stream), self.envs.events())
        stream.close()
        dropped = self._collector.stats()["dropped_fragments"] - before
        self.ledger.left_stream(8, 2, dropped * 8 * ENVS_PER_WORKER)


def test_messages_in_another_order(tmp_path, monkeypatch):
    switch = tmp_path / "reorder"
    monkeypatch.setenv("CLUSTERENV_REORDER", str(switch))
    backend = Loopback(nodes=2, change=agent_command, workers_per_node=2, heartbeat_s=(0.02, 10.0, 30.0))
    folder = tmp_path / "lives"
    with ce.ClusterEnv(chaos.numbered(folder, N), backend=backend, recovery=RECOVERY) as envs:
        run = Run(envs, folder)
        switch.touch()
        for _ in range(20):
            run.step()
            run.send()
        for _ in range(10):
            run.rollout()
        run.stream(20)
        run.step()
        changed = switch.stat().st_size
        switch.unlink()
        for _ in range(5):
            run.step()
        balance = run.ledger.check()
    assert changed >= 20 and balance.produced == balance.delivered + balance.dropped + balance.lost


def test_messages_of_an_earlier_session_that_come_again(tmp_path, monkeypatch):
    """All that a node said before it was replaced is repeated, in the connection of its replacement."""
    hear, said, is_kept = Head._hear, [], [True]
    heads: list[Head] = []

    def keep(self, arrived, now):
        heads[:] = [self]
        if is_kept[0] and self.admission.node_of.get(arrived.key) == 0:
            said.append(arrived._replace(frames=[bytes(frame) for frame in arrived.frames]))
        hear(self, arrived, now)

    monkeypatch.setattr(Head, "_hear", keep)
    backend = Loopback(nodes=2, workers_per_node=2, heartbeat_s=(0.1, 10.0, 30.0))
    folder = tmp_path / "lives"
    with ce.ClusterEnv(chaos.numbered(folder, N), backend=backend, recovery=RECOVERY) as envs:
        run = Run(envs, folder)
        for _ in range(10):
            run.step()
            run.rollout()
        is_kept[0] = False
        psutil.Process(backend.jobs[0].process(0).pid).kill()
        deadline = time.monotonic() + 60
        while joined(envs) < 3 or envs.stats()["missing_nodes"]:
            assert time.monotonic() < deadline
            run.step()
        dropped = envs.stats()["dropped_messages"]
        head, now = heads[0], time.monotonic()
        with head._mine:
            peer = head._active[0]
            for arrived in said[1:]:  # but for its Hello
                hear(head, arrived._replace(route=peer.route, link=peer.link), now)
        assert len(said) > 20 and envs.stats()["dropped_messages"] >= dropped + len(said) - 1
        for _ in range(10):
            run.step()
            run.rollout()
        run.step()
        balance = run.ledger.check()
    assert balance.produced == balance.delivered + balance.lost
