"""The learners of the experiments: PPO with a decoupled loss, DQN, SAC. Short, and alike in what they tell.

A batch enters `learn`, which calls `publish` after each update and notes in `kappas` how far one update moved the
policy: the mean divergence between the acting policy before and after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

import clusterenv as ce
from clusterenv.learning import behaviour_weights, effective_sample_size, gae
from clusterenv.policy.divergence import divergence
from clusterenv.policy.families import family_for

__all__ = ["DQN", "LEARNERS", "PPO", "SAC"]

KAPPA_EVERY = 16
"""Learners that publish after each gradient step measure one in so many."""


def mlp(sizes: list[int], activation: type[nn.Module], last_gain: float | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        linear = nn.Linear(n_in, n_out)
        if last_gain is not None:
            nn.init.orthogonal_(linear.weight, last_gain if n_out == sizes[-1] else 2**0.5)
            nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


class _Learner:
    family_name: str
    policy: ce.TorchPolicy
    actor: nn.Module

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self._measure = divergence(family_for(self.family_name, action_space))
        self.kappas: list[float] = []
        self.ess: list[float] = []
        """Share of effective samples before the first gradient step of an update."""

    def params(self, obs: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.actor(obs).numpy()

    def _note_kappa(self, before: Any, obs: torch.Tensor) -> None:
        self.kappas.append(float(self._measure(before, self.params(obs), self.policy.knobs()).mean()))


class PPO(_Learner):
    """An update is a whole rollout, in minibatches. The clip is centred on the learner's policy as it begins."""

    family_name = "categorical"
    streams = False
    num_steps = 64
    epochs, minibatch, rate = 4, 512, 7e-4
    gamma, lam, clip, entropy, value_weight, reward_scale = 0.999, 0.98, 0.2, 0.003, 0.5, 0.03

    def __init__(self, obs_space: gym.Space[Any], action_space: gym.Space[Any], total_steps: int) -> None:
        super().__init__(action_space)
        size, actions = obs_space.shape[0], int(action_space.n)
        self.actor = mlp([size, 64, 64, actions], nn.Tanh, 0.01)
        self.critic = mlp([size, 64, 64, 1], nn.Tanh, 1.0)
        self.policy = ce.TorchPolicy(self.actor, dist="categorical")
        self._parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self._optimizer = torch.optim.Adam(self._parameters, lr=self.rate, eps=1e-5)
        self._total, self._seen = total_steps, 0

    def learn(self, batch: ce.Rollout, publish: Callable[[], int]) -> None:
        self._optimizer.param_groups[0]["lr"] = self.rate * max(0.05, 1.0 - self._seen / self._total)
        self._seen += batch.rewards.size
        batch = batch.torch()
        obs = batch.obs.reshape(-1, *batch.obs.shape[2:])
        actions = batch.actions.reshape(-1)
        with torch.no_grad():
            proximal = Categorical(logits=self.actor(batch.obs)).log_prob(batch.actions)
        self.ess.append(effective_sample_size(batch, proximal))
        weights = behaviour_weights(batch, proximal).reshape(-1)
        scaled = type(batch)(**{**vars(batch), "rewards": batch.rewards * self.reward_scale})
        estimate = gae(scaled, self.critic, self.gamma, self.lam)
        advantages, returns = estimate.advantages.reshape(-1), estimate.returns.reshape(-1)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        proximal = proximal.reshape(-1)
        before = self.params(obs)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(obs)).split(self.minibatch):
                policy = Categorical(logits=self.actor(obs[rows]))
                ratio = (policy.log_prob(actions[rows]) - proximal[rows]).exp()
                gain = torch.min(ratio * advantages[rows], ratio.clamp(1 - self.clip, 1 + self.clip) * advantages[rows])
                error = (self.critic(obs[rows]).squeeze(-1) - returns[rows]).square().mean()
                loss = self.value_weight * error - (weights[rows] * gain).mean()
                loss = loss - self.entropy * policy.entropy().mean()
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, 0.5)
                self._optimizer.step()
        self._note_kappa(before, obs)
        publish()


class _Replay:
    def __init__(self, capacity: int) -> None:
        self._capacity, self._next, self.size = capacity, 0, 0
        self._columns: list[torch.Tensor] = []

    def add(self, batch: ce.Rollout) -> None:
        arrays = [torch.as_tensor(np.asarray(values)) for values in batch.transitions()]
        arrays = [
            values.float() if values.is_floating_point() or values.dtype == torch.bool else values for values in arrays
        ]
        if not self._columns:
            self._columns = [torch.zeros((self._capacity, *v.shape[1:]), dtype=v.dtype) for v in arrays]
        at = (self._next + torch.arange(len(arrays[0]))) % self._capacity
        for column, values in zip(self._columns, arrays, strict=True):
            column[at] = values
        self._next = (self._next + len(at)) % self._capacity
        self.size = min(self._capacity, self.size + len(at))

    def sample(self, count: int) -> list[torch.Tensor]:
        rows = torch.randint(self.size, (count,))
        return [column[rows] for column in self._columns]


class _OffPolicy(_Learner):
    """A gradient step is an update, and each is published."""

    streams = True
    num_steps = 16
    warm_up, minibatch = 1000, 128
    updates_per_transition = 0.5

    def __init__(self, action_space: gym.Space[Any]) -> None:
        super().__init__(action_space)
        self._replay = _Replay(50_000)
        self._seen, self._owed = 0, 0.0

    def learn(self, batch: ce.Rollout, publish: Callable[[], int]) -> None:
        self._replay.add(batch)
        count = int(batch.valid.sum())
        self._seen += count
        self.explore(self._seen)
        if self._seen < self.warm_up:
            return
        self._owed += count * self.updates_per_transition
        while self._owed >= 1.0:
            self._owed -= 1.0
            sample = self._replay.sample(self.minibatch)
            watch = len(self.kappas) * KAPPA_EVERY <= self._updates
            before = self.params(sample[0]) if watch else None
            self.update(*sample)
            self._updates += 1
            if watch:
                self._note_kappa(before, sample[0])
            publish()

    _updates = 0

    def explore(self, steps: int) -> None: ...
    def update(self, obs: Any, actions: Any, rewards: Any, next_obs: Any, ended: Any) -> None: ...


class DQN(_OffPolicy):
    """Double Q-learning with a slowly following target."""

    family_name = "epsilon-greedy"

    def __init__(self, obs_space: gym.Space[Any], action_space: gym.Space[Any], total_steps: int) -> None:
        super().__init__(action_space)
        self.actor = mlp([obs_space.shape[0], 128, 128, int(action_space.n)], nn.ReLU)
        self._target = copy.deepcopy(self.actor)
        self.policy = ce.TorchPolicy(self.actor, dist="epsilon-greedy", epsilon=1.0)
        self._optimizer = torch.optim.Adam(self.actor.parameters(), lr=5e-4)
        self._total = total_steps

    def explore(self, steps: int) -> None:
        self.policy.epsilon = max(0.05, 1.0 - 0.95 * steps / (0.25 * self._total))

    def update(self, obs: Any, actions: Any, rewards: Any, next_obs: Any, ended: Any) -> None:
        with torch.no_grad():
            best = self.actor(next_obs).argmax(1, keepdim=True)
            target = rewards + 0.99 * (1 - ended) * self._target(next_obs).gather(1, best).squeeze(1)
        q = self.actor(obs).gather(1, actions[:, None]).squeeze(1)
        self._optimizer.zero_grad()
        F.smooth_l1_loss(q, target).backward()
        self._optimizer.step()
        follow(self._target, self.actor, 0.01)


class SAC(_OffPolicy):
    """Twin critics, a tanh-Gaussian actor, tuned entropy."""

    family_name = "tanh-normal"

    def __init__(self, obs_space: gym.Space[Any], action_space: gym.Space[Any], total_steps: int) -> None:
        super().__init__(action_space)
        size, self._act = obs_space.shape[0], action_space.shape[0]
        self.actor = _Squashed(size, self._act)
        self._critics = nn.ModuleList([mlp([size + self._act, 64, 64, 1], nn.ReLU) for _ in range(2)])
        self._targets = copy.deepcopy(self._critics)
        self._log_alpha = torch.zeros(1, requires_grad=True)
        self._low, self._high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.policy = ce.TorchPolicy(self.actor, dist="tanh-normal")
        self._actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self._critic_optimizer = torch.optim.Adam(self._critics.parameters(), lr=1e-3)
        self._alpha_optimizer = torch.optim.Adam([self._log_alpha], lr=1e-3)

    def _draw(self, obs: Any) -> tuple[Any, Any]:
        mean, log_std = self.actor(obs).chunk(2, dim=1)
        normal = Normal(mean, log_std.exp())
        raw = normal.rsample()
        # log(1 - tanh(x)^2), in a form that does not overflow.
        logprob = (normal.log_prob(raw) - 2 * (np.log(2) - raw - F.softplus(-2 * raw))).sum(1)
        return torch.tanh(raw), logprob

    def _q(self, critics: Any, obs: Any, actions: Any) -> list[Any]:
        return [critic(torch.cat([obs, actions], 1)).squeeze(1) for critic in critics]

    def update(self, obs: Any, actions: Any, rewards: Any, next_obs: Any, ended: Any) -> None:
        unit = 2 * (actions - self._low) / (self._high - self._low) - 1
        alpha = self._log_alpha.exp().detach()
        with torch.no_grad():
            following, logprob = self._draw(next_obs)
            value = torch.min(*self._q(self._targets, next_obs, following)) - alpha * logprob
            target = 0.1 * rewards + 0.99 * (1 - ended) * value
        loss = sum(F.mse_loss(q, target) for q in self._q(self._critics, obs, unit))
        self._critic_optimizer.zero_grad()
        loss.backward()
        self._critic_optimizer.step()
        chosen, logprob = self._draw(obs)
        actor_loss = (alpha * logprob - torch.min(*self._q(self._critics, obs, chosen))).mean()
        self._actor_optimizer.zero_grad()
        actor_loss.backward()
        self._actor_optimizer.step()
        alpha_loss = -(self._log_alpha.exp() * (logprob.detach() - self._act)).mean()
        self._alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self._alpha_optimizer.step()
        follow(self._targets, self._critics, 0.01)


class _Squashed(nn.Module):
    def __init__(self, size: int, actions: int) -> None:
        super().__init__()
        self.body = mlp([size, 64, 64, 2 * actions], nn.ReLU)

    def forward(self, obs: Any) -> Any:
        mean, log_std = self.body(obs).chunk(2, dim=-1)
        return torch.cat([mean, log_std.clamp(-5, 2)], dim=-1)


def follow(target: nn.Module, source: nn.Module, share: float) -> None:
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
            slow.lerp_(fast, share)


LEARNERS = {"PPO": PPO, "DQN": DQN, "SAC": SAC}
