"""Where a collector's time goes: rates of the recent batches, not of the start of the workers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from clusterenv.engine.collecting.counters import Counters


class OneEpisode:
    returns, lengths = np.array([1.0]), np.array([9])

    def __len__(self):
        return 1


def collect(counters, seconds, env_s=0.4):
    """A batch of 100 steps by two workers."""
    for worker in range(2):
        counters.fragment(worker, 50, 1, env_s, 0.1)
    counters.batch(SimpleNamespace(valid=np.ones((50, 2), bool), episodes=OneEpisode()), 100)
    counters.spent(seconds)


def test_the_start_of_the_workers_is_left_out_as_soon_as_there_is_a_second_batch():
    counters = Counters(2)
    collect(counters, 20.0)
    assert counters.stats()["steps_per_s"] == 5.0, "better than nothing"
    for _ in range(100):
        collect(counters, 1.0)
        stats = counters.stats()
        assert stats["steps_per_s"] == 100.0 and stats["worker_steps_per_s"].tolist() == [50.0, 50.0]
        assert stats["time_shares"] == pytest.approx({"environment": 0.4, "policy": 0.1, "waiting": 0.5})
    assert stats["collecting_s"] == pytest.approx(120.0) and stats["steps"] == 10_100
    assert stats["busy_s"] == pytest.approx({"environment": 40.4, "policy": 10.1})


def test_rates_follow_what_happens_now():
    counters = Counters(2)
    for _ in range(50):
        collect(counters, 1.0)
    for _ in range(32):
        collect(counters, 0.5, env_s=0.1)
    assert counters.stats()["steps_per_s"] == 200.0 and counters.stats()["time_shares"]["environment"] == pytest.approx(
        0.2
    )
    counters.spent(7.0)  # the end of a stream, which brought no batch
    assert counters.stats()["steps_per_s"] == 200.0
    assert Counters(2).stats()["time_shares"] == {"environment": 0.0, "policy": 0.0, "waiting": 0.0}


def test_slower_workers_get_shorter_fragments():
    counters = Counters(3)
    assert counters.balanced_lengths(100) == [100, 100, 100], "nothing is known yet"
    for worker, env_s in enumerate((0.8, 2.0, 0.85)):
        counters.fragment(worker, 100, 8, env_s, 0.0)
    assert counters.balanced_lengths(100) == [100, 40, 100], "small differences do not count"
    assert counters.balanced_lengths(1) == [1, 1, 1]
    for _ in range(8):  # another one is slow now
        for worker, env_s in enumerate((4.0, 1.0, 1.0)):
            counters.fragment(worker, 100, 8, env_s, 0.0)
    assert counters.balanced_lengths(100) == [25, 100, 100]
    counters.fragment(0, 0, 8, 0.0, 0.0)  # it failed at once
    assert counters.balanced_lengths(100) == [25, 100, 100]
