"""PPO on stale data: the ratio's denominator is what acted, the clip is centred on the learner's policy (decoupled)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import clusterenv as ce
from clusterenv.learning import behaviour_weights, effective_sample_size, gae
from experiments.parts import Learner, mlp

__all__ = ["PPO"]

_LARGE = 4096
"""Minibatches from this size on are for a GPU, where there is one."""


class PPO(Learner):
    """An update is a whole rollout, in minibatches; it makes one version."""

    streams = False
    """True: learn from each node's fragment as it comes."""
    publishes_minibatches = False
    """True: each minibatch makes a version. With `streams`, this is what APPO does."""
    num_steps = 64
    hidden = 64
    epochs, minibatch, rate = 4, 512, 7e-4
    gamma, lam, clip, entropy, value_weight, reward_scale = 0.999, 0.98, 0.2, 0.003, 0.5, 0.03
    is_decoupled = True
    """False: the clip is centred on the policy that acted, as in plain PPO."""

    def __init__(self, obs_space: Any, action_space: Any, total_steps: int, **settings: Any) -> None:
        is_box = isinstance(action_space, gym.spaces.Box)
        self.family_name = "normal" if is_box else "categorical"
        super().__init__(action_space, settings)
        size = obs_space.shape[0]
        critic = mlp([size, self.hidden, self.hidden, 1], nn.Tanh, 1.0)
        if is_box:
            self.actor = _Gaussian(size, action_space.shape[0], self.hidden)
            self.critic = nn.Sequential(self.actor.scaled, critic)
        else:
            self.actor = mlp([size, self.hidden, self.hidden, int(action_space.n)], nn.Tanh, 0.01)
            self.critic = critic
        self._distribution = _normal if is_box else _categorical
        self.policy = ce.TorchPolicy(self.actor, dist=self.family_name)
        if self.minibatch >= _LARGE and torch.cuda.is_available():
            self.device = "cuda"
            self.actor.to(self.device)
            critic.to(self.device)
        self._parameters = [*self.actor.parameters(), *critic.parameters()]
        self._optimizer = torch.optim.Adam(self._parameters, lr=self.rate, eps=1e-5)
        self._total, self._seen = total_steps, 0

    def learn(self, batch: ce.Rollout, publish: Callable[[], int]) -> None:
        self._optimizer.param_groups[0]["lr"] = self.rate * max(0.05, 1.0 - self._seen / self._total)
        self._seen += batch.rewards.size
        batch = batch.torch(self.device)
        usable = batch.valid.reshape(-1).nonzero().squeeze(-1)
        obs = batch.obs.reshape(-1, *batch.obs.shape[2:])[usable]
        actions = batch.actions.reshape(-1, *batch.actions.shape[2:])[usable]
        before = self.params(obs)
        if isinstance(self.actor, _Gaussian):
            self.actor.scaled.see(obs)
        with torch.no_grad():
            proximal = self._distribution(self.actor(batch.obs)).log_prob(batch.actions)
        self.ess.append(effective_sample_size(batch, proximal))
        if self.is_decoupled:
            weights, centre = behaviour_weights(batch, proximal).reshape(-1), proximal.reshape(-1)
        else:
            weights, centre = batch.valid.float().reshape(-1), batch.logprobs.reshape(-1)
        scaled = type(batch)(**{**vars(batch), "rewards": batch.rewards * self.reward_scale})
        estimate = gae(scaled, self.critic, self.gamma, self.lam)
        weights, centre = weights[usable], centre[usable]
        advantages, returns = (values.reshape(-1)[usable] for values in (estimate.advantages, estimate.returns))
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for epoch in range(self.epochs):
            for i, rows in enumerate(torch.randperm(len(obs), device=self.device).split(self.minibatch)):
                policy = self._distribution(self.actor(obs[rows]))
                ratio = (policy.log_prob(actions[rows]) - centre[rows]).exp()
                gain = torch.min(ratio * advantages[rows], ratio.clamp(1 - self.clip, 1 + self.clip) * advantages[rows])
                error = (self.critic(obs[rows]).squeeze(-1) - returns[rows]).square().mean()
                loss = self.value_weight * error - (weights[rows] * gain).mean()
                loss = loss - self.entropy * policy.entropy().mean()
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, 0.5)
                self._optimizer.step()
                if self.publishes_minibatches:
                    if epoch == i == 0:  # the first of a fragment is measured for all
                        self.note_kappa(before, obs)
                    publish()
        if not self.publishes_minibatches:
            self.note_kappa(before, obs)
            publish()


class _Scaled(nn.Module):
    """Observations with mean 0 and deviation 1. The statistics are buffers: they belong to the version."""

    mean: torch.Tensor
    square: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("square", torch.ones(size))
        self._count = 0.0

    def see(self, obs: torch.Tensor) -> None:
        self._count += len(obs)
        share = len(obs) / self._count
        self.mean += share * (obs.mean(0) - self.mean)
        self.square += share * (obs.square().mean(0) - self.square)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        deviation = (self.square - self.mean.square()).clamp(min=1e-4).sqrt()
        return ((obs - self.mean) / deviation).clamp(-10.0, 10.0)


class _Gaussian(nn.Module):
    def __init__(self, size: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.scaled = _Scaled(size)
        self.mean = mlp([size, hidden, hidden, actions], nn.Tanh, 0.01)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        mean = self.mean(self.scaled(obs))
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)


def _normal(params: torch.Tensor) -> Any:
    mean, log_std = params.chunk(2, dim=-1)
    return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)


def _categorical(params: torch.Tensor) -> Any:
    return Categorical(logits=params, validate_args=False)
