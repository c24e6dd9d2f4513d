"""Compute what a learner needs from a `Rollout` before its losses: advantages, targets, weights for stale data.

Takes a rollout of numpy arrays or (after `batch.torch()`) tensors; returns constants of the same kind, without gradient
and, as tensors, on the device of `batch.rewards`. Called by learners and examples; pure, and torch is optional.

Arithmetic is float64 in numpy for both kinds: arrays `[T, N]` are small compared with observations, and the recursion
over T would cost an accelerator several kernel launches per row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from clusterenv.errors import SpecError
from clusterenv.rollout import Rollout, map_arrays

__all__ = ["Advantages", "behaviour_weights", "effective_sample_size", "gae", "vtrace"]


class Advantages(NamedTuple):
    """Constants for the losses. In rows that are not valid the advantage is 0 and the return equals the value."""

    advantages: Any  # [T, N]
    returns: Any  # [T, N], targets of the value function
    values: Any  # [T, N], value_fn of batch.obs


def gae(batch: Rollout, value_fn: Callable[[Any], Any], gamma: float = 0.99, lam: float = 0.95) -> Advantages:
    """Return generalised advantage estimates; bootstrap from the true final observation of truncated episodes.

    `value_fn` maps observations `[B, ...]` to values `[B]` or `[B, 1]`. It is called with `obs`, `last_obs` and
    `final_obs`: T * N + N + K rows, each once.

    >>> zeros, no = np.zeros((3, 1)), np.zeros((3, 1), dtype=bool)
    >>> batch = Rollout(
    ...     obs=zeros[..., None], actions=zeros, rewards=zeros + 1, terminations=no, truncations=no, logprobs=zeros,
    ...     versions=zeros, valid=~no, episode_starts=no, last_obs=np.full((1, 1), 8.0), final_obs=np.zeros((0, 1)),
    ...     final_at=np.zeros((0, 2), dtype=int), slots=np.arange(1),
    ... )
    >>> gae(batch, lambda obs: obs[:, 0], gamma=0.5, lam=1.0).returns[:, 0].tolist()
    [2.75, 3.5, 5.0]
    """
    steps = _read(batch, value_fn)
    deltas = steps.rewards + gamma * steps.next_values - steps.values
    advantages = _accumulate(steps, deltas, np.full_like(deltas, gamma * lam))
    return _advantages(batch, steps, advantages, steps.values + advantages)


def vtrace(
    batch: Rollout,
    value_fn: Callable[[Any], Any],
    logprobs: Any,
    gamma: float = 0.99,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """Return V-trace (Espeholt et al. 2018): `returns` are its targets, `advantages` include the clipped ratio rho.

    `logprobs` `[T, N]` are those of the learner's policy for `batch.actions`; `value_fn` is as for `gae`.
    """
    steps = _read(batch, value_fn)
    log_ratio = _log_ratio(batch.logprobs, logprobs, steps.valid)
    rho, c = _capped(log_ratio, rho_bar, "rho_bar"), _capped(log_ratio, c_bar, "c_bar")
    deltas = rho * (steps.rewards + gamma * steps.next_values - steps.values)
    targets = steps.values + _accumulate(steps, deltas, gamma * lam * c)
    next_targets = steps.next_values.copy()
    next_targets[:-1] = np.where(steps.goes_on[:-1], targets[1:], next_targets[:-1])
    return _advantages(batch, steps, rho * (steps.rewards + gamma * next_targets - steps.values), targets)


def behaviour_weights(batch: Rollout, proximal_logprobs: Any, cap: float = 2.0) -> Any:
    """Return the weights of decoupled PPO (Hilton et al. 2021): min(cap, pi_prox / pi_behaviour), 0 where not valid.

    `proximal_logprobs` are those of the learner's policy as its update starts. The loss of a row is then
    `-weight * min(r * A, clip(r) * A)` with `r = pi / pi_prox`. Works on a flattened batch too.
    """
    valid = _numpy(batch.valid, bool)
    weights = _capped(_log_ratio(batch.logprobs, proximal_logprobs, valid), cap, "cap")
    return _like(batch.logprobs, np.where(valid, weights, 0.0))


def effective_sample_size(behaviour: Any, logprobs: Any, valid: Any = None) -> float:
    """Return (sum w)^2 / (n * sum w^2) of w = pi / pi_behaviour over valid rows: 1 if on-policy, 1/n if one row counts.

    `behaviour` is a `Rollout`, or log-probabilities of the shape of `logprobs` (a minibatch, say) with their `valid`,
    all rows if None. The result is 0 without valid rows, or if the learner's policy gives all actions probability 0.
    """
    if isinstance(behaviour, Rollout):
        if valid is not None:
            raise SpecError("a Rollout brings its own `valid`; omit the argument, or pass `batch.logprobs`")
        behaviour, valid = behaviour.logprobs, behaviour.valid
    mask = np.ones(np.shape(behaviour), dtype=bool) if valid is None else _numpy(valid, bool)
    log_weights = _log_ratio(behaviour, logprobs, mask)[mask]
    if not log_weights.size or np.isneginf(log_weights.max()):
        return 0.0
    # The result does not depend on the weights' scale; with a largest weight of 1 nothing overflows.
    weights = np.exp(log_weights - log_weights.max())
    return min(1.0, float(weights.sum() ** 2 / (weights.size * np.square(weights).sum())))


class _Steps(NamedTuple):
    """The rows as float64 and bool numpy arrays `[T, N]`; rows that are not valid keep only their value."""

    rewards: Any
    values: Any
    next_values: Any  # of the same episode; 0 where terminated
    valid: Any
    goes_on: Any  # the next row continues this one's episode, and both are valid


def _read(batch: Rollout, value_fn: Callable[[Any], Any]) -> _Steps:
    shape = tuple(batch.rewards.shape)
    if len(shape) != 2:
        raise SpecError(f"rewards must be [T, N], got {list(shape)}; compute advantages before batch.flatten()")
    valid, terminated, truncated = (
        _numpy(_shaped(getattr(batch, name), shape, name), bool) for name in ("valid", "terminations", "truncations")
    )
    rows = map_arrays(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch.obs)
    values = _evaluate(value_fn, rows, shape[0] * shape[1]).reshape(shape)

    next_values = np.concatenate([values[1:], _evaluate(value_fn, batch.last_obs, shape[1])[None]])
    if len(batch.final_at):
        when, who = _numpy(batch.final_at, np.int64).T
        next_values[when, who] = _evaluate(value_fn, batch.final_obs, len(when))

    goes_on = valid & ~terminated & ~truncated
    goes_on[:-1] &= valid[1:]
    goes_on[-1:] = False
    # Select with `where` instead of multiplying by a mask: rows of lost environments may be NaN or infinite.
    return _Steps(
        rewards=np.where(valid, _numpy(batch.rewards), 0.0),
        values=values,
        next_values=np.where(valid & ~terminated, next_values, 0.0),
        valid=valid,
        goes_on=goes_on,
    )


def _evaluate(value_fn: Callable[[Any], Any], obs: Any, num: int) -> Any:
    """Return the values of these observations, float64 [num]."""
    # A value_fn may use tensors even for a numpy batch, but only if torch was imported.
    torch = sys.modules.get("torch")
    with torch.no_grad() if torch is not None else nullcontext():
        values = value_fn(obs)
    shape = tuple(np.shape(values))
    if shape not in ((num,), (num, 1)):
        raise SpecError(f"value_fn must return [{num}] or [{num}, 1] for {num} observations, got {list(shape)}")
    # A copy: value_fn may return a view of the observations, or a buffer that its next call writes.
    return _numpy(values).reshape(num).copy()


def _accumulate(steps: _Steps, deltas: Any, decay: Any) -> Any:
    """Return x[t] = deltas[t] + decay[t] * x[t + 1], the second term only within an episode; 0 where not valid."""
    deltas = np.where(steps.valid, deltas, 0.0)
    decay = np.where(steps.goes_on, decay, 0.0)
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t] += decay[t] * deltas[t + 1]
    return deltas


def _advantages(batch: Rollout, steps: _Steps, advantages: Any, returns: Any) -> Advantages:
    advantages = np.where(steps.valid, advantages, 0.0)
    return Advantages(*(_like(batch.rewards, array) for array in (advantages, returns, steps.values)))


def _log_ratio(behaviour: Any, logprobs: Any, valid: Any) -> Any:
    """Return log(pi / pi_behaviour) in float64, 0 where not valid."""
    shape = tuple(np.shape(behaviour))
    if valid.shape != shape:
        raise SpecError(f"valid is {list(valid.shape)} but the behaviour's log-probabilities are {list(shape)}")
    new = np.where(valid, _numpy(_shaped(logprobs, shape, "logprobs", "one number per row of the batch")), 0.0)
    old = np.where(valid, _numpy(behaviour), 0.0)
    if not np.isfinite(old).all():
        raise SpecError("a valid row's behaviour log-probability is not finite: the acting policy recorded it wrongly")
    if not (new < np.inf).all():
        raise SpecError("a valid row's log-probability under the learner's policy is NaN or +inf; check its network")
    return new - old


def _capped(log_ratio: Any, cap: float, name: str) -> Any:
    if not cap > 0:
        raise SpecError(f"{name} must be positive, got {cap}")
    with np.errstate(over="ignore"):
        return np.minimum(cap, np.exp(log_ratio))


def _shaped(array: Any, shape: tuple[int, ...], name: str, hint: str = "as rewards are") -> Any:
    if tuple(np.shape(array)) != shape:
        raise SpecError(f"{name} must be {list(shape)}, {hint}; got {list(np.shape(array))}")
    return array


def _numpy(array: Any, dtype: Any = np.float64) -> Any:
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        # numpy has no bfloat16; cast on the host, as not every device supports float64.
        array = (array.double() if array.is_floating_point() else array).numpy()
    return np.asarray(array, dtype=dtype)


def _like(example: Any, array: Any) -> Any:
    """Return the array, as a tensor on the same device if `example` is a tensor."""
    if isinstance(example, np.ndarray):
        return array
    import torch

    # An integer dtype (of the rewards) would round.
    return example.new_tensor(array, dtype=example.dtype if example.is_floating_point() else torch.float32)
