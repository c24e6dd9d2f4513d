"""Simulators that step many environments at once, under collectors: EnvPool, ale-py, Gymnasium's entry points."""

from __future__ import annotations

import logging
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import clusterenv as ce
from clusterenv.errors import SpecError
from clusterenv.integrations.envpool import EnvPoolVectorEnv, envpool
from rollouts import assert_equal

gym.register_envs(ale_py)


def collect(env: Any, num_envs: int = 8, workers: int = 1, steps: int = 50, rollouts: int = 3, **kwargs: Any) -> Any:
    agent = ce.NumpyPolicy(lambda w, obs: obs @ w["w"], {"w": np.array([[0, 0], [0, 1], [0, 1], [0, 1]], np.float32)})
    with ce.ClusterEnv(env, num_envs=num_envs, backend=ce.Local(workers=workers), **kwargs) as envs:
        collector = envs.collector(agent, seed=3)
        batches = [collector.rollout(steps) for _ in range(rollouts)]
        return batches, collector.evaluate(episodes=5)


def test_rows_of_envpool_do_not_depend_on_workers_or_on_which_environments_are_done_first() -> None:
    batches, evaluation = collect(envpool("CartPole-v1"))
    assert sum(len(batch.episodes) for batch in batches) > 10 and all(batch.valid.all() for batch in batches)
    for options in ({"workers": 2}, {"batch_size": 3, "num_threads": 2}, {"batch_size": 1}):
        workers = options.pop("workers", 1)
        others, other = collect(envpool("CartPole-v1", **options), workers=workers)
        for left, right in zip(batches, others, strict=True):
            assert_equal(left, right)
        assert evaluation.returns.tolist() == other.returns.tolist()


def test_envpool_plays_the_episodes_that_it_plays_alone() -> None:
    batch = collect(envpool("CartPole-v1"), rollouts=1)[0][0]
    alone = EnvPoolVectorEnv("CartPole-v1", 8, seeds=range(3, 11))
    obs, _ = alone.reset(seed=list(range(3, 11)))
    over = np.zeros(8, dtype=np.bool_)
    t = np.zeros(8, dtype=np.int64)
    while (t < 50).any():
        places = np.minimum(t, 49), np.arange(8)
        live = ~over & (t < 50)
        assert np.array_equal(obs[live], batch.obs[places][live])
        obs, _, ends, cuts, _ = alone.step(batch.actions[places])
        t += ~over
        over = ends | cuts
    alone.close()


@pytest.mark.parametrize("batch_size", [None, 1, 3, 8, 11])
def test_batches_of_envpool_of_any_size_step_and_reset_all_environments(batch_size: int | None) -> None:
    pools = [EnvPoolVectorEnv("CartPole-v1", 8, seeds=range(8), batch_size=size) for size in (None, batch_size)]
    some = np.array([True, False] * 4)
    for reset in ({}, {"options": {"reset_mask": some}}):
        first, second = (pool.reset(**reset)[0] for pool in pools)
        assert np.array_equal(first, second)
        for _ in range(30):
            for left, right in zip(*(pool.step(np.ones(8, dtype=np.int64))[:4] for pool in pools), strict=True):
                assert np.array_equal(left, right)
    for pool in pools:
        pool.close()


def test_atari_games_come_as_ale_pys_vector_environment(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "clusterenv"):
        envs = ce.ClusterEnv("ALE/Pong-v5", num_envs=4, simulator="native", backend=ce.Local(workers=2))
    assert "ale_py.vector_env:AtariVectorEnv" in caplog.text
    with envs:
        assert envs.autoreset_mode is AutoresetMode.SAME_STEP
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        batch = collector.rollout(12)
        assert batch.obs.shape == (12, 4, 4, 84, 84) and batch.obs.dtype == np.uint8
        assert len({batch.obs[-1, n].tobytes() for n in range(4)}) == 4, "every slot has a seed of its own"
    with ce.ClusterEnv("ALE/Pong-v5", num_envs=4, simulator="native", backend=ce.Local(workers=1)) as envs:
        assert_equal(batch, envs.collector(ce.RandomPolicy(), seed=1).rollout(12))


def test_games_that_end_have_their_final_frames() -> None:
    kwargs = {"max_num_frames_per_episode": 80, "noop_max": 0, "use_fire_reset": False}
    with ce.ClusterEnv("ALE/Pong-v5", 2, simulator="native", env_kwargs=kwargs, backend=ce.Local(workers=1)) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(50)
        ended = batch.terminations | batch.truncations
        assert ended.sum() > 2 and len(batch.final_at) == ended.sum()
        for (t, n), final in zip(batch.final_at.tolist(), batch.final_obs, strict=True):
            assert batch.episode_starts[t + 1, n] if t + 1 < 50 else True
            assert np.array_equal(final[:-1], batch.obs[t, n][1:]), "the next frame of the same game"


def test_ids_with_a_vector_entry_point_run_in_it() -> None:
    batches, _ = collect("CartPole-v1", simulator="vector_entry_point", workers=2)
    assert all(batch.valid.sum() > 300 for batch in batches)
    assert sum(len(batch.episodes) for batch in batches) > 10


def test_a_reset_of_some_slots_of_an_environment_that_resets_all_is_no_silent_end_of_the_others() -> None:
    recovery = ce.Recovery(backoff_s=(0.0, 0.0))
    backend = ce.Local(workers=0)
    with ce.ClusterEnv("CartPole-v1", 3, backend=backend, simulator="vector_entry_point", recovery=recovery) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(3, np.int64))
        envs.reset(options={"reset_mask": np.array([True, False, False])})
        *_, truncations, infos = envs.step(np.zeros(3, np.int64))
        assert truncations.all() and not infos["transition_valid"].any()
        assert all("ignores reset_mask" in reason for reason in infos["loss_reason"])


def test_what_has_no_vector_form_is_refused_with_the_reason() -> None:
    gym.register("Bare-v0", entry_point="gymnasium.envs.classic_control:PendulumEnv")
    with pytest.raises(SpecError, match="no environment of this name; it is registered without a vector_entry_point"):
        ce.ClusterEnv("Bare-v0", num_envs=2, simulator="native")
    with pytest.raises(SpecError, match="goes with an environment id"):
        ce.ClusterEnv(lambda: gym.make("CartPole-v1"), num_envs=2, simulator="native")
    with pytest.raises(SpecError, match="simulator='fast'"):
        ce.ClusterEnv("CartPole-v1", num_envs=2, simulator="fast")
