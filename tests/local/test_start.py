"""The start of a run over a network: nodes that come late, or are lost early, do not abort it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import clusterenv as ce
from loopback_agents import Loopback, meanwhile, wait_for
from toys import Trouble


class Gated(Trouble):
    """Says that it is being made, and is made once the test allows it."""

    def __init__(self, index, folder):
        (folder / f"making-{index}").touch()
        while not (folder / f"go-{index}").exists():
            time.sleep(0.01)
        super().__init__(index, length=10**6)


def steps_well(envs, n):
    envs.reset(seed=1)
    for _ in range(3):
        *_, infos = envs.step(np.zeros(n, dtype=np.int64))
    assert "transition_valid" not in infos


def test_a_node_that_joins_while_environments_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr("clusterenv.backends.cluster._OTHERS_S", 0.1)
    come = threading.Event()
    backend = Loopback(2, lambda agents, node: agents.hold_back(node, come) if node else None, min_nodes=1)

    def others():
        (tmp_path / "go-0").touch()
        wait_for(lambda: (tmp_path / "making-1").exists())
        come.set()
        wait_for(lambda: backend.count("node_joined") == 2)
        (tmp_path / "go-1").touch()

    thunks = [lambda i=i: Gated(i, tmp_path) for i in range(2)]
    with meanwhile(others), ce.ClusterEnv(thunks, backend=backend) as envs:
        steps_well(envs, 2)
        assert envs.stats()["missing_nodes"] == []


def test_a_node_that_is_lost_before_all_have_come():
    come = threading.Event()
    backend = Loopback(2, lambda agents, node: agents.hold_back(node, come) if node else None)

    def others():
        wait_for(lambda: backend.count("node_joined") == 1)
        first = backend.jobs[0].process(0)
        first.kill()
        wait_for(lambda: backend.jobs[0].starts[0] == 2)
        come.set()

    with meanwhile(others), ce.ClusterEnv("CartPole-v1", 2, backend=backend) as envs:
        steps_well(envs, 2)


def test_a_job_that_ends_before_its_node_has_come_is_started_again(caplog):
    caplog.set_level(logging.INFO, "clusterenv")

    def fail_first(agents, node):
        fails = node == 1 and agents.starts[1] == 1
        return [sys.executable, "-c", "raise SystemExit('a broken machine')"] if fails else None

    backend = Loopback(2, fail_first)
    with ce.ClusterEnv("CartPole-v1", 2, backend=backend) as envs:
        steps_well(envs, 2)
        assert backend.jobs[0].starts == {0: 1, 1: 2}
        assert backend.count("node_asked_again") == 1
    assert "waiting for node 1: ended: exited with code 1, to be started again" in caplog.text, "who is awaited"


def test_a_node_that_is_lost_while_environments_are_made(tmp_path):
    backend = Loopback(2)

    def others():
        wait_for(lambda: all((tmp_path / f"making-{i}").exists() for i in range(2)))
        os.kill(backend.jobs[0].process(1).pid, signal.SIGKILL)
        wait_for(lambda: backend.count("node_lost") == 1)
        for i in range(2):
            (tmp_path / f"go-{i}").touch()

    thunks = [lambda i=i: Gated(i, tmp_path) for i in range(2)]
    with meanwhile(others), ce.ClusterEnv(thunks, backend=backend) as envs:
        steps_well(envs, 2)


def test_nodes_that_never_come_abort_the_start_with_their_last_words(monkeypatch):
    monkeypatch.setattr("clusterenv.cluster.roster._ASK_AGAIN_S", 0.5)
    backend = Loopback(1, lambda *_: [sys.executable, "-c", "raise SystemExit('no such library')"])
    with pytest.raises(ce.StartError, match=r"(?s)node 0 ended: .*3 times.*no such library"):
        ce.ClusterEnv("CartPole-v1", 1, backend=backend)
    assert backend.jobs[0].starts == {0: 3}


def exits(code):
    return [sys.executable, "-c", f"raise SystemExit({code})"]


def test_a_node_that_can_never_join_aborts_the_start_at_once_if_it_is_needed():
    backend = Loopback(2, lambda agents, node: exits(42) if node else None)
    with pytest.raises(ce.StartError, match="node 1 ended: exited with code 42"):
        ce.ClusterEnv("CartPole-v1", 2, backend=backend)
    assert backend.jobs[0].starts[1] == 1
    backend = Loopback(2, lambda agents, node: exits(42) if node else None, min_nodes=1)
    with ce.ClusterEnv("CartPole-v1", 2, backend=backend) as envs:
        steps_well(envs, 2)
        assert envs.stats()["missing_nodes"] == [1]
