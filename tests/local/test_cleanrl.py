"""Scripts written for Gymnasium 0.29's vector environments run unchanged but for the line that makes `envs`.

The learners here are cut down to a few lines, but call `envs` where and how CleanRL's PPO, DQN and SAC do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv
from clusterenv.errors import ClusterEnvError
from clusterenv.integrations import cleanrl
from toys import DiesOnce

LOCAL = clusterenv.Local(workers=2)
SHORT = 12  # most random episodes of CartPole last longer, some do not


def make_env(env_id: str, seed: int, limit: int | None = None) -> Callable[[], gym.Env[Any, Any]]:
    def thunk() -> gym.Env[Any, Any]:
        env = gym.make(env_id, max_episode_steps=limit)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env.action_space.seed(seed)
        return env

    return thunk


def test_infos_are_those_of_gymnasium_0_29() -> None:
    thunks = [make_env("CartPole-v1", i, SHORT) for i in range(3)]
    today = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
    with closing(cleanrl.make(thunks, backend=LOCAL)) as envs, closing(today):
        np.testing.assert_array_equal(envs.reset(seed=1)[0], today.reset(seed=1)[0])
        rng = np.random.default_rng(0)
        ended = 0
        for _ in range(60):
            actions = rng.integers(0, 2, 3)
            obs, rewards, terminations, truncations, infos = envs.step(actions)
            expected = today.step(actions)
            for got, wanted in zip((obs, rewards, terminations, truncations), expected[:4], strict=True):
                np.testing.assert_array_equal(got, wanted)
            done = terminations | truncations
            assert ("final_info" in infos) == ("final_observation" in infos) == done.any()
            if not done.any():
                continue
            assert "final_obs" not in infos
            assert infos["_final_info"].tolist() == infos["_final_observation"].tolist() == done.tolist()
            for i in range(3):
                if not done[i]:
                    assert infos["final_info"][i] is None
                    assert infos["final_observation"][i] is None
                    continue
                ended += 1
                np.testing.assert_array_equal(infos["final_observation"][i], expected[4]["final_obs"][i])
                episode = expected[4]["final_info"]["episode"]
                assert infos["final_info"][i]["episode"]["r"] == episode["r"][i]
                assert infos["final_info"][i]["episode"]["l"] == episode["l"][i]
        assert ended > 3


def test_exploration_drawn_from_the_action_space_repeats() -> None:
    def draws(seed: int) -> list[int]:
        with closing(cleanrl.make([make_env("CartPole-v1", seed)], backend=LOCAL)) as envs:
            envs.reset(seed=seed)
            return [int(envs.single_action_space.sample()) for _ in range(50)]

    assert draws(1) == draws(1) != draws(2)


def test_other_autoreset_modes_are_refused() -> None:
    with (
        closing(SyncVectorEnv([make_env("CartPole-v1", 0)])) as envs,
        pytest.raises(ClusterEnvError, match=r"autoreset_mode=AutoresetMode\.SAME_STEP"),
    ):
        cleanrl.Gymnasium029(envs)


def test_a_lost_worker_has_a_last_observation_and_no_episode(tmp_path: Path) -> None:
    steady = make_env("CartPole-v1", 0)
    thunks = [steady, lambda: DiesOnce(steady(), tmp_path / "died")]
    with closing(cleanrl.make(thunks, backend=LOCAL)) as envs:
        obs, _ = envs.reset(seed=0)
        for _ in range(3):
            before = obs
            obs, rewards, terminations, truncations, infos = envs.step(np.array([0, 1]))
        assert truncations.tolist() == [False, True]
        assert not terminations.any()
        assert rewards[1] == 0
        np.testing.assert_array_equal(infos["final_observation"][1], before[1])
        assert list(infos["final_info"]) == [None, None]
        assert not infos["transition_valid"][1]


class RaisesOnce(gym.Wrapper):
    def step(self, action: Any) -> Any:
        if not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("the simulator exploded")
        return super().step(action)


def test_an_environment_that_raises_has_no_episode_though_its_worker_lives(tmp_path: Path) -> None:
    def raises() -> gym.Env:
        env = RaisesOnce(make_env("CartPole-v1", 0)())
        env.marker = tmp_path / "raised"
        env.marker.touch()
        return env

    with closing(cleanrl.make([make_env("CartPole-v1", 0), raises], backend=LOCAL)) as envs:
        envs.reset(seed=0)
        envs.step(np.array([0, 1]))
        (tmp_path / "raised").unlink()
        *_, truncations, infos = envs.step(np.array([0, 1]))
        assert truncations.tolist() == [False, True]
        assert infos["transition_valid"].tolist() == [True, False] and not infos["worker_lost"].any()
        assert list(infos["final_info"]) == [None, None] and not infos["_final_info"].any()


def episodic_returns(infos: dict[str, Any]) -> list[float]:
    """How the scripts log: `final_info` holds a dict or None per environment."""
    if "final_info" not in infos:
        return []
    return [float(info["episode"]["r"]) for info in infos["final_info"] if info and "episode" in info]


def test_ppo_shaped_script() -> None:
    num_envs, num_steps = 4, 64
    torch.manual_seed(1)
    envs = cleanrl.make([make_env("CartPole-v1", i) for i in range(num_envs)], backend=LOCAL)
    assert isinstance(envs.single_action_space, gym.spaces.Discrete)
    inputs = int(np.array(envs.single_observation_space.shape).prod())
    actor = torch.nn.Linear(inputs, int(envs.single_action_space.n))
    critic = torch.nn.Linear(inputs, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    shape = (num_steps, num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions = torch.zeros(shape + envs.single_action_space.shape)
    rewards, dones = torch.zeros(shape), torch.zeros(shape)
    returns: list[float] = []

    next_obs, _ = envs.reset(seed=1)
    next_obs, next_done = torch.Tensor(next_obs), torch.zeros(num_envs)
    for step in range(num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=actor(next_obs)).sample()
        actions[step] = action
        next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
        next_done = np.logical_or(terminations, truncations)
        rewards[step] = torch.tensor(reward).view(-1)
        next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(next_done)
        returns += episodic_returns(infos)
    advantages = rewards - critic(obs).squeeze(-1)
    log_prob = torch.distributions.Categorical(logits=actor(obs)).log_prob(actions)
    loss = (advantages**2).mean() - (log_prob * advantages.detach()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    envs.close()

    assert torch.isfinite(loss)
    assert returns
    # Every step of CartPole pays 1: what was logged is what lies between two `dones`.
    assert sum(returns) == sum((dones.sum(0) > 0) * (dones * torch.arange(num_steps)[:, None]).max(0).values)


def test_dqn_shaped_script() -> None:
    random.seed(1)
    torch.manual_seed(1)
    envs = cleanrl.make([make_env("CartPole-v1", 1 + i, SHORT) for i in range(1)], backend=LOCAL)
    network = torch.nn.Linear(4, int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(network.parameters())
    replay: list[tuple[Any, ...]] = []
    returns: list[float] = []

    obs, _ = envs.reset(seed=1)
    for global_step in range(200):
        if random.random() < 0.5:
            actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        else:
            actions = torch.argmax(network(torch.Tensor(obs)), dim=1).cpu().numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        returns += episodic_returns(infos)
        real_next_obs = next_obs.copy()
        for i, truncated in enumerate(truncations):
            if truncated:
                real_next_obs[i] = infos["final_observation"][i]
                assert not np.array_equal(real_next_obs[i], next_obs[i])
        replay.append((obs, real_next_obs, actions, rewards, terminations))
        obs = next_obs
        if global_step > 50 and global_step % 10 == 0:
            batch = [random.choice(replay) for _ in range(32)]
            s, s1, a, r, d = (torch.as_tensor(np.concatenate(part)) for part in zip(*batch, strict=True))
            with torch.no_grad():
                target = r.float() + 0.99 * network(s1).max(dim=1).values * (1 - d.float())
            loss = torch.nn.functional.mse_loss(network(s).gather(1, a[:, None]).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    envs.close()

    assert torch.isfinite(loss)
    assert max(returns) == SHORT


def test_sac_shaped_script() -> None:
    num_envs = 2
    envs = cleanrl.make([make_env("Pendulum-v1", 1 + i, 20) for i in range(num_envs)], backend=LOCAL)
    assert isinstance(envs.single_action_space, gym.spaces.Box)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    actor = torch.nn.Linear(3, 1)
    envs.single_observation_space.dtype = np.dtype(np.float32)  # the scripts size their replay buffer by it
    observations = np.zeros((50, num_envs, *envs.single_observation_space.shape), envs.single_observation_space.dtype)
    returns: list[float] = []

    obs, _ = envs.reset(seed=1)
    for global_step in range(50):
        if global_step < 10:
            actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        else:
            scale, bias = torch.as_tensor((high - low) / 2), torch.as_tensor((high + low) / 2)
            actions = (torch.tanh(actor(torch.Tensor(obs))) * scale + bias).detach().cpu().numpy()
        next_obs, _, terminations, truncations, infos = envs.step(actions)
        if "final_info" in infos:
            for info in infos["final_info"]:
                if info is not None:
                    returns.append(float(info["episode"]["r"]))
                    break
        real_next_obs = next_obs.copy()
        for i, truncated in enumerate(truncations):
            if truncated:
                real_next_obs[i] = infos["final_observation"][i]
        observations[global_step] = real_next_obs
        assert not terminations.any()
        obs = next_obs
    envs.close()

    assert len(returns) == 2
    assert np.isfinite(observations).all()
