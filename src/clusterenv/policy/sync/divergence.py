"""Measure how far two policies are apart in a state, from the parameters of their distributions. Numpy, in float64.

`divergence(family)(old, new, knobs)` returns one number per row of parameters (laid out as in `distributions`):
KL(old || new) for distributions, and a similar measure for other policies. 0 for equal rows, never negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.policy.acting import distributions
from clusterenv.policy.acting.distributions import Family, MultiCategorical, log_softmax

__all__ = ["Divergence", "divergence", "is_kl"]

Divergence = Callable[[Any, Any, dict[str, Any]], Any]


def is_kl(family: Family) -> bool:
    """Return whether the divergence is a KL, from which the share of effective samples can be predicted."""
    return not isinstance(family, (distributions.Deterministic, distributions.EpsilonGreedy, distributions.Uniform))


def divergence(family: Family) -> Divergence:
    """Return the divergence function of this family."""
    if isinstance(family, MultiCategorical):
        parts = family.parts
        return lambda old, new, knobs: np.sum([_categorical(old[:, p], new[:, p], knobs) for p in parts], axis=0)
    return _BY_NAME[family.name]


def _categorical(old: Any, new: Any, knobs: dict[str, Any]) -> Any:
    p, q = log_softmax(np.asarray(old, np.float64)), log_softmax(np.asarray(new, np.float64))
    return np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)


def _bernoulli(old: Any, new: Any, knobs: dict[str, Any]) -> Any:
    old, new = np.asarray(old, np.float64), np.asarray(new, np.float64)
    p = 1.0 / (1.0 + np.exp(-np.clip(old, -500, 500)))
    # log p(1) = -softplus(-x), log p(0) = -softplus(x)
    ones = np.logaddexp(0.0, -new) - np.logaddexp(0.0, -old)
    zeros = np.logaddexp(0.0, new) - np.logaddexp(0.0, old)
    return np.maximum((p * ones + (1.0 - p) * zeros).sum(axis=1), 0.0)


def _normal(old: Any, new: Any, knobs: dict[str, Any]) -> Any:
    old, new = np.asarray(old, np.float64), np.asarray(new, np.float64)
    size = old.shape[1] // 2
    gap = new[:, size:] - old[:, size:]
    spread = np.exp(-2.0 * gap)
    distance = ((old[:, :size] - new[:, :size]) / np.exp(new[:, size:])) ** 2
    return np.maximum((gap + 0.5 * (spread + distance - 1.0)).sum(axis=1), 0.0)


def _deterministic(old: Any, new: Any, knobs: dict[str, Any]) -> Any:
    """Return the KL of the exploring policies: half the squared distance of actions over the noise (over 1 if none)."""
    noise = np.asarray(knobs.get("noise", 0.0), np.float64).mean()
    sigma = noise if noise > 0 else 1.0
    gap = (np.asarray(old, np.float64) - np.asarray(new, np.float64)) / sigma
    return 0.5 * (gap**2).sum(axis=1)


def _greedy(old: Any, new: Any, knobs: dict[str, Any]) -> Any:
    """Return the total variation: (1 - epsilon) where the greedy action changed."""
    epsilon = float(np.asarray(knobs.get("epsilon", 0.0), np.float64).mean())
    return (1.0 - epsilon) * (np.argmax(old, axis=1) != np.argmax(new, axis=1))


_BY_NAME: dict[str, Divergence] = {
    "categorical": _categorical,
    "bernoulli": _bernoulli,
    "normal": _normal,
    "tanh-normal": _normal,  # the squash is the same for both, and cancels
    "deterministic": _deterministic,
    "epsilon-greedy": _greedy,
    "uniform": lambda old, new, knobs: np.zeros(len(old)),
}
