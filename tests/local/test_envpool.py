"""EnvPool inside the workers: a proper VectorEnv, every slot seeded apart, the same whatever the workers."""

from __future__ import annotations

from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import clusterenv
from clusterenv.errors import ClusterEnvError
from clusterenv.integrations.envpool import EnvPoolVectorEnv, envpool

NUM_ENVS = 6


@pytest.fixture
def envs() -> Any:
    envs = EnvPoolVectorEnv("CartPole-v1", NUM_ENVS, seeds=range(10, 10 + NUM_ENVS), info_keys=["elapsed_step"])
    yield envs
    envs.close()


def right(envs: VectorEnv[Any, Any, Any]) -> Any:
    """Push right everywhere: every pole falls within a dozen steps."""
    return envs.step(np.ones(envs.num_envs, dtype=np.int64))


def test_it_is_a_vector_env_with_batched_spaces(envs: EnvPoolVectorEnv) -> None:
    assert isinstance(envs, VectorEnv)
    assert envs.single_action_space == gym.spaces.Discrete(2)
    assert envs.observation_space == batch_space(envs.single_observation_space, NUM_ENVS)
    assert envs.action_space == batch_space(envs.single_action_space, NUM_ENVS)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    obs, _ = envs.reset()
    assert envs.observation_space.contains(obs)
    obs, rewards, terminations, truncations, _ = envs.step(envs.action_space.sample())
    assert envs.observation_space.contains(obs)
    assert rewards.shape == terminations.shape == truncations.shape == (NUM_ENVS,)
    assert terminations.dtype == truncations.dtype == np.bool_


def test_the_infos_asked_for_are_arrays_with_masks(envs: EnvPoolVectorEnv) -> None:
    envs.reset()
    *_, infos = right(envs)
    assert infos.keys() == {"elapsed_step", "_elapsed_step"}
    assert infos["elapsed_step"].tolist() == [1] * NUM_ENVS
    assert infos["_elapsed_step"].tolist() == [True] * NUM_ENVS


def test_infos_not_asked_for_do_not_travel_and_unknown_ones_are_named() -> None:
    envs = EnvPoolVectorEnv("CartPole-v1", 2, seeds=[1, 2])
    assert envs.reset()[1] == {}
    assert right(envs)[4] == {}
    envs.close()
    envs = EnvPoolVectorEnv("CartPole-v1", 2, seeds=[1, 2], info_keys=["lives"])
    with pytest.raises(ClusterEnvError, match=r"no \['lives'\], only \['elapsed_step'"):
        envs.reset()
    envs.close()


def test_an_ended_episode_is_reset_by_the_next_step(envs: EnvPoolVectorEnv) -> None:
    envs.reset(seed=0)
    obs, _, terminations, _, _ = right(envs)
    while not terminations.any():
        obs, _, terminations, _, _ = right(envs)
    ended = terminations
    assert (np.abs(obs[ended, 2]) > 0.2).all(), "the last observation of the episode"
    obs, rewards, terminations, truncations, infos = right(envs)
    assert (np.abs(obs[ended]) <= 0.05).all(), "the first observation of the next one; the action was not used"
    assert (rewards[ended] == 0).all()
    assert not (terminations | truncations)[ended].any()
    assert (infos["elapsed_step"][ended] == 0).all()


def test_a_time_limit_truncates() -> None:
    envs = EnvPoolVectorEnv("CartPole-v1", 2, seeds=[1, 2], max_episode_steps=3)
    envs.reset()
    for _ in range(3):
        _, _, terminations, truncations, _ = right(envs)
    assert truncations.all()
    assert not terminations.any()
    envs.close()


def test_each_environment_has_its_own_seed_and_a_seeded_reset_repeats(envs: EnvPoolVectorEnv) -> None:
    first, _ = envs.reset()
    assert len(np.unique(first, axis=0)) == NUM_ENVS
    second, _ = envs.reset()
    assert not np.array_equal(first, second), "without a seed the random streams go on"
    again, _ = envs.reset(seed=list(range(10, 10 + NUM_ENVS)))
    np.testing.assert_array_equal(first, again)
    by_int, _ = envs.reset(seed=10)
    np.testing.assert_array_equal(first, by_int)
    other, _ = envs.reset(seed=[15, 14, 13, 12, 11, 10])
    np.testing.assert_array_equal(first, other[::-1])
    large, _ = envs.reset(seed=[s + 2**40 for s in range(NUM_ENVS)])
    assert len(np.unique(large, axis=0)) == NUM_ENVS
    some, _ = envs.reset(seed=[10, None, 12, None, 14, None])
    np.testing.assert_array_equal(some[::2], first[::2])


def test_a_masked_reset_touches_only_its_rows(envs: EnvPoolVectorEnv) -> None:
    envs.reset()
    before, *_ = right(envs)
    kept = before.copy()
    mask = np.array([True, False] * 3)
    obs, infos = envs.reset(options={"reset_mask": mask})
    np.testing.assert_array_equal(obs[~mask], kept[~mask])
    np.testing.assert_array_equal(before, kept, err_msg="what was handed out before must not change")
    assert (np.abs(obs[mask]) <= 0.05).all()
    assert infos["_elapsed_step"].tolist() == mask.tolist()
    *_, infos = right(envs)
    assert infos["elapsed_step"].tolist() == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("options", "seed", "message"),
    [
        ({"reset_mask": np.zeros(NUM_ENVS, dtype=np.bool_)}, None, "one of them true"),
        ({"reset_mask": np.ones(2, dtype=np.bool_)}, None, r"\[6\] booleans"),
        ({"reset_mask": np.ones(NUM_ENVS, dtype=np.bool_)}, 1, "without seed"),
        (None, [1, 2], "2 seeds for 6"),
        ({"level": 3}, None, "no option but reset_mask"),
    ],
)
def test_a_reset_that_envpool_cannot_do_is_refused(
    envs: EnvPoolVectorEnv, options: Any, seed: Any, message: str
) -> None:
    envs.reset()
    with pytest.raises(ClusterEnvError, match=message):
        envs.reset(seed=seed, options=options)


def test_step_before_reset_and_after_close_says_so(envs: EnvPoolVectorEnv) -> None:
    with pytest.raises(ClusterEnvError, match="reset"):
        right(envs)
    envs.reset()
    envs.close()
    with pytest.raises(ClusterEnvError, match="close"):
        right(envs)
    with pytest.raises(ClusterEnvError, match="closed"):
        envs.reset()


def test_what_cluster_env_decides_cannot_be_passed() -> None:
    with pytest.raises(ClusterEnvError, match="num_envs, seed"):
        envpool("CartPole-v1", seed=1, num_envs=2)
    with pytest.raises(ClusterEnvError, match="batch_size=0"):
        EnvPoolVectorEnv("CartPole-v1", 2, seeds=[1, 2], batch_size=0)


def test_the_factory_travels() -> None:
    vector = cloudpickle.loads(cloudpickle.dumps(envpool("CartPole-v1", max_episode_steps=5)))
    envs = vector.fn(2, [3, 4])
    obs, _ = envs.reset()
    assert obs.shape == (2, 4)
    envs.close()


def test_in_a_cluster_every_slot_plays_its_own_episode_as_in_one_pool() -> None:
    alone = EnvPoolVectorEnv("CartPole-v1", NUM_ENVS, seeds=range(NUM_ENVS), info_keys=["elapsed_step"])
    cluster = clusterenv.ClusterEnv(
        envpool("CartPole-v1", info_keys=["elapsed_step"]),
        num_envs=NUM_ENVS,
        backend=clusterenv.Local(workers=2),
    )
    try:
        assert cluster.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        assert cluster.observation_space == alone.observation_space
        obs, _ = cluster.reset()
        assert len(np.unique(obs, axis=0)) == NUM_ENVS
        ours, theirs = cluster.reset(seed=5), alone.reset(seed=5)
        for _ in range(30):
            for mine, its in zip(ours[:-1], theirs[:-1], strict=True):
                np.testing.assert_array_equal(mine, its)
            assert ours[-1].keys() == theirs[-1].keys()
            np.testing.assert_array_equal(ours[-1]["elapsed_step"], theirs[-1]["elapsed_step"])
            ours, theirs = right(cluster), right(alone)
    finally:
        cluster.close()
        alone.close()
