"""Losses of nodes are nobody's crash: they cost episodes, however many there are, and never the run."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import psutil

import clusterenv as ce
from toys import Trouble


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
