"""Decide what to measure, and what to recommend, from what was measured. Pure.

`space` and `exploration` say which points are possible and which to measure first; `candidates` takes the fitted model
and proposes the points of the final rounds; `choose` takes these rounds and recommends one; `notes.py` puts the rest
into words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from clusterenv.bench.data import Bare, Choice, Mode, Point, Rates, Space, middle
from clusterenv.bench.model import Model

__all__ = ["candidates", "choose", "exploration", "rollout_steps", "space", "uneven", "window"]

MOST_ENVS = 64
"""Environments per worker: beyond this, throughput hardly grows, and the batches of learners do."""
_STEPS_PER_WINDOW = 5
"""A worker gets no more environments than can step so often in a window: slow ones gain nothing from company."""
_WINDOW_SHARE, _SHORTEST_S, _LONGEST_S = 1 / 120, 0.05, 0.5
_MOST_STEPS = 128
_START_SHARE = 0.03
"""Of the run's time, for making the environments that share a core at one point."""
_OPEN_AT_ONCE = 4
"""So many times the environments of the largest point are open at the same time, about."""
_MAKING = "the time to make them"
_IDLE = 0.7
"""An environment that uses less than this share of a core may gain from more workers than cores."""
_MOST_WORKERS_PER_CORE = 8
_SMALLEST_TOLERANCE, _LARGEST_TOLERANCE = 0.02, 0.05


def window(seconds: float) -> float:
    """Return how long one measurement takes, in seconds, in a run of so many.

    Short, so that there are many rounds: the speed of a machine that others use too changes within seconds.
    """
    return min(max(seconds * _WINDOW_SHARE, _SHORTEST_S), _LONGEST_S)


def space(bare: Bare, max_workers: int | None, seconds: float, available_bytes: int) -> Space:
    """Return the points that may be measured: bounded by cores, memory and the time that making them takes."""
    most, why_workers = _most_workers(bare, max_workers, seconds, available_bytes)
    at_once = math.ceil(most / bare.cores)  # workers that share a core make their environments in turns
    limits = {
        "memory": int(_affordable(bare, available_bytes) / most),
        _MAKING: int(_makes(bare, seconds) / at_once),
        "the time of a step": int(window(seconds) / _STEPS_PER_WINDOW / bare.row_s),
        "one environment per process": 1 if bare.is_single else MOST_ENVS,
    }
    why, least = min(limits.items(), key=lambda limit: limit[1])
    envs = tuple(2**i for i in range(max(1, min(least, MOST_ENVS)).bit_length()))
    return Space(_worker_numbers(most, bare.cores), envs, why if envs[-1] < MOST_ENVS else "", why_workers)


def _most_workers(bare: Bare, max_workers: int | None, seconds: float, available_bytes: int) -> tuple[int, str]:
    """Return the largest number of workers, and why there are not more; "": cores and the user do not ask for more."""
    wanted, limits = max_workers, {"memory": int(_affordable(bare, available_bytes))}
    if wanted is None:
        wanted = bare.cores
        if bare.cpu_share < _IDLE:
            wanted = min(math.ceil(bare.cores / max(bare.cpu_share, 1e-3)), _MOST_WORKERS_PER_CORE * bare.cores)
            limits[_MAKING] = bare.cores * max(1, int(_makes(bare, seconds)))
    why, least = min(limits.items(), key=lambda limit: limit[1])
    return (wanted, "") if wanted <= least else (max(1, least), why if wanted > 1 else "")


def _affordable(bare: Bare, available_bytes: int) -> float:
    """Return for how many environments of one point the memory suffices."""
    return available_bytes / 2 / max(1, bare.memory_bytes) / _OPEN_AT_ONCE


def _makes(bare: Bare, seconds: float) -> float:
    """Return how many environments one core can make in the time for it."""
    return seconds * _START_SHARE / max(bare.make_s, 1e-9)


def _worker_numbers(most: int, cores: int) -> tuple[int, ...]:
    """Return all numbers up to 8, beyond that steps of about a quarter, with the cores and the largest."""
    numbers = set(range(1, min(most, 8) + 1))
    number = 8.0
    while number < most:
        numbers.add(int(number))
        number *= 1.25
    return tuple(sorted({*numbers, most, *({cores} if cores <= most else ())}))


def exploration(possible: Space) -> tuple[Point, ...]:
    """Return the few points from which the model is fitted: the corners, and one in the middle if that is far away."""
    few, many = possible.envs[max(0, len(possible.envs) - 5)], possible.envs[-1]
    most = possible.workers[-1]
    points = {Point(w, e) for w in (1, most) for e in (few, many)}
    if most >= 4:
        between = min(possible.workers, key=lambda w: abs(math.log(w / math.sqrt(most))))
        points.add(Point(between, many))
    return tuple(sorted(points))


def rollout_steps(bare: Bare, possible: Space, seconds: float) -> int:
    """Return how many steps the rollouts have: 128, fewer if the largest would take longer than a window."""
    return max(1, min(_MOST_STEPS, int(window(seconds) / (possible.envs[-1] * bare.row_s))))


def candidates(model: Model, possible: Space, explored: Sequence[Rates], mode: Mode, most: int) -> tuple[Point, ...]:
    """Return at most `most` points that are worth the final rounds, the most promising first.

    The best by the model; smaller ones that it predicts to be nearly as good; the best one of another number of
    workers, in case the model is wrong about these; the best point that was measured; half of its environments.
    """
    predicted = {point: model.rate(mode, point) for point in possible.points}
    best = max(predicted, key=lambda point: (predicted[point], -point.workers, -point.envs))
    nearly = [_smallest(predicted, share * predicted[best]) for share in (0.97, 0.92)]
    others = [point for point in predicted if point.workers != nearly[0].workers]
    elsewhere = max(others, key=lambda point: predicted[point], default=best)
    measured = max((m for m in explored if m.of(mode)), key=lambda m: middle(m.of(mode))).point
    half = Point(best.workers, max(1, best.envs // 2))
    proposed = [nearly[0], best, elsewhere, nearly[1], measured, half]
    return tuple(dict.fromkeys(proposed))[:most]


def _smallest(predicted: dict[Point, float], least: float) -> Point:
    return min(point for point, rate in predicted.items() if rate >= least)


def choose(mode: Mode, measured: Sequence[Rates], all_rate: float) -> Choice:
    """Recommend a candidate: the smallest of those that are as fast as the fastest, within the noise of the rounds."""
    found = {m.point: m.of(mode) for m in measured if m.of(mode)}
    fastest = max(found, key=lambda point: (middle(found[point]), -point.workers, -point.envs))
    ratios = {point: [a / b for a, b in zip(rates, found[fastest], strict=True)] for point, rates in found.items()}
    fits = {}
    for point, values in ratios.items():
        error = 1.5 * deviation(values) / math.sqrt(len(values))
        tolerance = min(max(error, _SMALLEST_TOLERANCE), _LARGEST_TOLERANCE)
        # In few and noisy rounds the median of ratios and the ratio of medians differ: both have to agree.
        if min(median(values), middle(found[point]) / middle(found[fastest])) >= 1.0 - tolerance:
            fits[point] = median(values)
    point = min(fits)
    others = [deviation(values) for other, values in ratios.items() if other != fastest]
    rate = middle(found[point])
    return Choice(mode, point, rate, rate / all_rate, fits[point], median(others) if others else 0.0)


def deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation."""
    center = median(values)
    return median(abs(value - center) for value in values)


def uneven(loss: float, row_s: float) -> bool:
    """Return whether to measure `send` and `recv`: workers would wait for the slowest, for longer than a call costs."""
    return loss > 1.15 and row_s > 100e-6
