"""Put into words what a run's figures mean for the user. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from clusterenv.bench.data import Bare, Choice, Compared, HeadCost, Note, Point, Shares, Space

__all__ = ["duration", "make_notes", "worthwhile_cores"]

_TEN_GIGABIT = 10e9 / 8
_BIG_SHARE = 0.15


def worthwhile_cores(head: HeadCost, rate_per_worker: float) -> int:
    """Return for how many workers of this rate the head can receive rows, if it does nothing else."""
    return max(1, math.floor(1.0 / (head.row_s * rate_per_worker)))


def make_notes(
    bare: Bare,
    possible: Space,
    choices: Sequence[Choice],
    shares: Shares,
    loss: float,
    compared: Sequence[Compared],
    native: bool,
    head: HeadCost | None,
    load: float | None,
) -> tuple[Note, ...]:
    """Return everything worth saying, most important first."""
    rollout, step = choices
    return tuple(
        Note(kind, text)
        for kind, text in (
            *_machine(bare, load, choices),
            *_workers(bare, possible, rollout),
            *_acting(rollout, step),
            *_resets(bare),
            *_shares(shares),
            *_simulator(native, compared),
            *_lockstep(bare, step.point, loss, compared),
            *_cluster(head, rollout),
        )
    )


def _machine(bare: Bare, load: float | None, choices: Sequence[Choice]) -> Iterator[tuple[str, str]]:
    noise = max(choice.noise for choice in choices)
    if (load or 0.0) > 0.3 * bare.cores or bare.taken_share > 0.05 or noise > 0.1:
        known = "" if load is None else f"load {load:.1f} on {bare.cores} cores before the run; "
        yield (
            "noise",
            f"the machine was not idle ({known}a single loop waited "
            f"{_percent(bare.taken_share)} of its time for a core; ratios varied by {_percent(noise)} between rounds): "
            "this is the advice for what other processes left. Run it again when nothing else runs",
        )


def _workers(bare: Bare, possible: Space, rollout: Choice) -> Iterator[tuple[str, str]]:
    if bare.processes > 1 and bare.slowdown > 1.2:
        yield (
            "contention",
            f"{bare.processes} bare loops at once reach only {bare.all_rate / bare.rate:.1f} times the rate of one: "
            "they share caches, memory bandwidth or hyperthreads",
        )
    if bare.cpu_share < 0.7:
        yield (
            "idle",
            f"the environment uses {_percent(bare.cpu_share)} of a core while it steps, and waits otherwise: more "
            "workers than cores pay",
        )
    elif bare.cpu_share > 1.3:
        yield (
            "threads",
            f"the environment computes in threads ({bare.cpu_share:.1f} cores for one environment): one thread per "
            "worker is usually faster when there are as many workers as cores",
        )
    if possible.envs_limit and rollout.point.envs == possible.envs[-1]:
        yield (
            "limited",
            f"more than {possible.envs[-1]} environments per worker were not tried: {possible.envs_limit}",
        )
    if possible.workers_limit and rollout.point.workers == possible.workers[-1]:
        yield (
            "limited",
            f"more than {possible.workers[-1]} workers were not tried: {possible.workers_limit}",
        )
    if rollout.point.workers < min(bare.cores, possible.workers[-1]):
        yield ("workers", f"more than {rollout.point.workers} workers gain nothing here")


def _acting(rollout: Choice, step: Choice) -> Iterator[tuple[str, str]]:
    ratio = rollout.rate / step.rate if step.rate else 1.0
    if ratio >= 1.1:
        yield ("acting", f"rollouts on the workers are {ratio:.1f} times as fast as step() with the policy at the head")
    elif ratio <= 0.9:
        yield (
            "acting",
            f"step() with the policy at the head is {1 / ratio:.1f} times as fast as rollouts on the workers",
        )


def _resets(bare: Bare) -> Iterator[tuple[str, str]]:
    if bare.reset_share >= 0.1:
        yield (
            "resets",
            f"resets take {_percent(bare.reset_share)} of the environment's time ({duration(bare.reset_s)} after every "
            f"{bare.episode_steps:.0f} steps of a random policy): make reset() cheaper first; it matters less as "
            "episodes become longer",
        )


def _shares(shares: Shares) -> Iterator[tuple[str, str]]:
    if shares.policy >= 0.3:
        yield (
            "policy",
            f"the policy takes {_percent(shares.policy)} of the workers' time: more environments per worker share one "
            'forward pass; a network much larger than 64-64 may be faster at the head (collector(act="auto"))',
        )
    if shares.waiting >= _BIG_SHARE:
        yield (
            "waiting",
            f"workers wait {_percent(shares.waiting)} of their time for each other, or for a core: "
            "collector.stream(...) lets none of them wait; rollout(..., balance=True) if some are always slower",
        )
    if shares.overhead >= _BIG_SHARE:
        yield (
            "overhead",
            f"workers are idle for {_percent(shares.overhead)} of the time while the head copies rows: "
            "collector(prefetch=True) collects meanwhile, and rollout(..., copy=False) copies less",
        )


def _simulator(native: bool, compared: Sequence[Compared]) -> Iterator[tuple[str, str]]:
    found = next((c for c in compared if c.name == "native"), None)
    if found is not None and found.ratio >= 1.1:
        yield (
            "native",
            f'simulator="native" is {found.ratio:.1f} times as fast: it exists for this id (docs/simulators.md)',
        )
    elif found is not None:
        yield ("native", f'simulator="native" exists for this id, but ran at {found.ratio:.2f} of this rate here')
    elif native:
        yield ("native", 'simulator="native" exists for this id, and was not measured here (docs/simulators.md)')


def _lockstep(bare: Bare, point: Point, loss: float, compared: Sequence[Compared]) -> Iterator[tuple[str, str]]:
    found = next((c for c in compared if c.name == "send/recv"), None)
    if found is None:
        return
    slow = float(np.quantile(bare.step_s, 0.99) / np.median(bare.step_s))
    text = (
        f"step times vary (the 99th percentile is {slow:.1f} times the median), so in step() the slowest of "
        f"{point.workers} workers takes {loss:.1f} times as long as the average"
    )
    if found.ratio >= 1.1:
        yield (
            "uneven",
            f"{text}: send/recv is {found.ratio:.1f} times as fast; stream() helps rollouts in the same way",
        )
    else:
        yield ("uneven", f"{text}; but send/recv ran at {found.ratio:.2f} of its rate here")


def _cluster(head: HeadCost | None, rollout: Choice) -> Iterator[tuple[str, str]]:
    if head is None:
        return
    per_worker = rollout.rate / rollout.point.workers
    cores = worthwhile_cores(head, per_worker)
    wire = _TEN_GIGABIT / max(1.0, head.row_bytes)
    text = (
        f"on a cluster, a head that only collects can receive about {1 / head.row_s:,.0f} steps/s "
        f"({duration(head.row_s)} of CPU per row over an encrypted connection), as many as {cores:,} such cores collect"
    )
    if wire < 1 / head.row_s:
        text += f"; a link of 10 Gbit/s carries {wire:,.0f} steps/s ({head.row_bytes:,.0f} bytes each)"
    yield ("cluster", text)


def duration(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} µs"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
