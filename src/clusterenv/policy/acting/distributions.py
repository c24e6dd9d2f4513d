"""Distributions over actions, in numpy, for workers: noise in, actions and log-probabilities out.

A policy's forward pass gives one float32 array `params [B, P]` per step, which its family interprets. Pure: randomness
enters as `noise [B, noise_size]`, so that a slot's actions depend only on that slot's random stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from gymnasium import Space, spaces

from clusterenv.errors import PolicyError

Noise = Literal["gumbel", "normal", "uniform"]
_NEVER = np.float32(-1e9)
"""The logit of a masked action: finite, so that KL and entropy stay finite."""
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Family(Protocol):
    """A kind of distribution; interprets the numbers of a forward pass."""

    name: str
    num_params: int
    noise: Noise
    noise_size: int

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        """Return actions [B, ...] for the learner, and for the environments (clipped to their space)."""

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        """Return log-probabilities [B] float32 of actions that `choose` made from this noise; B may span many steps."""

    def mode(self, params: Any) -> Any:
        """Return the greedy actions [B, ...] for the environments."""


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class _OneOf:
    """A family over a Discrete space with one number per action; the largest is the best."""

    def __init__(self, space: spaces.Discrete) -> None:
        self.num_params = int(space.n)
        self._start, self._dtype = int(space.start), np.dtype(space.dtype)

    def mode(self, params: Any) -> Any:
        return (params.argmax(axis=1) + self._start).astype(self._dtype)


class Categorical(_OneOf):
    """Params are logits [B, n]."""

    name = "categorical"
    noise: Noise = "gumbel"

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__(space)
        self.noise_size = self.num_params

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        chosen = (params + noise).argmax(axis=1)
        actions = chosen if not self._start else chosen + self._start
        if actions.dtype != self._dtype:
            actions = actions.astype(self._dtype)
        return actions, actions

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        return log_softmax(params)[np.arange(len(params)), np.asarray(actions) - self._start]


class MultiCategorical:
    """Independent categoricals; params are their logits side by side [B, sum(nvec)]."""

    name = "multi-categorical"
    noise: Noise = "gumbel"

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        self._shape = space.shape
        self._start = np.asarray(space.start).reshape(-1)
        self._dtype = np.dtype(space.dtype)
        ends = np.cumsum(np.asarray(space.nvec).reshape(-1)).tolist()
        self.parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        self.num_params = self.noise_size = int(ends[-1])

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        actions = self.mode(params + noise)
        return actions, actions

    def mode(self, params: Any) -> Any:
        chosen = np.stack([params[:, part].argmax(axis=1) for part in self.parts], axis=1)
        return (chosen + self._start).astype(self._dtype).reshape(-1, *self._shape)

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        chosen = np.asarray(actions).reshape(len(params), -1) - self._start
        total = np.zeros(len(params), dtype=np.float32)
        rows = np.arange(len(params))
        for i, part in enumerate(self.parts):
            total += log_softmax(params[:, part])[rows, chosen[:, i]]
        return total


class Bernoulli:
    """Independent coins; params are their logits [B, n]."""

    name = "bernoulli"
    noise: Noise = "uniform"

    def __init__(self, space: spaces.MultiBinary) -> None:
        self._shape, self._dtype = space.shape, np.dtype(space.dtype)
        self.num_params = self.noise_size = int(np.prod(space.shape))

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        flat = noise < 1.0 / (1.0 + np.exp(-np.clip(params, -80.0, 80.0)))
        actions = flat.astype(self._dtype).reshape(-1, *self._shape)
        return actions, actions

    def mode(self, params: Any) -> Any:
        return (params > 0).astype(self._dtype).reshape(-1, *self._shape)

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        taken = np.asarray(actions).reshape(len(params), -1).astype(np.bool_)
        return -np.logaddexp(0.0, np.where(taken, -params, params)).sum(axis=1).astype(np.float32)


class _Continuous:
    noise: Noise = "normal"

    def __init__(self, space: spaces.Box) -> None:
        self._shape, self._dtype = space.shape, np.dtype(space.dtype)
        self._size = self.noise_size = int(np.prod(space.shape))
        self._low, self._high = space.low.reshape(1, -1), space.high.reshape(1, -1)
        self._bounded = bool((np.isfinite(space.low) | np.isfinite(space.high)).any())

    def _shaped(self, flat: Any) -> Any:
        return flat.astype(self._dtype, copy=False).reshape(-1, *self._shape)

    def _clipped(self, flat: Any) -> Any:
        return self._shaped(np.clip(flat, self._low, self._high) if self._bounded else flat)


class _Gaussian(_Continuous):
    """Params are means and log standard deviations [B, 2 d]."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        self.num_params = 2 * self._size

    def _sample(self, params: Any, noise: Any) -> Any:
        return params[:, : self._size] + np.exp(params[:, self._size :]) * noise


class Normal(_Gaussian):
    """Independent normals.

    The environment gets the action clipped to its space; the batch keeps the sample, so that its log-probability is
    that of the normal.
    """

    name = "normal"

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        flat = self._sample(params, noise)
        return self._shaped(flat), self._clipped(flat)

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        return (-0.5 * noise * noise - params[:, self._size :] - _HALF_LOG_2PI).sum(axis=1)

    def mode(self, params: Any) -> Any:
        return self._clipped(params[:, : self._size])


class TanhNormal(_Gaussian):
    """Normals squashed by tanh into the space's bounds; params are those before the squash."""

    name = "tanh-normal"

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise PolicyError(f"a tanh-normal policy needs a bounded action space, not {space}")
        self._scale = ((space.high - space.low) / 2).reshape(1, -1).astype(np.float32)
        self._middle = ((space.high + space.low) / 2).reshape(1, -1).astype(np.float32)

    def _squashed(self, flat: Any) -> Any:
        return self._shaped(np.tanh(flat) * self._scale + self._middle)

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        actions = self._squashed(self._sample(params, noise))
        return actions, actions

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        # From the noise, not the action: near the bounds a float32 action cannot be inverted to its value before tanh.
        before, log_std = self._sample(params, noise), params[:, self._size :]
        # log(1 - tanh(x)^2), in a form that stays exact for large |x|
        squash = 2.0 * (math.log(2.0) - before - np.logaddexp(0.0, -2.0 * before))
        inside = -0.5 * noise * noise - log_std - _HALF_LOG_2PI - squash - np.log(self._scale)
        return inside.sum(axis=1).astype(np.float32)

    def mode(self, params: Any) -> Any:
        return self._squashed(params[:, : self._size])


class Deterministic(_Continuous):
    """An action plus normal noise, clipped to the space (DDPG, TD3); params are the action [B, d].

    `knobs["noise"]` is the noise's standard deviation, for all slots or for each. The log-probability is that of the
    noise before the clip; 0 without noise.
    """

    name = "deterministic"

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        self.num_params = self._size

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        actions = self._clipped(params + _column(knobs.get("noise", 0.0), len(params)) * noise)
        return actions, actions

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        sigma = _column(knobs.get("noise", 0.0), len(params))
        quiet = sigma <= 0
        inside = -0.5 * noise * noise - np.log(np.where(quiet, 1.0, sigma)) - _HALF_LOG_2PI
        return np.where(quiet[:, 0], 0.0, inside.sum(axis=1)).astype(np.float32)

    def mode(self, params: Any) -> Any:
        return self._clipped(params)


class EpsilonGreedy(_OneOf):
    """The best of the Q-values, or with probability `knobs["epsilon"]` any action; params are Q-values [B, n]."""

    name = "epsilon-greedy"
    noise: Noise = "uniform"
    noise_size = 2

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        epsilon = _column(knobs.get("epsilon", 0.0), len(params))[:, 0]
        allowed = params > _NEVER
        counts = allowed.sum(axis=1)
        # Choose the j-th allowed action, j uniform.
        j = np.minimum((noise[:, 1] * counts).astype(np.int64), counts - 1)
        anything = (allowed.cumsum(axis=1) == (j + 1)[:, None]).argmax(axis=1)
        chosen = np.where(noise[:, 0] < epsilon, anything, params.argmax(axis=1))
        actions = (chosen + self._start).astype(self._dtype)
        return actions, actions

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        epsilon = _column(knobs.get("epsilon", 0.0), len(params))[:, 0]
        counts = (params > _NEVER).sum(axis=1)
        greedy = params.argmax(axis=1) == np.asarray(actions) - self._start
        with np.errstate(divide="ignore"):  # the log-probability of an action with probability 0 is -inf
            return np.log(epsilon / counts + (1.0 - epsilon) * greedy).astype(np.float32)


class Uniform:
    """Uniform over the action space (a Box must have finite bounds); params are empty [B, 0]."""

    name = "uniform"
    noise: Noise = "uniform"
    num_params = 0

    def __init__(self, space: Space[Any]) -> None:
        self._space_shape, self._dtype = tuple(space.shape or ()), np.dtype(space.dtype)
        if isinstance(space, spaces.Discrete):
            low, count = np.array([int(space.start)]), np.array([int(space.n)])
        elif isinstance(space, spaces.MultiDiscrete):
            low, count = np.asarray(space.start).reshape(-1), np.asarray(space.nvec).reshape(-1)
        elif isinstance(space, spaces.MultiBinary):
            size = int(np.prod(space.shape))
            low, count = np.zeros(size, dtype=np.int64), np.full(size, 2)
        elif isinstance(space, spaces.Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
            low, count = space.low.reshape(-1), (space.high.astype(np.float64) - space.low).reshape(-1)
        else:
            raise PolicyError(f"RandomPolicy cannot sample {space}: it takes Discrete, MultiDiscrete, MultiBinary, Box")
        self._low, self._count = low, count
        self._whole = not isinstance(space, spaces.Box)
        self.noise_size = len(low)
        self._logprob = np.float32(-np.log(np.maximum(count, 1e-30)).sum())

    def choose(self, params: Any, noise: Any, knobs: dict[str, Any]) -> tuple[Any, Any]:
        value = noise * self._count
        if self._whole:
            value = np.minimum(value.astype(np.int64), self._count - 1)
        actions = (self._low + value).astype(self._dtype).reshape(-1, *self._space_shape)
        return actions, actions

    def score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        return np.full(len(noise), self._logprob)

    def mode(self, params: Any) -> Any:
        raise PolicyError("a random policy has no greedy action: evaluate(deterministic=False)")


def _column(value: Any, rows: int) -> Any:
    """Return `value` as [B, 1]: one number for all rows, or one per slot, repeated for each step."""
    column = np.asarray(value, dtype=np.float32).reshape(-1, 1)
    return np.broadcast_to(column, (rows, 1)) if len(column) in (1, rows) else np.tile(column, (rows // len(column), 1))


def mask_logits(params: Any, mask: Any) -> Any:
    """Exclude actions whose mask is False (or 0)."""
    return np.where(np.asarray(mask, dtype=np.bool_), params, _NEVER)


def stack_masks(masks: Sequence[Any], size: int) -> Any:
    """Return the masks of several environments as bools [B, size]; None allows every action."""
    everything = np.ones(size, dtype=np.bool_)
    rows = [everything if mask is None else np.asarray(mask, dtype=np.bool_).reshape(-1) for mask in masks]
    other = set(map(len, rows)) - {size}
    if other:
        raise PolicyError(f"an action mask has {min(other)} entries, but the policy chooses among {size} actions")
    return np.stack(rows)


_NAMED: dict[str, tuple[type, Any]] = {
    "categorical": (spaces.Discrete, Categorical),
    "multi-categorical": (spaces.MultiDiscrete, MultiCategorical),
    "bernoulli": (spaces.MultiBinary, Bernoulli),
    "normal": (spaces.Box, Normal),
    "tanh-normal": (spaces.Box, TanhNormal),
    "deterministic": (spaces.Box, Deterministic),
    "epsilon-greedy": (spaces.Discrete, EpsilonGreedy),
}


def family_for(name: str, action_space: Space[Any]) -> Family:
    """Return the family of this name over this action space; raise PolicyError if they do not fit."""
    if name == "categorical" and isinstance(action_space, spaces.MultiDiscrete):
        name = "multi-categorical"
    if name not in _NAMED:
        raise PolicyError(f"dist={name!r} is not known; choose one of {', '.join(_NAMED)}, or pass a function")
    wanted, family = _NAMED[name]
    if not isinstance(action_space, wanted):
        raise PolicyError(f"a {name} policy acts in a {wanted.__name__} space, but the action space is {action_space}")
    made: Family = family(action_space)
    return made
