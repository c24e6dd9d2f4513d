"""What the learners of the experiments share.

A batch enters `learn`, which calls `publish` after each update and notes in `kappas` how far one update moved the
policy: the mean divergence between the acting policy before and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gymnasium as gym
import torch
from torch import nn

import clusterenv as ce
from clusterenv.policy.acting.distributions import family_for
from clusterenv.policy.sync.divergence import divergence

__all__ = ["Learner", "follow", "mlp"]


def mlp(sizes: list[int], activation: type[nn.Module], last_gain: float | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        linear = nn.Linear(n_in, n_out)
        if last_gain is not None:
            nn.init.orthogonal_(linear.weight, last_gain if n_out == sizes[-1] else 2**0.5)
            nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


class Learner:
    family_name: str
    policy: ce.TorchPolicy
    actor: nn.Module
    streams: bool
    num_steps: int
    device = "cpu"

    def __init__(self, action_space: gym.Space[Any], settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if not hasattr(type(self), name):
                raise ValueError(f"{type(self).__name__} has no setting {name!r}")
            setattr(self, name, value)
        self._measure = divergence(family_for(self.family_name, action_space))
        self.kappas: list[float] = []
        self.ess: list[float] = []
        """Share of effective samples before the first gradient step of an update."""

    def learn(self, batch: ce.Rollout, publish: Callable[[], int]) -> None:
        raise NotImplementedError

    def params(self, obs: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.actor(obs.to(self.device)).cpu().numpy()

    def note_kappa(self, before: Any, obs: torch.Tensor) -> None:
        self.kappas.append(float(self._measure(before, self.params(obs), self.policy.knobs()).mean()))


def follow(target: nn.Module, source: nn.Module, share: float) -> None:
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
            slow.lerp_(fast, share)
