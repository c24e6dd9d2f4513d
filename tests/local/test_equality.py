"""`ClusterEnv` equals `SyncVectorEnv` for the same seeds and actions, whatever the number of workers."""

from __future__ import annotations

import string

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterenv as ce
from toys import SpaceEnv, same

MODES = list(AutoresetMode)
DTYPES = [np.float16, np.float32, np.float64, np.uint8, np.int32, np.int64]


@st.composite
def boxes(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 3), (8, 8, 3)]))
    low = 0 if dtype == np.uint8 else -10
    return spaces.Box(low, 100, shape, dtype)


fixed_spaces = st.one_of(
    boxes(),
    st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
)
odd_spaces = st.sampled_from(
    [
        spaces.Text(5, charset=string.ascii_lowercase),
        spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32)),
        spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
        spaces.Graph(spaces.Discrete(4), None),
    ]
)


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts))),
        ),
        max_leaves=4,
    )


observation_spaces = nested(st.one_of(fixed_spaces, fixed_spaces, odd_spaces))
# Gymnasium cannot batch a Tuple or Dict that mixes Graph or Sequence actions with others.
action_spaces = st.one_of(nested(fixed_spaces), odd_spaces)


def run_both(thunks, mode, workers, seed, steps, resets=()):
    """Step both with the same actions; `resets` are steps before which everything is reset again."""
    ref = SyncVectorEnv(thunks, autoreset_mode=mode)
    envs = ce.ClusterEnv(thunks, backend=ce.Local(workers=workers), autoreset_mode=mode)
    try:
        assert envs.single_observation_space == ref.single_observation_space
        assert envs.observation_space == ref.observation_space
        assert envs.action_space == ref.action_space
        assert envs.metadata == ref.metadata and envs.render_mode == ref.render_mode
        same(envs.reset(seed=seed), ref.reset(seed=seed), "reset")
        ref.action_space.seed(seed if isinstance(seed, int) else 0)
        for t in range(steps):
            if t in resets:
                same(envs.reset(options={"a": 1}), ref.reset(options={"a": 1}), f"reset at {t}")
            actions = ref.action_space.sample()
            ours, theirs = envs.step(actions), ref.step(actions)
            same(ours, theirs, f"step {t}")
            ended = theirs[2] | theirs[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                mine, its = {"reset_mask": ended}, {"reset_mask": ended}
                same(envs.reset(options=mine), ref.reset(options=its), f"masked reset at {t}")
                assert "reset_mask" in mine, "the caller's options are not touched"
        same(envs.render(), ref.render(), "render")
        same(envs.call("add", 2, y=3), ref.call("add", 2, y=3), "call")
        same(envs.get_attr("length"), ref.get_attr("length"), "get_attr")
        same(envs.np_random_seed, ref.np_random_seed, "np_random_seed")
    finally:
        envs.close()
        ref.close()


ANY_RUN = {
    "observation_space": observation_spaces,
    "action_space": action_spaces,
    "mode": st.sampled_from(MODES),
    "lengths": st.lists(st.integers(1, 6), min_size=1, max_size=5),
    "truncates": st.booleans(),
    "info": st.sampled_from(["none", "plain", "rich"]),
    "seed": st.one_of(st.integers(0, 2**20), st.just("list")),
    "steps": st.integers(1, 12),
    "resets": st.sets(st.integers(0, 12), max_size=2),
}


def equals_sync_vector_env(
    observation_space, action_space, mode, lengths, truncates, info, seed, steps, resets, workers
):
    thunks = [
        lambda length=length: SpaceEnv(observation_space, action_space, length, info, truncates) for length in lengths
    ]
    if seed == "list":
        seed = [7 * i + 1 for i in range(len(lengths))]
    run_both(thunks, mode, min(workers, len(lengths)), seed, steps, resets)


@given(**ANY_RUN)
@settings(max_examples=300)
def test_equals_sync_vector_env(**run):
    equals_sync_vector_env(**run, workers=0)


@given(**ANY_RUN, workers=st.integers(1, 3))
@settings(max_examples=25)
def test_equals_sync_vector_env_with_workers(**run):
    equals_sync_vector_env(**run)


@pytest.mark.slow
@pytest.mark.timeout(500)
@given(**ANY_RUN, workers=st.integers(1, 3))
@settings(max_examples=150)
def test_equals_sync_vector_env_with_workers_in_many_draws(**run):
    equals_sync_vector_env(**run)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("workers", [1, 2, 5, 8])
def test_equals_whatever_the_number_of_workers(mode, workers):
    box, discrete = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)
    thunks = [lambda i=i: SpaceEnv(box, discrete, 3 + i % 4, "rich") for i in range(8)]
    run_both(thunks, mode, workers, 5, 40)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "Pendulum-v1"])
def test_equals_on_real_environments(env_id):
    thunks = [lambda: gym.make(env_id)] * 4
    ref = SyncVectorEnv(thunks)
    envs = ce.ClusterEnv(env_id, num_envs=4, backend=ce.Local(workers=2))
    same(envs.reset(seed=9), ref.reset(seed=9))
    ref.action_space.seed(1)
    for _ in range(300):
        actions = ref.action_space.sample()
        same(envs.step(actions), ref.step(actions))
    envs.close()
    ref.close()


class MyPoint(spaces.Space):
    """A custom space that Gymnasium knows nothing about."""

    def __init__(self):
        super().__init__(None, None)

    def sample(self, mask=None, probability=None):
        return complex(self.np_random.random(), 1)

    def contains(self, x):
        return isinstance(x, complex)

    def __eq__(self, other):
        return isinstance(other, MyPoint)


def test_custom_observation_space():
    thunks = [lambda: SpaceEnv(MyPoint(), spaces.Discrete(2), 3)] * 3
    run_both(thunks, AutoresetMode.SAME_STEP, 2, 3, 10)


class Mixed(gym.Env):
    """Infos whose types differ between environments: what Gymnasium casts to the first type, or fails on."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, value):
        self.value = value

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"x": self.value}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"x": self.value}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2.5, 3], np.float64),
        ([True, 2, 3], np.int64),
        ([np.float32(1), np.float64(0.1), 2], np.float64),
        ([1, None, "a"], object),
        ([np.zeros(2), np.zeros(3), np.zeros(2)], object),
        ([np.zeros(2, np.int8), np.full(2, 300), np.zeros(2, np.int8)], np.int64),
        ([2**70, 1, 2], object),
        ([{"a": 1}, {"b": "x"}, 5], object),
    ],
)
def test_infos_take_the_dtype_that_holds_all_slots(workers, values, dtype):
    envs = ce.ClusterEnv([lambda v=v: Mixed(v) for v in values], backend=ce.Local(workers=workers))
    _, infos = envs.reset()
    envs.close()
    assert infos["x"].dtype == dtype and infos["_x"].all()
    for got, value in zip(infos["x"], values, strict=True):
        if infos["x"].dtype == object:
            same(got, value)
        else:
            assert np.array_equal(got, value)


def test_set_attr_reaches_every_environment():
    box, discrete = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)
    envs = ce.ClusterEnv([lambda: SpaceEnv(box, discrete)] * 4, backend=ce.Local(workers=2))
    envs.reset(seed=0)
    envs.set_attr("bonus", [1.0, 2.0, 3.0, 4.0])
    assert envs.get_attr("bonus") == (1.0, 2.0, 3.0, 4.0)
    _, rewards, *_ = envs.step(np.zeros(4, dtype=np.int64))
    assert rewards.tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ce.SpecError, match="3 values for 4"):
        envs.set_attr("bonus", [1, 2, 3])
    envs.close()
