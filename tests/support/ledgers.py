"""Environments that number their transitions, and a ledger that checks the numbers; importable in workers."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import clusterenv as ce


class Ledger(gym.Env):
    """An environment whose observation is (slot, life, episode, t); episodes have known lengths and ends."""

    observation_space = spaces.Box(-1e6, 1e6, (4,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, slot):
        self.slot, self.episode, self.t = slot, -1, 0

    @staticmethod
    def length(slot, episode):
        return 2 + (3 * slot + 5 * episode) % 7

    @staticmethod
    def terminates(slot, episode):
        return (slot + episode) % 2 == 0

    def _obs(self):
        return np.array([self.slot, 0, self.episode, self.t], dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self._obs(), {"phase": "reset"}

    def step(self, action):
        self.t += 1
        over = self.t >= self.length(self.slot, self.episode)
        ends = self.terminates(self.slot, self.episode)
        info = {"t": self.t, "odd": self.t % 2 == 1} if self.t != 3 else {}
        return self._obs(), 10.0 * self.episode + self.t, over and ends, over and not ends, info


def ledger(n, workers, **kwargs):
    backend = ce.Local(workers=workers)
    return ce.ClusterEnv([lambda i=i: Ledger(i) for i in range(n)], backend=backend, **kwargs)


def constant(values=(0.0, 0.0, 0.0)):
    weights = {"logits": np.array(values, dtype=np.float32)}
    return ce.NumpyPolicy(lambda w, obs: np.tile(w["logits"], (len(obs), 1)), weights)


def nodes_here(envs):
    kinds = [event.kind for event in envs.events()]
    return kinds.count("node_joined") - kinds.count("node_left") - kinds.count("node_lost")


class FragmentLedger:
    """Checks that a slot's fragments come once and in order, each continuing the last one or starting an episode."""

    def __init__(self):
        self.sequence, self.last, self.moved = {}, {}, 0

    def take(self, batch):
        assert batch.valid.all()
        for i, slot in enumerate(batch.slots.tolist()):
            assert batch.sequence[i] == self.sequence.get(slot, -1) + 1
            self.sequence[slot] = int(batch.sequence[i])
            if slot in self.last:
                obs, incarnation, has_ended = self.last[slot]
                if batch.incarnations[i] == incarnation:
                    assert np.array_equal(batch.obs[0, i], obs), "it goes on where it was"
                else:
                    assert batch.episode_starts[0, i], "it was moved: a new episode"
                    assert has_ended, "the fragment before truncated the old one"
                    self.moved += 1
            ended = bool(batch.terminations[-1, i] or batch.truncations[-1, i])
            if ended:
                assert [batch.num_steps - 1, i] in batch.final_at.tolist()
            self.last[slot] = (batch.last_obs[i].copy(), int(batch.incarnations[i]), ended)
