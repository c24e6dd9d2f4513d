"""Learners that publish after each gradient step: DQN and SAC."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

import clusterenv as ce
from experiments.parts import Learner, follow, mlp

__all__ = ["DQN", "SAC"]

KAPPA_EVERY = 16
"""One gradient step in so many is measured."""


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


class _OffPolicy(Learner):
    """A gradient step is an update, and each is published."""

    streams = True
    num_steps = 16
    warm_up, minibatch = 1000, 128
    updates_per_transition = 0.5

    def __init__(self, action_space: gym.Space[Any], settings: dict[str, Any]) -> None:
        super().__init__(action_space, settings)
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
                self.note_kappa(before, sample[0])
            publish()

    _updates = 0

    def explore(self, steps: int) -> None: ...
    def update(self, obs: Any, actions: Any, rewards: Any, next_obs: Any, ended: Any) -> None: ...


class DQN(_OffPolicy):
    """Double Q-learning with a slowly following target."""

    family_name = "epsilon-greedy"

    def __init__(self, obs_space: Any, action_space: Any, total_steps: int, **settings: Any) -> None:
        super().__init__(action_space, settings)
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

    def __init__(self, obs_space: Any, action_space: Any, total_steps: int, **settings: Any) -> None:
        super().__init__(action_space, settings)
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
        loss = torch.stack([F.mse_loss(q, target) for q in self._q(self._critics, obs, unit)]).sum()
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
