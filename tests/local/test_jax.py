"""Environments written in JAX, under rollouts and steps; those of gymnax and brax where these are installed.

gymnax needs an older Gymnasium, and brax a gigabyte: `make test-jax` makes them an environment of their own.
"""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import clusterenv as ce
from clusterenv.errors import UsageError
from clusterenv.integrations.jax import JaxVectorEnv, PureEnv, brax, gymnax, jax_env

SLOTS, LIMIT = 6, 9


def make_walk():
    """A random walk from 0 that ends at ±3, or is cut off after LIMIT steps; observations are (position, time)."""
    import jax
    import jax.numpy as jnp

    def reset(key):
        at = jax.random.randint(key, (), -1, 2)
        state = {"at": at, "t": jnp.zeros((), jnp.int32)}
        return jnp.stack([at, state["t"]]).astype(jnp.float32), state

    def step(key, state, action):
        at = state["at"] + jnp.where(jax.random.bernoulli(key, 0.25), 0, 2 * action - 1)
        state = {"at": at, "t": state["t"] + 1}
        obs = jnp.stack([at, state["t"]]).astype(jnp.float32)
        return obs, state, at.astype(jnp.float32), jnp.abs(at) >= 3, state["t"] >= LIMIT

    return PureEnv(reset, step, spaces.Box(-10, 10, (2,), np.float32), spaces.Discrete(2))


def played_one_by_one(seed, actions):
    """Play a slot without batching and without compiling; return rows (obs, reward, terminated, truncated, final)."""
    import jax

    env = make_walk()
    key, begin = jax.random.split(jax.random.PRNGKey(seed))
    obs, state = env.reset(begin)
    rows = [np.asarray(obs)]
    for action in actions:
        key, to_step, to_reset = jax.random.split(key, 3)
        last, state, reward, terminated, truncated = env.step(to_step, state, action)
        obs, ends = last, bool(terminated | truncated)
        if ends:
            obs, state = env.reset(to_reset)
        row = np.asarray(obs), float(reward), bool(terminated), bool(truncated & ~terminated)
        rows.append((*row, np.asarray(last) if ends else None))
    return rows


def test_rows_are_those_of_the_functions_played_one_by_one():
    venv = JaxVectorEnv(make_walk, 3, [5, 6, 7])
    actions = np.random.default_rng(0).integers(2, size=(25, 3))
    wanted = [played_one_by_one(11 + i, actions[:, i].tolist()) for i in range(3)]
    obs, _ = venv.reset(seed=[11, 12, 13])
    np.testing.assert_array_equal(obs, [rows[0] for rows in wanted])
    flags = set()
    for t, action in enumerate(actions):
        obs, rewards, terminated, truncated, infos = venv.step(action)
        for i, rows in enumerate(wanted):
            its_obs, reward, ends, is_cut, final = rows[t + 1]
            np.testing.assert_array_equal(obs[i], its_obs)
            assert (rewards[i], terminated[i], truncated[i]) == (reward, ends, is_cut)
            if final is not None:
                np.testing.assert_array_equal(infos["final_obs"][i], final)
                assert infos["_final_obs"][i]
            flags.add((ends, is_cut))
    assert len(flags) == 3, "episodes that end, that are cut off, and that go on"


def test_a_reset_of_some_environments_leaves_the_others():
    venv = JaxVectorEnv(make_walk, 3, [5, 6, 7])
    venv.reset(seed=1)
    before, *_ = venv.step(np.array([1, 1, 1]))
    obs, _ = venv.reset(seed=[None, 4, None], options={"reset_mask": np.array([False, True, False])})
    assert obs[1, 1] == 0 and (obs[[0, 2]] == before[[0, 2]]).all()
    np.testing.assert_array_equal(obs[1], played_one_by_one(4, [])[0])
    with pytest.raises(UsageError, match="no option but reset_mask"):
        venv.reset(options={"level": 3})


def test_observations_have_the_types_of_their_space():
    """JAX computes 32-bit numbers, and Gymnasium's discrete spaces have 64-bit ones."""

    def make():
        walk = make_walk()
        space = spaces.Tuple([spaces.Discrete(20, start=-10), spaces.Box(0, LIMIT, (), np.float64)])

        def parts(obs, *rest):
            return ((obs[0].astype("int32"), obs[1]), *rest)

        return PureEnv(
            lambda key: parts(*walk.reset(key)), lambda *given: parts(*walk.step(*given)), space, spaces.Discrete(2)
        )

    venv = JaxVectorEnv(make, 2, [1, 2])
    for obs in (venv.reset(seed=1)[0], venv.step([0, 1])[0]):
        assert [part.dtype for part in obs] == [np.int64, np.float64]


def rollouts(workers, **options):
    with ce.ClusterEnv(jax_env(make_walk), SLOTS, backend=ce.Local(workers=workers), **options) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=3)
        return [collector.rollout(20) for _ in range(2)]


def test_rollouts_do_not_depend_on_how_slots_are_divided():
    one, two = rollouts(1), rollouts(2)
    for a, b in zip(one, two, strict=True):
        for name in ("obs", "actions", "rewards", "terminations", "truncations", "episode_starts", "valid"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    batch = one[1]
    assert batch.valid.all() and batch.terminations.any() and batch.truncations.any()
    ends = batch.terminations | batch.truncations
    times = batch.next_obs()[ends][:, 1]
    assert (times > 0).all() and (times <= LIMIT).all(), "the last observation of an episode, not the first of the next"


def test_steps_and_evaluations():
    with ce.ClusterEnv(jax_env(make_walk), 4, autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        obs, _ = envs.reset(seed=11)
        np.testing.assert_array_equal(obs, [played_one_by_one(11 + i, [])[0] for i in range(4)])
        for _ in range(LIMIT):
            obs, *_ = envs.step(np.ones(4, np.int64))
        result = envs.collector(ce.RandomPolicy(), seed=1).evaluate(episodes=6, deterministic=False)
        assert len(result.returns) == 6 and (result.lengths <= LIMIT).all()


def test_gymnax():
    """The same as gymnax's own step, which resets too, but says where an episode ended."""
    pytest.importorskip("gymnax", reason="make test-jax")
    import gymnax as library
    import jax

    with ce.ClusterEnv(gymnax("CartPole-v1", params={"max_steps_in_episode": 12}), 8) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(50)
        assert batch.valid.all() and batch.terminations.any() and batch.truncations.any()
        env, params = library.make("CartPole-v1")
        step = jax.jit(
            jax.vmap(lambda obs, action: env.step_env(jax.random.PRNGKey(0), as_state(obs), action, params)[0])
        )

        def as_state(obs):
            return env.reset_env(jax.random.PRNGKey(0), params)[1].replace(
                x=obs[0], x_dot=obs[1], theta=obs[2], theta_dot=obs[3]
            )

        wanted = step(batch.obs.reshape(-1, 4), batch.actions.reshape(-1).astype(np.int32))
        np.testing.assert_allclose(batch.next_obs().reshape(-1, 4), wanted, rtol=1e-5, atol=1e-6)


def test_brax():
    pytest.importorskip("brax", reason="make test-jax")
    recovery = ce.Recovery(reset_timeout_s=600.0, recovery_timeout_s=600.0)
    with ce.ClusterEnv(brax("inverted_pendulum", episode_length=15), 4, recovery=recovery) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(40)
        assert batch.valid.all() and np.isfinite(batch.obs).all()
        lengths = batch.episodes.lengths
        assert len(lengths) and (lengths <= 15).all()
        assert batch.truncations.sum() == (lengths == 15).sum()
