"""Measure one collector once: `PYTHONPATH=. python benchmarks/collectors.py SUBJECT ENV_ID --seconds S`.

The command line and the output are those of `subjects.py`; the runner starts both files in the same way. Here a policy
acts: every subject samples the actions of a 64-64 tanh network in torch and records them with their log-probabilities.
An advance is a whole rollout, so that the figure includes work done once per rollout; only true transitions count.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Categorical

from benchmarks.subjects import Job, Subject, Window, cluster, main, make, makers, ray_running, warm_and_count

ROLLOUT_STEPS = 128
HIDDEN = (64, 64)


def layer_init(layer: nn.Linear, std: float = np.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


def mlp(inputs: int, outputs: int, last_std: float) -> nn.Sequential:
    first, second = HIDDEN
    return nn.Sequential(
        layer_init(nn.Linear(inputs, first)),
        nn.Tanh(),
        layer_init(nn.Linear(first, second)),
        nn.Tanh(),
        layer_init(nn.Linear(second, outputs), last_std),
    )


class Agent(nn.Module):
    """The agent of CleanRL's ppo.py."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        super().__init__()
        if not isinstance(action_space, gym.spaces.Discrete):
            raise TypeError(f"{action_space}: only Discrete actions are sampled here")
        inputs = int(np.prod(observation_space.shape or ()))
        self.critic = mlp(inputs, 1, last_std=1.0)
        self.actor = mlp(inputs, int(action_space.n), last_std=0.01)

    def act(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Act like `get_action_and_value`, but without entropy and value, which other subjects do not compute."""
        probs = Categorical(logits=self.actor(x))
        action = probs.sample()
        return action, probs.log_prob(action)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def agent_for(env_id: str) -> Agent:
    with closing(make(env_id)) as env:
        return Agent(env.observation_space, env.action_space)


def share_of_each_worker(job: Job) -> int:
    size, left_over = divmod(job.num_envs, job.workers)
    if left_over:
        raise ValueError(f"{job.num_envs} environments cannot be shared evenly by {job.workers} workers")
    return size


def clusterenv_collect(job: Job, network: bool = False) -> list[Window]:
    with closing(cluster(job, job.env_id, network)) as envs:
        collector = envs.collector(Agent(envs.single_observation_space, envs.single_action_space))

        def rollout() -> int:
            # Resets happen within the step, so every row is a transition, except those of lost environments.
            return int(np.count_nonzero(collector.rollout(ROLLOUT_STEPS).valid))

        return warm_and_count(rollout, job)


def cleanrl(job: Job, envs: gym.vector.VectorEnv[Any, Any, Any]) -> list[Window]:
    """Run the collecting half of CleanRL's ppo.py: the agent on the head, each step stored in tensors.

    Without its RecordEpisodeStatistics and its critic, which would only slow it down.
    """
    # A second thread gains nothing with layers this small, and takes a core from the processes of AsyncVectorEnv.
    torch.set_num_threads(1)
    agent = Agent(envs.single_observation_space, envs.single_action_space)
    rows = (ROLLOUT_STEPS, job.num_envs)
    obs = torch.zeros(rows + (envs.single_observation_space.shape or ()))
    actions, logprobs, rewards, dones = (torch.zeros(rows) for _ in range(4))

    with closing(envs):
        next_obs = torch.Tensor(envs.reset(seed=0)[0])
        next_done = torch.zeros(job.num_envs)

        def rollout() -> int:
            nonlocal next_obs, next_done
            for step in range(ROLLOUT_STEPS):
                obs[step] = next_obs
                dones[step] = next_done
                with torch.no_grad():
                    action, logprob = agent.act(next_obs)
                actions[step] = action
                logprobs[step] = logprob
                observed, reward, terminations, truncations, _ = envs.step(action.numpy())
                rewards[step] = torch.tensor(reward)
                next_obs = torch.Tensor(observed)
                next_done = torch.Tensor(np.logical_or(terminations, truncations))
            # Under NEXT_STEP autoreset a step that begins with a done is a reset, not a transition.
            return dones.numel() - int(dones.sum())

        return warm_and_count(rollout, job)


def cleanrl_sync(job: Job) -> list[Window]:
    return cleanrl(job, SyncVectorEnv(makers(job, job.num_envs)))


def cleanrl_async(job: Job) -> list[Window]:
    return cleanrl(job, AsyncVectorEnv(makers(job, job.num_envs), shared_memory=True))


def rllib(job: Job) -> list[Window]:
    """Sample from PPO's EnvRunners like PPO does: all at once, each a fragment from all its environments."""
    with ray_running(job):
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
        from ray.rllib.env.env_runner_group import EnvRunnerGroup

        config = (
            PPOConfig()
            # Gymnasium's environment checker is off for every subject.
            .environment(job.env_id, env_config={"disable_env_checker": True})
            .env_runners(
                num_env_runners=job.workers,
                num_envs_per_env_runner=share_of_each_worker(job),
                num_cpus_per_env_runner=1,
                rollout_fragment_length=ROLLOUT_STEPS,
            )
            .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=list(HIDDEN), fcnet_activation="tanh"))
        )
        group = EnvRunnerGroup(config=config, local_env_runner=False)

        def rollout() -> int:
            # An episode's length is the number of its steps, without reset rows.
            fragments = group.foreach_env_runner("sample", local_env_runner=False)
            return sum(len(episode) for episodes in fragments for episode in episodes)

        return warm_and_count(rollout, job)


def torchrl(job: Job) -> list[Window]:
    """Take each worker's rollout as soon as it is full: no worker waits for another."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiAsyncCollector
    from torchrl.modules import ProbabilisticActor

    size = share_of_each_worker(job)
    policy = ProbabilisticActor(
        TensorDictModule(agent_for(job.env_id).actor, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    collector = MultiAsyncCollector(
        [partial(torchrl_envs, job, size)] * job.workers,
        policy,
        frames_per_batch=ROLLOUT_STEPS * size,  # of one worker: a batch never mixes two
        total_frames=-1,
    )
    try:
        batches = iter(collector)

        def rollout() -> int:
            return next(batches).numel()  # environments are reset between steps, so every row is a transition

        return warm_and_count(rollout, job)
    finally:
        collector.shutdown()


def torchrl_envs(job: Job, size: int) -> Any:
    """Return a Gymnasium vector environment that leaves resets to TorchRL.

    TorchRL's own SerialEnv passes each environment through tensors, step by step, and its GymEnv(num_envs=...) starts
    one process per environment.
    """
    from torchrl.envs import GymWrapper

    envs = SyncVectorEnv(makers(job, size), autoreset_mode=AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True)


COLLECTORS: dict[str, Subject] = {
    "clusterenv-collect": clusterenv_collect,
    "clusterenv-collect-network": partial(clusterenv_collect, network=True),
    "cleanrl-sync": cleanrl_sync,
    "cleanrl-async": cleanrl_async,
    "rllib": rllib,
    "torchrl": torchrl,
}

if __name__ == "__main__":
    main(COLLECTORS)
