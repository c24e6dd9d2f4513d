"""Predict the throughput of any number of workers and environments from a few measured points. Pure.

One vector step of W workers with E environments each takes, in `rollout`,

    k(W) * (E * environment + policy_call + E * policy_row)  +  fixed + W * per_worker + W * E * per_row

The workers do the first part at the same time; k(W) is how much slower they become together (shared caches and memory
bandwidth, measured by bare loops; more busy processes than cores). The second part is the head's, or waiting. In `step`
the environments' part is that of the bare loop, and everything else is the second part. All coefficients are fitted to
relative errors, and none is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterenv.bench.data import Bare, Coefficients, Mode, Point, Rates, middle

__all__ = ["Model", "crowding", "fit", "lockstep_loss"]

_SWEEPS = 500


@dataclass(frozen=True)
class Model:
    bare: Bare
    rollout: Coefficients
    step: Coefficients

    def rate(self, mode: Mode, point: Point) -> float:
        """Return the predicted steps per second."""
        c = self.rollout if mode == "rollout" else self.step
        worker_s = point.envs * (c.environment + c.policy_row) + c.policy_call
        rest_s = c.fixed + point.workers * c.per_worker + point.num_envs * c.per_row
        return point.num_envs / (crowding(self.bare, point.workers) * worker_s + rest_s)


def crowding(bare: Bare, workers: int) -> float:
    """Return how many times longer a worker takes when so many run as when it runs alone; at least 1."""
    full = max(1, bare.processes)
    if workers <= full:
        share = (workers - 1) / (full - 1) if full > 1 else 0.0
        return 1.0 + (bare.slowdown - 1.0) * share
    # Of the workers beyond the bare loops, those that sleep need no core.
    busy = min(1.0, bare.cpu_share)
    return bare.slowdown * max(1.0, workers * busy / max(full * busy, bare.cores))


def fit(bare: Bare, measured: Sequence[Rates]) -> Model:
    """Fit the coefficients to the medians of the measured points."""
    return Model(bare, _fit_rollout(bare, measured), _fit_step(bare, measured))


def _fit_rollout(bare: Bare, measured: Sequence[Rates]) -> Coefficients:
    found = [(m.point, m.point.num_envs / middle(m.rollout), m.shares) for m in measured if m.rollout and m.shares]
    if not found:
        return Coefficients(bare.row_s, 0.0, 0.0, 0.0, 0.0, 0.0)
    points = [point for point, _, _ in found]
    times = np.array([seconds for _, seconds, _ in found])
    crowd = np.array([crowding(bare, point.workers) for point in points])
    envs = np.array([point.envs for point in points])
    environment = np.array([shares.environment for _, _, shares in found]) * times / crowd
    policy = np.array([shares.policy for _, _, shares in found]) * times / crowd
    rest = np.array([shares.overhead + shares.waiting for _, _, shares in found]) * times
    call_s, row_s = non_negative_fit(np.stack([np.ones(len(envs)), envs], axis=1), policy, times)
    return Coefficients(float(np.median(environment / envs)), call_s, row_s, *_fit_rest(points, rest, times))


def _fit_step(bare: Bare, measured: Sequence[Rates]) -> Coefficients:
    found = [(m.point, m.point.num_envs / middle(m.step)) for m in measured if m.step]
    points = [point for point, _ in found]
    times = np.array([seconds for _, seconds in found])
    environment = [crowding(bare, point.workers) * point.envs * bare.row_s for point in points]
    rest = np.maximum(0.0, times - np.array(environment))
    return Coefficients(bare.row_s, 0.0, 0.0, *_fit_rest(points, rest, times))


def _fit_rest(points: Sequence[Point], rest: np.ndarray, times: np.ndarray) -> tuple[float, float, float]:
    features = [[1.0, point.workers, point.num_envs] for point in points]
    fixed, per_worker, per_row = non_negative_fit(np.array(features).reshape(-1, 3), rest, times)
    return fixed, per_worker, per_row


def non_negative_fit(features: np.ndarray, values: np.ndarray, scale: np.ndarray) -> list[float]:
    """Return the x >= 0 that minimizes |(features @ x - values) / scale|, by coordinate descent."""
    if not len(values):
        return [0.0] * features.shape[1]
    a, b = features / scale[:, None], values / scale
    size = np.sqrt((a * a).sum(axis=0))  # columns of one length: the descent then converges quickly
    a = a / size
    x = np.zeros(a.shape[1])
    left = b.copy()
    for _ in range(_SWEEPS):
        for j in range(len(x)):
            new = max(0.0, x[j] + float(a[:, j] @ left))
            left -= a[:, j] * (new - x[j])
            x[j] = new
    return [float(value) for value in x / size]


def lockstep_loss(step_s: Sequence[float], point: Point, seed: int = 0, rounds: int = 400) -> float:
    """Return how many times longer the slowest worker's step takes than the average worker's, at least 1.

    A worker's step is a sum of `point.envs` drawn step times.
    """
    if point.workers < 2 or not len(step_s):
        return 1.0
    drawn = np.random.default_rng(seed).choice(np.asarray(step_s), size=(rounds, point.workers, point.envs))
    sums = drawn.sum(axis=2)
    return float(sums.max(axis=1).mean() / sums.mean())
