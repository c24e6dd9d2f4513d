"""TorchRL needs no adapter: its own wrapper of Gymnasium vector environments takes a ClusterEnv."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymWrapper

import clusterenv

NUM_ENVS = 4


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", max_episode_steps=15)


def rollout(envs: Any) -> Any:
    """40 steps with the same actions for the same seeds."""
    wrapped = GymWrapper(envs, device="cpu")
    wrapped.set_seed(0)
    generator = torch.Generator().manual_seed(0)

    def policy(observation: Any) -> Any:
        choice = torch.randint(0, 2, (NUM_ENVS,), generator=generator)
        return torch.nn.functional.one_hot(choice, 2).to(wrapped.action_spec.dtype)

    try:
        return wrapped.rollout(40, policy, break_when_any_done=False)
    finally:
        wrapped.close()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_rollout_equals_that_over_sync_vector_env(mode: AutoresetMode) -> None:
    ours = rollout(
        clusterenv.ClusterEnv([cartpole] * NUM_ENVS, backend=clusterenv.Local(workers=2), autoreset_mode=mode)
    )
    theirs = rollout(SyncVectorEnv([cartpole] * NUM_ENVS, autoreset_mode=mode))
    assert ours.batch_size == (NUM_ENVS, 40)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        assert torch.equal(ours[key], theirs[key]), key
    for key in ("done", "terminated", "truncated"):
        assert torch.equal(ours["next", key], theirs["next", key]), key
    assert ours["next", "truncated"].any()
    assert ours["next", "terminated"].any()
