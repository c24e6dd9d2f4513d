"""Losses of nodes are nobody's crash: they cost episodes, however many there are, and never the run."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import psutil
import pytest

import clusterenv as ce
from loopback_agents import Loopback
from stepping import step_until
from toys import Trouble

pytestmark = pytest.mark.guarantee(11)


def agent_of(pid: int) -> int:
    """The node agent above a worker: worker, fork server, agent."""
    server = psutil.Process(pid).parent()
    assert server is not None
    return server.ppid()


def test_lost_nodes_do_not_count_as_crashes_of_their_workers():
    recovery = ce.Recovery(max_restarts=1)
    thunks = [lambda i=i: Trouble(i, length=10**6) for i in range(4)]
    backend = ce.Loopback(nodes=2, heartbeat_s=(0.1, 10.0, 60.0))
    with ce.ClusterEnv(thunks, backend=backend, recovery=recovery) as envs:
        envs.reset(seed=0)
        lost = np.zeros(4, dtype=int)
        for losses in (1, 2, 3):
            deadline = time.monotonic() + 60
            while envs.stats()["worker_pids"][0] is None:
                assert time.monotonic() < deadline
                envs.step(np.zeros(4, dtype=np.int64))
            os.kill(agent_of(envs.stats()["worker_pids"][0]), signal.SIGKILL)
            while lost[0] < losses or envs.stats()["incarnations"][0] < losses:
                assert time.monotonic() < deadline
                *_, infos = envs.step(np.zeros(4, dtype=np.int64))
                lost += ~infos.get("transition_valid", np.ones(4, dtype=bool))
        assert lost.tolist() == [3, 3, 0, 0]


class NeedsSimulator:
    """A thunk whose code cannot be loaded where the simulator is not installed."""

    def __init__(self, index):
        self.index = index

    def __reduce__(self):
        return _load, (self.index,)

    def __call__(self):
        raise AssertionError("only what is made of its pickle is called")


def _load(index):
    if os.environ.get("NO_SIMULATOR"):
        raise ImportError("No module named 'simulator'")
    return lambda: Trouble(index, length=10**6)


def test_a_replacement_that_cannot_load_the_code_is_not_used():
    def start(agents, node):
        if agents.starts[node] > 1:
            agents.run(node, agents.command(node), NO_SIMULATOR="1")
            return []
        return None

    backend = Loopback(2, start)
    with ce.ClusterEnv([NeedsSimulator(i) for i in range(2)], backend=backend) as envs:
        envs.reset(seed=0)
        backend.jobs[0].process(0).kill()
        step_until(envs, lambda: backend.count("node_unfit") and envs.stats()["incarnations"][0] > 0)
        (event,) = [event for event in envs.events() if event.kind == "node_unfit"]
        assert "node 0" in event.reason and "No module named 'simulator'" in event.detail
        step_until(envs, lambda: "transition_valid" not in envs.step(np.zeros(2, dtype=np.int64))[4])
        assert envs.stats()["missing_nodes"] == [0] and backend.jobs[0].starts == {0: 2, 1: 1}
        backend.jobs[0].process(1).kill()
        with pytest.raises(ce.SpecError, match="could not be loaded on node 1"):
            step_until(envs, lambda: False)


def test_a_node_that_cannot_load_the_code_at_the_start():
    def without(agents, node):
        if node == 1:
            agents.run(node, agents.command(node), NO_SIMULATOR="1")
            return []
        return None

    thunks = [NeedsSimulator(i) for i in range(2)]
    with pytest.raises(ce.SpecError, match="could not be loaded on node 1"):
        ce.ClusterEnv(thunks, backend=Loopback(2, without))
    with ce.ClusterEnv(thunks, backend=Loopback(2, without, min_nodes=1)) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(2, dtype=np.int64))
        assert envs.stats()["missing_nodes"] == [1]
