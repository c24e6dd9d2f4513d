"""A policy of the usual size, two layers of 64, for any environment whose spaces numpy can hold.

In numpy, so that the results do not depend on whether torch is installed; an exported torch policy of this size takes
about as long. Workers import this module, so it imports nothing of the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from clusterenv.errors import PolicyError
from clusterenv.memory.rows import leaves_of
from clusterenv.policy.acting.base import Policy, Prepared
from clusterenv.policy.acting.numpy import NumpyPolicy

__all__ = ["HeadActor", "policy_for"]

_HIDDEN = 64


def policy_for(observation_space: Space[Any], action_space: Space[Any]) -> Policy:
    """Return a 64-64 policy. Raises PolicyError if rollouts cannot hold the observations or the actions."""
    if isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete)):
        dist = "categorical"
    elif isinstance(action_space, spaces.MultiBinary):
        dist = "bernoulli"
    elif isinstance(action_space, spaces.Box):
        dist = "normal"
    else:
        raise PolicyError(
            f"the action space is {action_space}: rollouts need actions in Discrete, MultiDiscrete, MultiBinary or Box"
        )
    size = _input_size(observation_space)
    policy = NumpyPolicy(forward, {}, dist)
    outputs = policy.prepare(observation_space, action_space).family.num_params
    rng = np.random.default_rng(0)
    sizes = (size, _HIDDEN, _HIDDEN, outputs)
    scales = (1.0, 1.0, 0.01)  # the last layer is small: actions are nearly random, and logs of deviations nearly 0
    policy.values = {
        f"w{i}": (rng.standard_normal((a, b)) * scale / np.sqrt(a)).astype(np.float32)
        for i, (a, b, scale) in enumerate(zip(sizes[:-1], sizes[1:], scales, strict=True))
    }
    return policy


def _input_size(space: Space[Any]) -> int:
    """Return how many numbers an observation has."""
    leaves = leaves_of(space)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    if not leaves or 0 in sizes or any(leaf.dtype is None for leaf in leaves):
        raise PolicyError(
            f"the observation space is {space}: rollouts need observations of a fixed size above 0, in Box, Discrete, "
            "MultiDiscrete, MultiBinary, or in Dict and Tuple of these"
        )
    return sum(sizes)


def forward(weights: Mapping[str, Any], obs: Any) -> Any:
    """Return the parameters [B, P] of the distribution of actions."""
    columns = [np.asarray(leaf, dtype=np.float32).reshape(len(leaf), -1) for leaf in _leaves(obs)]
    x = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
    # Observations may be large, or infinite: tanh of NaN would be refused as an action.
    x = np.tanh(np.nan_to_num(x @ weights["w0"]))
    return np.tanh(x @ weights["w1"]) @ weights["w2"]


def _leaves(obs: Any) -> Iterator[Any]:
    if isinstance(obs, Mapping):
        for part in obs.values():
            yield from _leaves(part)
    elif isinstance(obs, tuple):
        for part in obs:
            yield from _leaves(part)
    else:
        yield obs


class HeadActor:
    """The same policy at the head: samples actions for all rows of a batch at once."""

    def __init__(self, policy: Policy, observation_space: Space[Any], action_space: Space[Any]) -> None:
        prepared: Prepared = policy.prepare(observation_space, action_space)
        self._actor, self._family = prepared.recipe.build(), prepared.family
        self._actor.load(policy.weights())
        self._rng = np.random.default_rng(0)

    def __call__(self, obs: Any) -> Any:
        """Return one action for each row, in the environments' form."""
        params, _ = self._actor.forward(obs, None, None)
        kind, shape = self._family.noise, (len(params), self._family.noise_size)
        if kind == "normal":
            noise = self._rng.standard_normal(shape, dtype=np.float32)
        elif kind == "uniform":
            noise = self._rng.random(shape, dtype=np.float32)
        else:
            noise = self._rng.gumbel(size=shape).astype(np.float32)
        return self._family.choose(params, noise, {})[1]
