"""The statistics of the comparisons: pure functions of scores. (Agarwal et al. 2021 recommend IQM and bootstraps.)"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "FEW",
    "MARGIN",
    "Interval",
    "difference",
    "iqm",
    "iqm_interval",
    "pass_rate",
    "probability_of_improvement",
    "spread",
]

MARGIN = 0.05
"""Non-inferior: the lower end of the 95 % interval of the difference of IQMs is above minus this. Stated beforehand."""

FEW = 10
"""With fewer seeds than this a resampled interval of 95 % covers visibly less: none is shown, and no verdict."""

_RESAMPLES = 4000


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def iqm(scores: Any, axis: int = -1) -> Any:
    """The mean of the middle half, with fractional weights at its ends.

    >>> float(iqm([0.0, 1.0, 2.0, 100.0]))
    1.5
    >>> float(iqm([0.0, 3.0, 9.0]))
    3.5
    """
    ordered = np.sort(np.moveaxis(np.asarray(scores, dtype=np.float64), axis, -1), axis=-1)
    n = ordered.shape[-1]
    at = np.arange(n)
    weights = np.clip(np.minimum(at + 1, 0.75 * n) - np.maximum(at, 0.25 * n), 0.0, 1.0)
    return (ordered * weights).sum(axis=-1) / weights.sum()


def iqm_interval(scores: ArrayLike, seed: int = 0) -> Interval:
    array = np.asarray(scores)
    picks = np.random.default_rng(seed).integers(len(array), size=(_RESAMPLES, len(array)))
    return _interval(iqm(array), iqm(array[picks]))


def spread(scores: ArrayLike) -> Interval:
    """IQM and its interval; of few seeds their range, as resampling them would tell too little.

    >>> spread([0.0, 3.0, 9.0])
    Interval(value=3.5, low=0.0, high=9.0)
    """
    array = np.asarray(scores, dtype=np.float64)
    if len(array) >= FEW:
        return iqm_interval(array)
    return Interval(float(iqm(array)), float(array.min()), float(array.max()))


def difference(arm: ArrayLike, base: ArrayLike, seed: int = 0, resamples: int = _RESAMPLES) -> Interval:
    """Of the IQMs, arm minus base; row i of both has the same seed, and seeds are resampled together."""
    a, b = np.asarray(arm), np.asarray(base)
    picks = np.random.default_rng(seed).integers(len(a), size=(resamples, len(a)))
    return _interval(iqm(a) - iqm(b), iqm(a[picks]) - iqm(b[picks]))


def probability_of_improvement(arm: ArrayLike, base: ArrayLike, seed: int = 0) -> Interval:
    """That a run of the arm scores above one of the base, ties half.

    >>> probability_of_improvement([1.0, 2.0], [0.0, 0.5]).value
    1.0
    """
    a, b = np.asarray(arm), np.asarray(base)
    wins = np.sign(a[:, None] - b[None, :]) / 2 + 0.5
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(len(a), size=(_RESAMPLES, len(a))), rng.integers(len(b), size=(_RESAMPLES, len(b)))
    resampled = np.array([wins[np.ix_(i, j)].mean() for i, j in zip(rows, columns, strict=True)])
    return _interval(wins.mean(), resampled)


def pass_rate(scores: ArrayLike, seeds: int, trials: int = 200) -> float:
    """How often an arm that is no different passes the test of non-inferiority with so many seeds: its power.

    Both arms are drawn from these scores.
    """
    rng = np.random.default_rng(seeds)
    array, passed = np.asarray(scores), 0
    for trial in range(trials):
        arm, base = rng.choice(array, seeds), rng.choice(array, seeds)
        passed += difference(arm, base, seed=trial, resamples=400).low > -MARGIN
    return passed / trials


def _interval(value: Any, resampled: Any) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(float(value), float(low), float(high))
