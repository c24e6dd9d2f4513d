"""What a node says after it was given up is not delivered: each transition comes once, or is declared lost."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import psutil
import pytest

import clusterenv as ce
from clusterenv.testing import chaos
from loopback_agents import meanwhile, wait_for
from namespace_cluster import Namespaces
from netns import Network
from stepping import joined, kinds

pytestmark = [pytest.mark.network, pytest.mark.guarantee(4)]

FAST = (0.2, 1.5, 3.0)  # beat, dead after, lease
N = 4


@pytest.fixture
def net():
    with Network(nodes=2) as made:
        yield made


class Node:
    """The first node: its agent is stopped, and with it perhaps everything else on its machine."""

    def __init__(self, backend: Namespaces, is_whole: bool) -> None:
        self._agent = psutil.Process(backend.jobs[0].agents[0].pid)
        # Its workers go on if only the agent is stopped: their rows are sent when it is continued.
        self._processes = [self._agent, *(self._agent.children(recursive=True) if is_whole else ())]

    def stop(self) -> None:
        for process in self._processes:
            process.suspend()

    def go_on(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def lost(envs):
    return kinds(envs).count("node_lost")


def disturb(envs, backend, is_whole, turn):
    """Take turns (one call each) while the first node is stopped, given up and continued, until it is back; return how
    long it took to give it up."""
    for _ in range(10):
        turn()
    node, lost_before, joined_before = Node(backend, is_whole), lost(envs), joined(envs)
    detected: list[float] = []
    began = time.monotonic()

    def go_on_later():
        with contextlib.suppress(AssertionError):  # `detected` stays empty
            wait_for(lambda: lost(envs) > lost_before, 30)
            detected.append(time.monotonic() - began)
            time.sleep(0.3)
        node.go_on()

    with meanwhile(go_on_later):
        node.stop()
        while joined(envs) == joined_before or envs.stats()["missing_nodes"]:
            turn()
            assert time.monotonic() - began < 60, envs.events()
    assert detected and detected[0] < FAST[1] + 3.0
    for _ in range(30):  # whatever it says late would come now
        turn()
    return detected[0]


@pytest.mark.parametrize("is_whole", [False, True], ids=["agent", "machine"])
def test_no_row_of_a_stopped_node_is_delivered_late(net, tmp_path, is_whole, record_property):
    """Environments number their transitions: a late one would be out of order, or of an earlier life."""
    backend = Namespaces(net, heartbeat_s=FAST)
    recovery = ce.Recovery(backoff_s=(0.05, 0.1))
    ledger = chaos.Ledger(tmp_path, N)
    with ce.ClusterEnv(chaos.numbered(tmp_path, N, pace_s=0.002), backend=backend, recovery=recovery) as envs:
        ledger.reset(envs.reset(seed=1)[0])

        def step():
            actions = envs.action_space.sample()
            ledger.step(actions, envs.step(actions), envs.events())

        detected = disturb(envs, backend, is_whole, step)
        weights = {"w": np.zeros(chaos.ACTIONS, np.float32)}
        collector = envs.collector(ce.NumpyPolicy(chaos.logits, weights, dist="categorical"), seed=1)
        more = disturb(envs, backend, is_whole, lambda: ledger.batch(collector.rollout(8, timeout_s=60), envs.events()))
        record_property("detected_s", max(detected, more))
        step()  # the ledger is compared with the environments' own counts after a step
        balance = ledger.check()
        assert balance.lives == N + 2 + 2 and balance.dropped == 0, "each of its slots has begun anew twice"
        assert balance.produced == balance.delivered + balance.lost
