"""`Event.step` is the number of the failing call in its episode, however the environment was stepped."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv as ce

EPISODE, CALL = 1, 7
"""Which episode fails, and in which call of step(): 0 is its reset()."""


class Fails(gym.Env):
    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, how: str, length: int = 10) -> None:
        self.how, self.length, self.episode = how, length, -1

    def _is_now(self, call: int) -> bool:
        return (self.episode, call) == (EPISODE, 0 if self.how.endswith("reset") else CALL)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        obs = self._obs()
        reward = np.inf if self.how == "reward" and self._is_now(self.t) else 1.0
        return obs, reward, self.t >= self.length, False, {}

    def _obs(self):
        obs = np.zeros(2, np.float32)
        if self._is_now(self.t):
            if self.how.startswith("raise"):
                raise RuntimeError("simulator exploded")
            if self.how.startswith("nan"):
                obs[1] = np.nan
            if self.how == "shape":
                return obs[:1]
        return obs


def fail(envs, how, call):
    """Step until the failure is reported; returns its event."""
    ones = np.ones(2, dtype=np.int64)
    envs.reset(seed=3)
    if call in ("rollout", "mixed"):
        collector = envs.collector(ce.RandomPolicy(), seed=1)
    for _ in range(40):
        if call == "rollout":
            collector.rollout(32)
        elif call == "mixed":  # an episode that began in step() fails in a rollout
            envs.step(ones)
            collector.rollout(2)
        elif call == "send":
            envs.send(ones)
            envs.recv()
        else:
            envs.step(ones)
        found = [event for event in envs.events() if event.kind == "env_error"]
        if found:
            return found[0]
    raise AssertionError("no failure was reported")


@pytest.mark.parametrize("call", ["step", "send", "rollout", "mixed"])
@pytest.mark.parametrize("how", ["raise", "nan", "shape", "reward", "raise_in_reset", "nan_in_reset"])
def test_the_step_of_an_event_is_the_number_of_the_failing_call(how, call):
    thunks = [lambda: Fails(how), lambda: Fails("never")]
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=0)) as envs:
        event = fail(envs, how, call)
    assert (event.slots, event.step) == ((0,), 0 if how.endswith("reset") else CALL)
    assert event.phase == ("reset" if how.endswith("reset") else "step")


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
@pytest.mark.parametrize("how", ["raise", "nan"])
def test_the_step_of_an_event_of_a_vector_environment(how, mode):
    def make(num_envs, seeds):
        return SyncVectorEnv([lambda: Fails(how), lambda: Fails("never", length=7)], autoreset_mode=mode)

    with ce.ClusterEnv(ce.Vector(make), num_envs=2, backend=ce.Local(workers=0)) as envs:
        fail(envs, how, "step")
        events = {event.slots: event.step for event in envs.events() if event.kind == "env_error"}
    # Slots of a vector environment fail together. Slot 1 is in its third episode, of seven steps each.
    assert events == {(0,): CALL, (1,): 2 if mode is AutoresetMode.NEXT_STEP else 3}


def test_an_error_in_an_evaluation_names_seed_and_call():
    with ce.ClusterEnv([lambda: Fails("raise")], backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        with pytest.raises(ce.EnvError, match=rf"seed {5 + EPISODE}, incarnation 0, step {CALL}\)"):
            collector.evaluate(episodes=3, seed=5, deterministic=False)
