"""Policies without torch: `NumpyPolicy` (a function of arrays) and `RandomPolicy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space

from clusterenv.arguments import check_fields
from clusterenv.errors import PolicyError
from clusterenv.policy.acting.base import Prepared, num_rows
from clusterenv.policy.acting.distributions import Uniform, family_for
from clusterenv.policy.acting.named import Named
from clusterenv.policy.weights.encoding import Weights

__all__ = ["NumpyPolicy", "RandomPolicy"]


@dataclass
class NumpyPolicy:
    """A policy as a plain function `forward(weights, obs) -> parameters [B, P]` of a named distribution.

    Change `values` in place or replace them: the next rollout sends the current ones.

    Example:
        >>> import numpy as np, clusterenv as ce
        >>> policy = ce.NumpyPolicy(lambda w, obs: obs @ w["w"], {"w": np.zeros((4, 2), np.float32)})
        >>> with ce.ClusterEnv("CartPole-v1", num_envs=4) as envs:
        ...     batch = envs.collector(policy, seed=1).rollout(8)
        >>> batch.actions.shape, float(batch.logprobs[0, 0])
        ((8, 4), -0.6931471824645996)
    """

    forward: Callable[[Weights, Any], Any]
    values: Mapping[str, Any]
    dist: str = "categorical"
    action_mask: str | None = None
    epsilon: Any = 0.0
    noise: Any = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Prepared:
        family = family_for(self.dist, action_space)
        return Prepared(_NumpyActor(self.forward), family, self.action_mask, f"numpy function, {family.name}")

    def weights(self) -> Weights:
        return {name: np.asarray(value) for name, value in self.values.items()}

    def token(self) -> Any:
        return None

    def knobs(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon, "noise": self.noise}


class _NumpyActor:
    """Both recipe and actor: it is sent before it has weights."""

    def __init__(self, forward: Callable[[Weights, Any], Any]) -> None:
        self._forward = forward
        self._weights: Weights = {}

    def build(self) -> _NumpyActor:
        return self

    def load(self, weights: Weights) -> None:
        self._weights = {name: array.copy() for name, array in weights.items()}

    def forward(self, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
        params = np.asarray(self._forward(self._weights, obs), dtype=np.float32)
        if params.ndim != 2:
            raise PolicyError(f"forward(weights, obs) returned shape {params.shape}, expected [batch, parameters]")
        return params, None

    def initial_state(self, rows: int) -> Any:
        return None

    def like_state(self, state: Any) -> Any:
        return state


class RandomPolicy:
    """Actions drawn uniformly from the action space.

    Example:
        >>> import clusterenv as ce
        >>> with ce.ClusterEnv("CartPole-v1", num_envs=4) as envs:
        ...     envs.collector(ce.RandomPolicy(), seed=1).rollout(16).rewards.sum()
        np.float64(64.0)
    """

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Prepared:
        return Prepared(_NumpyActor(_no_params), Uniform(action_space), None, "random actions")

    def weights(self) -> Weights:
        return {}

    def token(self) -> Any:
        return 0

    def knobs(self) -> dict[str, Any]:
        return {}

    def describe(self) -> Named:
        return Named("clusterenv.policy.acting.numpy:RandomPolicy", {}, {})


def _no_params(weights: Weights, obs: Any) -> Any:
    return np.empty((num_rows(obs), 0), dtype=np.float32)
