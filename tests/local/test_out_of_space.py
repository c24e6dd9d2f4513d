"""Observations outside their space are refused by name (slot, step, key), and never batched."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce

pytestmark = [
    pytest.mark.guarantee(12),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),  # numpy's, within this process
]

AT = 3
"""The step whose observation is wrong."""


class Case(NamedTuple):
    space: spaces.Space[Any]
    good: Any
    bad: Any
    problem: str | None
    """What the event says, after the key; None: the value is delivered."""


GRID = spaces.MultiDiscrete([[3, 5], [5, 7]], start=[[0, 0], [0, 10]])
CASES = {
    "discrete": Case(spaces.Discrete(3), 1, 3, " is 3, its space says 0 to 2"),
    "below": Case(spaces.Discrete(3, start=5), 5, 4, " is 4, its space says 5 to 7"),
    "many": Case(spaces.MultiDiscrete([4, 4]), np.array([1, 3]), np.array([1, 4]), "[1] is 4, its space says 0 to 3"),
    "grid": Case(
        GRID, np.array([[2, 4], [4, 16]]), np.array([[2, 4], [4, 17]]), "[1][1] is 17, its space says 10 to 16"
    ),
    "start": Case(GRID, np.array([[2, 4], [4, 16]]), np.array([[2, 4], [4, 9]]), "[1][1] is 9, its space says 10 to"),
    "binary": Case(
        spaces.MultiBinary(3), np.ones(3, np.int8), np.array([0, 1, 2], np.int8), "[2] is 2, its space says 0 to 1"
    ),
    "wrapping": Case(spaces.MultiBinary(3), np.ones(3, np.int8), np.array([0, 1, 257]), " has the value 257, which"),
    "float": Case(
        spaces.Box(0, 255, (2,), np.uint8), np.ones(2, np.uint8), np.ones(2), " has dtype float64, its space says uint8"
    ),
    "signed": Case(
        spaces.Box(0, 255, (2,), np.uint8), np.ones(2, np.uint8), np.ones(2, np.int64), " has dtype int64, its space"
    ),
    "narrow": Case(
        spaces.Box(-5, 5, (2,), np.int32), np.ones(2, np.int32), np.full(2, 2**40), f" has the value {2**40}, which"
    ),
    "finite": Case(spaces.Box(-1, 1, (2,), np.float64), np.zeros(2), np.array([0, np.inf]), " is not finite: array"),
    "overflow": Case(
        spaces.Box(-1, 1, (2,), np.float32), np.zeros(2, np.float32), np.array([0, 1e300]), " is not finite"
    ),
    "text": Case(spaces.Box(-1, 1, (2,), np.float32), np.zeros(2, np.float32), np.array(["a", "b"]), " has dtype <U"),
    # Many environments exceed the bounds of their Box a little: these values are delivered as they are.
    "beyond": Case(
        spaces.Box(-1, 1, (2,), np.float32), np.zeros(2, np.float32), np.array([0.5, 1.5], np.float32), None
    ),
    "integers": Case(spaces.Box(0, 9, (2,), np.int64), np.ones(2, np.int64), np.array([1, 10]), None),
}
NAMES = list(CASES)
KEYED = spaces.Dict({name: case.space for name, case in CASES.items()})


class Wrong(gym.Env):
    """An environment whose observation is wrong at step `AT` of its first episode, and good otherwise."""

    action_space = spaces.Discrete(2)

    def __init__(self, name: str, is_keyed: bool, at_end: bool = False) -> None:
        self.observation_space = KEYED if is_keyed else CASES[name].space
        self.name, self.is_keyed, self.at_end = name, is_keyed, at_end
        self.episode = -1

    def _obs(self, is_bad: bool) -> Any:
        if not self.is_keyed:
            return CASES[self.name].bad if is_bad else CASES[self.name].good
        return {key: case.bad if is_bad and key == self.name else case.good for key, case in CASES.items()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self._obs(False), {}

    def step(self, action):
        self.t += 1
        is_bad = self.t == AT and self.episode == 0
        return self._obs(is_bad), 1.0, is_bad and self.at_end, False, {}


def random_agent(weights: Any, obs: Any) -> Any:
    first = next(iter(obs.values())) if isinstance(obs, dict) else obs
    return np.zeros((len(first), 2), np.float32)


def policy() -> ce.NumpyPolicy:
    return ce.NumpyPolicy(random_agent, {"w": np.zeros(1, np.float32)}, dist="categorical")


def check_event(envs: ce.ClusterEnv, slot: int, name: str, key: str) -> None:
    problem = CASES[name].problem
    events = [event for event in envs.events() if event.kind == "env_error" and slot in event.slots]
    assert len(events) == (problem is not None), events
    if problem is not None:
        assert events[0].reason.startswith(f"ValueError: observation{key}{problem}"), events[0].reason
        assert (events[0].slots, events[0].step, events[0].phase) == ((slot,), AT, "step")


def check_steps(envs: ce.ClusterEnv, names: list[str], is_keyed: bool) -> None:
    zeros = np.zeros(len(names), np.int64)
    envs.reset(seed=1)
    for _ in range(AT - 1):
        assert "transition_valid" not in envs.step(zeros)[4]
    obs, rewards, _, truncations, infos = envs.step(zeros)
    for slot, name in enumerate(names):
        is_fine, row = CASES[name].problem is None, obs[name][slot] if is_keyed else obs[slot]
        assert truncations[slot] != is_fine and rewards[slot] == is_fine, name
        assert np.array_equal(row, CASES[name].bad if is_fine else CASES[name].good), name
        assert infos.get("transition_valid", np.ones(len(names), bool))[slot] == is_fine, name
        check_event(envs, slot, name, f"['{name}']" if is_keyed else "")
    for _ in range(2):
        obs, *_, infos = envs.step(zeros)
    assert "transition_valid" not in infos


def check_rollout(envs: ce.ClusterEnv, names: list[str], is_keyed: bool) -> None:
    batch = envs.collector(policy(), seed=1).rollout(AT + 3)
    for slot, name in enumerate(names):
        after = (batch.obs[name] if is_keyed else batch.obs)[1:, slot]
        expected = [True] * (AT - 1) + [CASES[name].problem is None] * 4
        assert batch.valid[:, slot].tolist() == expected, name
        rows = [CASES[name].good] * (AT + 2)
        if CASES[name].problem is None:
            rows[AT - 1] = CASES[name].bad
        assert np.array_equal(after, np.stack(rows)), name
        check_event(envs, slot, name, f"['{name}']" if is_keyed else "")


PLACES = {"inline": ce.Local(workers=0), "local": ce.Local(workers=2), "loopback": ce.Loopback(nodes=1)}


@pytest.mark.parametrize("check", [check_steps, check_rollout])
@pytest.mark.parametrize("place", PLACES)
def test_the_key_of_a_nested_observation_is_named(place, check):
    """Each slot has one wrong value, in the key of its case."""
    with ce.ClusterEnv([lambda n=n: Wrong(n, True) for n in NAMES], backend=PLACES[place]) as envs:
        check(envs, NAMES, True)


@pytest.mark.parametrize("check", [check_steps, check_rollout])
@pytest.mark.parametrize("name", CASES)
def test_an_observation_that_is_one_array_is_checked_too(name, check):
    """The rows of such environments are written and checked all at once."""
    with ce.ClusterEnv([lambda: Wrong(name, False)] * 3, backend=ce.Local(workers=0)) as envs:
        check(envs, [name] * 3, False)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.problem])
def test_the_last_observation_of_an_episode_is_checked_too(name):
    """It is kept beside the rows of a fragment."""
    with ce.ClusterEnv([lambda: Wrong(name, False, at_end=True)] * 2, backend=ce.Local(workers=0)) as envs:
        batch = envs.collector(policy(), seed=1).rollout(AT + 1)
        assert batch.valid.all(axis=1).tolist() == [True] * (AT - 1) + [False] * 2
        reasons = [event.reason for event in envs.events() if event.kind == "env_error"]
        assert len(reasons) == 2 and all(CASES[name].problem in reason for reason in reasons), reasons


class WrongBatch(gym.vector.VectorEnv):
    """A vector environment whose second environment has a wrong observation at step `AT`."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.num_envs, self.name = 2, name
        self.single_observation_space, self.single_action_space = CASES[name].space, spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, 2)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)
        self.t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.stack([CASES[self.name].good] * 2), {}

    def step(self, actions):
        self.t += 1
        second = CASES[self.name].bad if self.t == AT else CASES[self.name].good
        no = np.zeros(2, bool)
        return np.stack([CASES[self.name].good, second]), np.ones(2), no, no, {}


@pytest.mark.parametrize("name", CASES)
def test_a_vector_environment_is_checked_too(name):
    zeros, problem = np.zeros(2, np.int64), CASES[name].problem
    with ce.ClusterEnv(ce.Vector(lambda num_envs, seeds: WrongBatch(name)), 2, backend=ce.Local(workers=0)) as envs:
        envs.reset(seed=1)
        for _ in range(AT - 1):
            assert "transition_valid" not in envs.step(zeros)[4]
        obs, *_, infos = envs.step(zeros)
        reasons = [event.reason for event in envs.events() if event.kind == "env_error"]
        if problem is None:
            assert np.array_equal(obs[1], CASES[name].bad) and not reasons
        else:
            assert not infos["transition_valid"].any() and problem in reasons[0], reasons
