"""Episodes of `act="head"` across rollouts: nothing is skipped or shown twice, whoever collected the rollout before."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import clusterenv as ce
from clusterenv.errors import PolicyError, UsageError
from clusterenv.spec import Vector

LENGTH = 5


class Count(gym.Env):
    """The observation is the number of steps; an episode has five."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t >= LENGTH, False, {}


class Together(VectorEnv):
    """The same, as a NEXT_STEP vector environment that resets and steps all its slots together.

    Args:
        fails_at: raise in this call of `step`, counted over all incarnations.
    """

    calls = 0

    def __init__(self, num_envs: int, length: int = LENGTH, fails_at: int = 0) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.length, self.fails_at = num_envs, length, fails_at
        self.single_observation_space, self.single_action_space = Count.observation_space, Count.action_space
        self.observation_space, self.action_space = (
            batch_space(space, num_envs) for space in (Count.observation_space, Count.action_space)
        )

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions):
        Together.calls += 1
        if Together.calls == self.fails_at:
            raise RuntimeError("as planned")
        is_reset = self.t >= self.length
        self.t = 0 if is_reset else self.t + 1
        ended, nothing = np.full(self.num_envs, self.t >= self.length), np.zeros(self.num_envs, bool)
        obs = np.full((self.num_envs, 1), self.t, np.float32)
        return obs, np.full(self.num_envs, 0.0 if is_reset else 1.0), ended, nothing, {}


def policy() -> ce.NumpyPolicy:
    return ce.NumpyPolicy(lambda w, obs: obs @ w["w"], {"w": np.zeros((1, 2), np.float32)}, dist="categorical")


def opened(env: Any, mode: str | None = None) -> ce.ClusterEnv:
    recovery = ce.Recovery(backoff_s=(0.0, 0.0))
    kwargs = {} if mode is None else {"autoreset_mode": mode}
    return ce.ClusterEnv(env, num_envs=2, backend=ce.Local(workers=0), recovery=recovery, **kwargs)


def check(batch: ce.Rollout) -> None:
    """A row is followed by the next number, or ends its episode; the first of an episode is flagged."""
    for k in range(2):
        for t in np.flatnonzero(batch.valid[:, k]).tolist():
            now = int(batch.obs[t, k, 0])
            assert batch.rewards[t, k] == 1.0 and batch.episode_starts[t, k] == (now == 0), (t, k)
            assert batch.terminations[t, k] == (now == LENGTH - 1), (t, k)
            if t + 1 < len(batch.obs) and batch.valid[t + 1, k]:
                assert batch.obs[t + 1, k, 0] == (0 if now == LENGTH - 1 else now + 1), (t, k)


@pytest.mark.parametrize("act", ["head", "auto"])
@pytest.mark.parametrize("steps", [LENGTH, LENGTH - 1, LENGTH + 2])
@pytest.mark.parametrize("env", ["NextStep", "SameStep", "together"])
def test_episodes_that_end_between_rollouts(env: str, steps: int, act: Any) -> None:
    is_vector = env == "together"
    with opened(Vector(lambda n, seeds: Together(n)) if is_vector else Count, None if is_vector else env) as envs:
        collector = envs.collector(policy(), seed=1, act=act)
        previous: Any = None
        for _ in range(6):
            batch = collector.rollout(steps)
            check(batch)
            if previous is not None and not is_vector:
                assert batch.obs[0, 0, 0] == (previous.obs[-1, 0, 0] + 1) % LENGTH
            previous = batch
        assert set(batch.episodes.lengths.tolist()) <= {LENGTH}


def test_a_vector_environment_that_is_lost_shows_nothing_of_its_next_incarnation_in_that_rollout() -> None:
    Together.calls = 0
    with opened(Vector(lambda n, seeds: Together(n, 50, fails_at=4))) as envs:
        collector = envs.collector(policy(), seed=1, act="head")
        first, second = collector.rollout(10), collector.rollout(10)
    assert first.valid[:, 0].tolist() == [True] * 3 + [False] * 7
    assert first.truncations[:, 0].tolist() == [False] * 3 + [True] + [False] * 6
    assert first.obs[:3, 0, 0].tolist() == [0, 1, 2] and second.valid.all() and not second.episode_starts.any()
    assert (np.diff(second.obs[:, 0, 0]) == 1).all()


def test_random_numbers_are_not_repeated_after_a_policy_that_failed() -> None:
    agent = policy()
    with opened(Count) as envs:
        collector = envs.collector(agent, seed=1, act="head")
        first = collector.rollout(32)
        agent.values = {"w": np.full((1, 2), np.nan, np.float32)}
        with pytest.raises(PolicyError):
            collector.rollout(32)
        agent.values = {"w": np.zeros((1, 2), np.float32)}
        envs.reset(seed=1)
        assert not np.array_equal(collector.rollout(32).actions, first.actions)


def test_another_collectors_fragment_is_not_disturbed() -> None:
    with opened(Count) as envs:
        ahead = envs.collector(policy(), seed=1, prefetch=True)
        ahead.rollout(4)
        with pytest.raises(UsageError, match="another collector"):
            envs.collector(policy(), seed=1, act="head").rollout(4)
        check(ahead.rollout(4))
