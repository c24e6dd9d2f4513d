"""Rollouts whose slower workers collect fewer steps, or are not waited for."""

from __future__ import annotations

import os
import signal
import time
from copy import deepcopy

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


def in_order(batches, n, length=37):
    """Assert that the valid rows of slot n are its steps, each once and in order; return how many there are."""
    own = np.concatenate([batch.obs[batch.valid[:, n], n, 1:] for batch in batches])
    assert (own[:, 0] * length + own[:, 1]).tolist() == list(range(len(own))), "each step once, in order"
    return len(own)


@pytest.mark.parametrize("where", BACKENDS)
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_late_fragment_is_masked_and_comes_with_a_later_rollout(where, prefetch):
    thunks = [lambda i=i: Paced(i, 0.0 if i < 2 else 0.01) for i in range(4)]
    with ce.ClusterEnv(thunks, backend=BACKENDS[where]) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1, prefetch=prefetch)
        batches = [deepcopy(collector.rollout(24, copy=i % 2 == 0, deadline_s=0.1)) for i in range(24)]
        stats = collector.stats()
        seen = [batch.valid.all(axis=0).tolist() for batch in batches]
        assert all(row[:2] == [True, True] and row[2] == row[3] for row in seen)
        late = [not row[2] for row in seen]
        assert any(late) and not all(late)
        for batch, is_late in zip(batches, late, strict=True):
            if is_late:
                assert not batch.valid[:, 2:].any() and not batch.truncations[:, 2:].any()
                assert not batch.rewards[:, 2:].any() and (batch.versions[:, 2:] == -1).all()
                assert (batch.obs[:, 2:] == batch.last_obs[2:]).all() and (batch.last_obs[2:, 0] == [2, 3]).all()
        rest = collector.rollout(24)
        assert rest.valid.all(), "without a deadline it waits"
    batches = [*batches, rest]
    assert [in_order(batches, n) for n in range(4)] == [24 * 25] * 2 + [24 * (25 - sum(late))] * 2
    assert stats["late_fragments"] == sum(late) and stats["invalid_rows"] == 0 and stats["dropped_fragments"] == 0


def late_rollout(envs, collector):
    """Collect until a rollout was delivered without the slow worker's fragment."""
    batches = [collector.rollout(8, deadline_s=0.05)]
    while batches[-1].valid[:, 1].any():
        batches.append(collector.rollout(8, deadline_s=0.05))
    return batches


def slow_and_fast(**kwargs):
    thunks = [lambda i=i: Paced(i, 0.0 if i == 0 else 0.05) for i in range(2)]
    return ce.ClusterEnv(thunks, backend=ce.Local(workers=2), recovery=ce.Recovery(backoff_s=(0.05, 0.1)), **kwargs)


def test_what_a_late_worker_allows():
    with slow_and_fast() as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        batches = late_rollout(envs, collector)
        for refused in (lambda: envs.step(np.zeros(2, np.int64)), lambda: collector.rollout(9)):
            with pytest.raises(ce.UsageError, match="late worker"):
                refused()
        assert len(collector.evaluate(episodes=2, deterministic=False).returns) == 2
        batches.append(collector.rollout(8))
        assert batches[-1].valid.all() and in_order(batches, 0) and in_order(batches, 1)
        late_rollout(envs, collector)
        envs.reset(seed=1)
        assert collector.stats()["dropped_fragments"] == 1
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("on_loss", ["rerun", "mask"])
def test_a_late_worker_that_is_killed(on_loss):
    with slow_and_fast() as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1, on_loss=on_loss)
        collector.rollout(2)
        late_rollout(envs, collector)
        os.kill(envs.stats()["worker_pids"][1], signal.SIGKILL)
        batch = collector.rollout(8)
        assert batch.valid[:, 0].all() and (batch.obs[:, 0, 0] == 0).all()
        if on_loss == "mask":
            assert not batch.valid[:, 1].any() and batch.truncations[0, 1]
            batch = collector.rollout(8)
        assert batch.valid.all() and batch.incarnations.tolist() == [0, 1]
        assert batch.obs[0, 1].tolist() == [1.0, 0.0, 0.0], "a new incarnation"
