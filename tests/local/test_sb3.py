"""Stable-Baselines3 over ClusterEnv: the same as SB3's own DummyVecEnv, step by step, and it learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3 as sb3
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

import clusterenv
from clusterenv.errors import ClusterEnvError
from clusterenv.integrations.sb3 import SB3VecEnv, make_sb3
from toys import DiesOnce

NUM_ENVS = 3
SHORT = 12  # most random episodes of CartPole end past it, some before


class Reporting(gym.Wrapper[Any, Any, Any, Any]):
    """Info in every step, an info at reset, a method, an attribute: what VecEnv's other calls reach."""

    level = 1

    def reset(self, **kwargs: Any) -> Any:
        obs, _ = super().reset(**kwargs)
        return obs, {"reset_with": (kwargs.get("options") or {}).get("word", "nothing")}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "pole": float(obs[2])}

    def add(self, a: int, b: int = 0) -> int:
        return self.level + a + b


class AsDict(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        box = env.observation_space
        self.observation_space = gym.spaces.Dict({"all": box, "sign": gym.spaces.MultiBinary(4)})

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"all": observation, "sign": (observation > 0).astype(np.int8)}


def cartpole() -> gym.Env[Any, Any]:
    return Reporting(Monitor(gym.make("CartPole-v1", max_episode_steps=SHORT, render_mode="rgb_array")))


def dict_cartpole() -> gym.Env[Any, Any]:
    return AsDict(cartpole())


def cluster(make: Callable[[], Any] = cartpole, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> Any:
    return clusterenv.ClusterEnv([make] * NUM_ENVS, backend=clusterenv.Local(workers=2), autoreset_mode=mode)


@contextmanager
def ours_and_theirs(make: Callable[[], Any] = cartpole) -> Iterator[tuple[SB3VecEnv, DummyVecEnv]]:
    with closing(SB3VecEnv(cluster(make))) as ours, closing(DummyVecEnv([make] * NUM_ENVS)) as theirs:
        yield ours, theirs


def assert_same(a: Any, b: Any) -> None:
    """Equal, but for the wall-clock time in Monitor's episode statistics."""
    if isinstance(a, dict):
        assert a.keys() - {"t"} == b.keys() - {"t"}
        for key in a.keys() - {"t"}:
            assert_same(a[key], b[key])
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("make", [cartpole, dict_cartpole])
def test_every_step_equals_dummy_vec_env(make: Callable[[], Any]) -> None:
    with ours_and_theirs(make) as (ours, theirs):
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        ours.seed(7)
        theirs.seed(7)
        assert_same(ours.reset(), theirs.reset())
        assert_same(dict(enumerate(ours.reset_infos)), dict(enumerate(theirs.reset_infos)))
        rng = np.random.default_rng(0)
        ended = {"by time": 0, "by fall": 0}
        for _ in range(60):
            actions = rng.integers(0, 2, NUM_ENVS)
            obs, rewards, dones, infos = ours.step(actions)
            their_obs, their_rewards, their_dones, their_infos = theirs.step(actions)
            assert_same(obs, their_obs)
            assert_same(rewards, their_rewards)
            assert rewards.dtype == their_rewards.dtype
            assert_same(dones, their_dones)
            assert_same(dict(enumerate(infos)), dict(enumerate(their_infos)))
            assert_same(dict(enumerate(ours.reset_infos)), dict(enumerate(theirs.reset_infos)))
            for i in np.flatnonzero(dones):
                assert "terminal_observation" in infos[i]
                assert "episode" in infos[i]
                ended["by time" if infos[i]["TimeLimit.truncated"] else "by fall"] += 1
        assert min(ended.values()) > 0, "the test must see both kinds of end"


def test_seeds_and_options_are_used_once() -> None:
    with ours_and_theirs() as (ours, theirs):
        for envs in (ours, theirs):
            envs.seed(3)
            envs.set_options({"word": "hello"})
        assert_same(ours.reset(), theirs.reset())
        assert [info["reset_with"] for info in ours.reset_infos] == ["hello"] * NUM_ENVS
        assert_same(ours.reset(), theirs.reset())
        assert [info["reset_with"] for info in ours.reset_infos] == ["nothing"] * NUM_ENVS


def test_options_that_differ_between_environments_are_refused() -> None:
    with ours_and_theirs() as (ours, _):
        ours.set_options([{"word": "a"}, {"word": "b"}, {}])
        with pytest.raises(ClusterEnvError, match="one for all"):
            ours.reset()


def test_methods_and_attributes_reach_the_environments() -> None:
    with ours_and_theirs() as (ours, theirs):
        for envs in (ours, theirs):
            envs.reset()
            assert envs.env_method("add", 2, b=3) == [6, 6, 6]
            envs.set_attr("level", 5, indices=[1])
            assert envs.get_attr("level") == [1, 5, 1]
            assert envs.get_attr("level", indices=1) == [5]
            envs.set_attr("level", 7)
            assert envs.get_attr("level", indices=[0, 2]) == [7, 7]
            envs.set_attr("mood", "new", indices=[0, 2])
            assert envs.get_attr("mood", indices=[2, 0]) == ["new", "new"]
            with pytest.raises((AttributeError, ClusterEnvError), match="mood"):
                envs.get_attr("mood", indices=1)
            assert envs.has_attr("level")
            assert not envs.has_attr("no_such_thing")


def test_a_method_for_some_environments_only_is_refused_rather_than_called_on_all() -> None:
    with ours_and_theirs() as (ours, _), pytest.raises(ClusterEnvError, match="calls all environments"):
        ours.env_method("add", 1, indices=[0])


def test_wrappers_are_found() -> None:
    with ours_and_theirs() as (ours, theirs):
        for wrapper in (Monitor, Reporting, gym.wrappers.TimeLimit, gym.Wrapper, AsDict):
            assert ours.env_is_wrapped(wrapper) == theirs.env_is_wrapped(wrapper)
            assert ours.env_is_wrapped(wrapper, indices=[1]) == theirs.env_is_wrapped(wrapper, indices=[1])


def test_images() -> None:
    with ours_and_theirs() as (ours, theirs):
        for envs in (ours, theirs):
            envs.seed(1)
            envs.reset()
        assert ours.render_mode == "rgb_array"
        for our_image, their_image in zip(ours.get_images(), theirs.get_images(), strict=True):
            np.testing.assert_array_equal(our_image, their_image)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_other_autoreset_modes_are_refused(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([cartpole], autoreset_mode=mode)
    with pytest.raises(ClusterEnvError, match=r"autoreset_mode=AutoresetMode\.SAME_STEP"):
        SB3VecEnv(envs)
    envs.close()


def test_a_lost_worker_is_a_time_limit_and_no_episode(tmp_path: Path) -> None:
    def plain() -> gym.Env[Any, Any]:
        return gym.make("CartPole-v1")

    def dies() -> gym.Env[Any, Any]:
        return DiesOnce(plain(), tmp_path / "died")

    with closing(make_sb3([plain, dies, plain], backend=clusterenv.Local(workers=3))) as envs:
        envs.seed(0)
        obs = envs.reset()
        for _ in range(3):
            before = obs
            obs, rewards, dones, infos = envs.step(np.array([0, 1, 0]))
        assert dones.tolist() == [False, True, False]
        assert rewards[1] == 0
        assert infos[1]["TimeLimit.truncated"] is True
        assert not infos[1]["transition_valid"]
        assert infos[1]["worker_lost"]
        np.testing.assert_array_equal(infos[1]["terminal_observation"], before[1])
        assert "episode" not in infos[1]
        assert envs.reset_infos[1].keys().isdisjoint({"worker_lost", "final_obs"})
        envs.step(np.array([0, 1, 0]))


def test_make_sb3_records_episodes_once() -> None:
    backend = clusterenv.Local(workers=2)
    envs = make_sb3("CartPole-v1", num_envs=2, backend=backend, env_kwargs={"max_episode_steps": 3})
    assert isinstance(envs, VecMonitor)
    envs.reset()
    for _ in range(3):
        *_, infos = envs.step(np.array([0, 1]))
    assert [(info["episode"]["r"], info["episode"]["l"]) for info in infos] == [(3.0, 3), (3.0, 3)]
    envs.close()

    for options in ({"env": [cartpole] * 2}, {"env": "CartPole-v1", "num_envs": 2, "monitor": False}):
        envs = make_sb3(backend=backend, **options)
        assert isinstance(envs, SB3VecEnv)
        envs.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_ppo_learns_cartpole() -> None:
    envs = make_sb3("CartPole-v1", num_envs=8, backend=clusterenv.Local(workers=2))
    model = sb3.PPO(
        "MlpPolicy",
        envs,
        n_steps=128,
        batch_size=256,
        n_epochs=10,
        gamma=0.98,
        gae_lambda=0.9,
        learning_rate=lambda remaining: 1e-3 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        seed=1,
        device="cpu",
    )
    model.learn(80_000)
    mean_return, _ = evaluate_policy(model, envs, n_eval_episodes=16)
    envs.close()
    assert mean_return >= 400
