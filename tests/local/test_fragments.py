"""What a fragment is labelled with is what was true when it ran."""

from __future__ import annotations

import itertools
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import clusterenv as ce
from clusterenv.policy.sync.publisher import Publisher
from toys import Trouble


def test_a_slot_that_is_rebuilt_before_the_rollout_is_put_together_keeps_the_label_of_its_rows(tmp_path):
    """Slot 0 fails in its second fragment and is rebuilt while the other worker is still busy with its own."""

    class Slow(Trouble):
        def step(self, action):
            deadline = time.monotonic() + 20
            while self.slot == 1 and self.t == 12 and time.monotonic() < deadline:
                if (tmp_path / "lives.0").stat().st_size > 1:
                    break  # the next incarnation of slot 0 is there
                time.sleep(0.001)
            return super().step(action)

    memory = str(tmp_path / "lives")
    thunks = [lambda i=i: Slow(i, "raise" if i == 0 else None, at=12, memory=memory, length=100) for i in range(2)]
    recovery = ce.Recovery(backoff_s=(0.0, 0.0))
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=2), recovery=recovery) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        batches = [collector.rollout(8) for _ in range(3)]
    assert [batch.incarnations.tolist() for batch in batches] == [[0, 0], [0, 0], [1, 0]]
    assert batches[1].valid[:, 0].tolist() == [True] * 3 + [False] * 5
    assert batches[1].obs[:, 0, 1].max() == 0.0 and batches[2].obs[:, 0, 1].min() == 1.0, "the lives in the rows"


def test_the_drift_of_a_version_whose_weights_nobody_has_is_not_known():
    policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical")
    with ce.ClusterEnv("CartPole-v1", 1, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(policy, sync=ce.APS())
        publisher: Publisher = collector._sync.publisher
        publisher.publish()
        publisher.note(3, {"obs": np.zeros((2, 4), np.float32)}, np.zeros((2, 2), np.float32))
        publisher.weights_of = {3: publisher.data}.get
        assert publisher.drift(1, {}) is None, "a late fragment of version 1, none of whose samples was valid"


class OddInfo(Trouble):
    """An info that is not plain data in the 12th step, and as the last of an episode; another one that is."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        odd = {"handle": object()} if self.slot == 0 and self.t in (12, 15) else {}
        return obs, reward, terminated, truncated, {"count": self.t, **odd}


def test_an_info_that_cannot_travel_costs_the_slot_that_returned_it():
    """The slots share a worker; the others keep their rows and infos."""

    class OddLast(Trouble):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            odd = {"handle": object()} if self.slot == 2 and self.t == 3 else {}
            return obs, reward, terminated, truncated, {"count": self.t, **odd}

    thunks = [lambda i=i: OddLast(i, length=15) for i in range(3)]
    with ce.ClusterEnv(thunks, backend=ce.Loopback(nodes=1, workers_per_node=1)) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            obs, *_, infos = envs.step(np.zeros(3, np.int64))
        assert infos["transition_valid"].tolist() == [True, True, False]
        assert "handle" in infos["loss_reason"][2]
        assert infos["count"][:2].tolist() == [3, 3] and obs[:2, 3].tolist() == [3, 3]


@pytest.mark.parametrize("call", ["rollout", "stream"])
def test_an_info_that_cannot_travel_is_left_out_by_name(call):
    """In a network run it must neither hold the rollout up nor mix up the fragments after it."""
    thunks = [lambda i=i: OddInfo(i, length=15) for i in range(2)]
    with ce.ClusterEnv(thunks, backend=ce.Loopback(nodes=2)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1, info_keys=["count", "handle"])
        if call == "rollout":
            batches = [collector.rollout(8, timeout_s=60) for _ in range(4)]
        else:
            batches = list(itertools.islice(collector.stream(8, min_envs=2, timeout_s=60), 4))
        events = [event for event in envs.events() if event.kind == "info_not_sent"]
    for batch in batches:
        ends = np.argwhere(batch.terminations)
        assert [obs[3] for obs in batch.final_obs] == [15.0] * len(ends), "the finals are those of these rows"
        assert (batch.infos["count"][batch.terminations] == 15).all()
        assert batch.valid.all() and "handle" not in batch.infos
    assert sum(len(batch.episodes) for batch in batches) == 4
    assert "info['handle'] is a" in events[0].reason and "plain data" in events[0].reason and events[0].slots == (0,)


@pytest.mark.parametrize("at", [2, 4])
def test_an_observation_outside_a_discrete_space_costs_its_column_also_at_the_end_of_an_episode(at):
    class Walk(gym.Env):
        observation_space, action_space = spaces.Discrete(5), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return 0, {}

        def step(self, action):
            self.t += 1
            return 7 if self.t == at and self.is_broken else self.t, 1.0, self.t >= 4, False, {}

    def thunk(i):
        env = Walk()
        env.is_broken = i == 1
        return env

    with ce.ClusterEnv([lambda i=i: thunk(i) for i in range(2)], backend=ce.Local(workers=1)) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(4)
        event = next(event for event in envs.events() if event.kind == "env_error")
    assert batch.valid[:, 0].all()
    assert batch.valid[:, 1].tolist() == [t < at - 1 for t in range(4)]
    assert batch.truncations[:, 1].tolist() == [t == at - 1 for t in range(4)] and not batch.terminations[:, 1].any()
    assert "observation is 7, its space says 0 to 4" in event.reason and event.slots == (1,)
