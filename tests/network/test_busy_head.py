"""A head that learns for a minute, with the default intervals: nobody is declared dead, and memory is bounded."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import psutil
import pytest

import clusterenv as ce
from clusterenv.testing import chaos
from clusterenv.testing.chaos.numbered import read_record
from stepping import kinds

BUSY_S = 60.0
HELD_S = 12.0
"""How long the GIL is held at a stretch: more than the silence after which a node is declared dead."""

N, STEPS = 4, 16


def busy(seconds: float) -> None:
    """Compute as a learner does: some of it in Python and numpy, some in a library that holds the GIL."""
    end = time.monotonic() + seconds
    ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))
    a = np.random.default_rng(0).random((200, 200))
    while time.monotonic() < end:
        a = np.tanh(a @ a / 200)
        ctypes.PyDLL(None).usleep(20_000)


def memory_mib(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / (1 << 20)


@pytest.mark.slow
@pytest.mark.guarantee(14)
@pytest.mark.timeout(180)
def test_a_minute_of_learning_within_a_stream(tmp_path, record_property):
    ledger = chaos.Ledger(tmp_path, N)
    weights = {"w": np.zeros(chaos.ACTIONS, np.float32)}
    with ce.ClusterEnv(chaos.numbered(tmp_path, N), backend=ce.Loopback(nodes=2)) as envs:
        ledger.reset(envs.reset(seed=1)[0])
        collector = envs.collector(ce.NumpyPolicy(chaos.logits, weights, dist="categorical"), seed=1)
        stream = collector.stream(STEPS)
        for _ in range(200):  # until memory is what it is in a run
            ledger.batch(next(stream), envs.events())
        head, nodes = psutil.Process(), psutil.Process().children(recursive=True)
        before = memory_mib([head]), memory_mib(nodes)
        produced = sum(read_record(tmp_path, slot, 0).produced for slot in range(N))
        busy(BUSY_S)
        made = sum(read_record(tmp_path, slot, 0).produced for slot in range(N)) - produced
        grown = memory_mib([head]) - before[0], memory_mib(nodes) - before[1]
        for _ in range(200):
            ledger.batch(next(stream), envs.events())
        stream.close()
        dropped = collector.stats()["dropped_fragments"]
        ledger.left_stream(STEPS, 2, dropped * STEPS * (N // 2))
        actions = envs.action_space.sample()
        ledger.step(actions, envs.step(actions), envs.events())
        balance = ledger.check()
        record_property("memory_mib", max(grown))
        assert not {"node_lost", "worker_lost", "slow", "long_call"} & set(kinds(envs)), envs.events()
        assert balance.lives == N and balance.lost == 0, "nothing is lost"
        assert made <= N * STEPS * 4, "workers wait: a few fragments ahead, not a minute's worth"
        assert max(grown) < 64
