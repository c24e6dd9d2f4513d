"""Rollouts whose slower workers collect fewer steps."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce
from clusterenv.learning import gae


class Paced(gym.Env):
    """Counts its steps, and takes its time for each. The observation is (slot, episode, t)."""

    observation_space = spaces.Box(-1e6, 1e6, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, slot, step_s, length=37):
        self.slot, self.step_s, self.length = slot, step_s, length
        self.episode, self.t = -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        time.sleep(self.step_s)
        self.t += 1
        return self._obs(), 1.0, self.t >= self.length, False, {}

    def _obs(self):
        return np.array([self.slot, self.episode, self.t], np.float64)


BACKENDS = {"local": ce.Local(workers=2), "network": ce.Loopback(nodes=2, workers_per_node=1)}


@pytest.mark.parametrize("where", BACKENDS)
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_slow_worker_collects_less_and_nothing_is_lost(where, prefetch):
    thunks = [lambda i=i: Paced(i, 0.0 if i < 2 else 0.02) for i in range(4)]
    with ce.ClusterEnv(thunks, backend=BACKENDS[where]) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1, prefetch=prefetch)
        batches = [collector.rollout(24, balance=True) for _ in range(6)]
        stats = collector.stats()
    lengths = [batch.valid.sum(axis=0).tolist() for batch in batches]
    assert lengths[0] == [24] * 4 and all(row[:2] == [24, 24] for row in lengths)
    assert all(1 <= row[2] == row[3] < 24 for row in lengths[2:])
    assert stats["invalid_rows"] == 0 and stats["steps"] == np.sum(lengths), "rows that were not played are not lost"
    assert stats["worker_step_s"][1] > stats["worker_step_s"][0]
    for batch, row in zip(batches, lengths, strict=True):
        for n, length in enumerate(row):
            assert batch.valid[:length, n].all() and not batch.valid[length:, n].any()
            assert not batch.truncations[:, n].any(), "the episode goes on in the next rollout"
            assert not (batch.rewards[length:, n].any() or batch.terminations[length:, n].any())
            assert (batch.next_obs()[length - 1, n, 2] > 0) and (batch.obs[length:, n] == batch.last_obs[n]).all()
    steps = [np.concatenate([batch.obs[batch.valid[:, n], n, 1:] for batch in batches]) for n in range(4)]
    for own in steps:
        number = own[:, 0] * 37 + own[:, 1]
        assert number.tolist() == list(range(len(own))), "each step once, in order"


def test_advantages_bootstrap_from_the_state_that_a_short_fragment_ended_in():
    thunks = [lambda i=i: Paced(i, 0.0 if i == 0 else 0.03, length=10_000) for i in range(2)]
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=2)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        collector.rollout(16, balance=True)
        batch = collector.rollout(16, balance=True)
    length = int(batch.valid[:, 1].sum())
    assert 1 <= length < 16
    found = gae(batch, lambda obs: obs[:, 2], gamma=1.0, lam=1.0)  # the value of a state is its t, a step gives 1
    first, last = batch.obs[0, 1, 2], batch.last_obs[1, 2]
    assert last == first + length
    assert found.returns[:length, 1].tolist() == [last + length - t for t in range(length)]


def test_a_single_worker_collects_every_row():
    with ce.ClusterEnv([lambda i=i: Paced(i, 0.0) for i in range(2)], backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        assert all(collector.rollout(8, balance=True).valid.all() for _ in range(3))
        with pytest.raises(ce.SpecError, match="balance"):
            collector.rollout(8, balance=2)
