"""Measure a `ClusterEnv` of the environment at some points: rollouts, steps, partial batches.

Every stage keeps the environments of all its points open, and measures them in turns, in short windows: on a machine
that others use too, only figures of the same moment can be compared. The callers are in `command.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from clusterenv.backends import Local, Loopback
from clusterenv.bench.data import HeadCost, Mode, Point, Rates, Shares
from clusterenv.bench.policy import HeadActor, policy_for
from clusterenv.bench.target import Target
from clusterenv.env import ClusterEnv
from clusterenv.errors import SpecError
from clusterenv.simulators.native import native

__all__ = ["Setting", "Subject", "Subjects", "has_native", "head_cost", "interleave"]

K = TypeVar("K")
Take = Callable[[float], float]
"""Runs for about so many seconds, and returns transitions per second."""


@dataclass(frozen=True)
class Setting:
    """What all measurements of a run share."""

    target: Target
    rollout_steps: int
    window_s: float


class Subject:
    """One open `ClusterEnv` with a policy, and its clocks."""

    def __init__(self, setting: Setting, point: Point, backend: Any = None, simulator: Any = None) -> None:
        self.point = point
        self._steps = setting.rollout_steps
        backend = Local(workers=point.workers) if backend is None else backend
        self.envs = envs = ClusterEnv(setting.target.env, point.num_envs, backend=backend, simulator=simulator)
        try:
            spaces = envs.single_observation_space, envs.single_action_space
            policy = policy_for(*spaces)
            self._collector = envs.collector(policy, seed=0)
            self._act = HeadActor(policy, *spaces)
            self._obs, _ = envs.reset(seed=0)
            self._collector.rollout(min(4, self._steps))  # the workers load the policy
        except BaseException:
            envs.close()
            raise
        self._rows = self._bytes = 0
        self._head_cpu_s = 0.0
        self._began = self._totals()

    def close(self) -> None:
        self.envs.close()

    def rollout(self, seconds: float) -> float:
        """Collect rollouts for this time, at least one; return the rate."""
        rows = 0
        cpu, begin = time.process_time(), time.perf_counter()
        until = begin + seconds
        while (now := time.perf_counter()) < until or not rows:
            batch = self._collector.rollout(self._steps)
            rows += int(np.count_nonzero(batch.valid))
        self._head_cpu_s += time.process_time() - cpu
        self._rows += rows
        return rows / (now - begin)

    def step(self, seconds: float) -> float:
        """Step all environments together for this time, with actions of the policy at the head; return the rate."""
        envs, act, obs = self.envs, self._act, self._obs
        was_done = np.zeros(envs.num_envs, np.bool_)
        rows, begin = 0, time.perf_counter()
        until = begin + seconds
        while (now := time.perf_counter()) < until or not rows:
            obs, _, terminations, truncations, _ = envs.step(act(obs))
            rows += envs.num_envs - int(np.count_nonzero(was_done))  # the row after an episode's last resets it
            was_done = terminations | truncations
        self._obs = obs
        return rows / (now - begin)

    def send_recv(self, seconds: float) -> float:
        """Step with `send` and `recv` of a worker's share of the environments at a time; return the rate.

        As in `step`, the policy acts for every row.
        """
        envs, act = self.envs, self._act
        least = max(1, min(self.point.envs, envs.num_envs // 2))
        was_done = np.zeros(envs.num_envs, np.bool_)
        rows, begin = 0, time.perf_counter()
        until = begin + seconds
        envs.send(act(self._obs))
        while (now := time.perf_counter()) < until or not rows:
            obs, _, terminations, truncations, infos = envs.recv(min_envs=least)
            slots = infos["slot"]
            rows += len(slots) - int(np.count_nonzero(was_done[slots]))
            was_done[slots] = terminations | truncations
            envs.send(act(obs), slots)
        envs.recv()  # those in flight
        return rows / (now - begin)

    def shares(self) -> Shares | None:
        """Return where the time of all rollouts so far went; None if there were none."""
        environment, policy, total = (now - then for now, then in zip(self._totals(), self._began, strict=True))
        if total <= 0:
            return None
        environment, policy = min(1.0, environment / total), policy / total
        idle = max(0.0, 1.0 - environment - policy)
        overhead = min(idle, self._head_cpu_s / total)
        whole = max(1.0, environment + policy)
        return Shares(environment / whole, policy / whole, overhead, idle - overhead)

    def head_row_s(self) -> float:
        """Return the head's CPU time for each row of the rollouts."""
        return self._head_cpu_s / max(1, self._rows)

    def row_bytes(self) -> float:
        """Return the size of one row of a rollout."""
        batch = self._collector.rollout(self._steps)
        arrays = [*_arrays(batch.obs), *_arrays(batch.actions), batch.rewards, batch.logprobs]
        return float(sum(array.nbytes for array in arrays) / batch.valid.size)

    def _totals(self) -> tuple[float, float, float]:
        stats = self._collector.stats()
        return stats["busy_s"]["environment"], stats["busy_s"]["policy"], stats["collecting_s"]


def _arrays(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in _arrays(part)]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in _arrays(part)]
    return [tree] if isinstance(tree, np.ndarray) else []


class Subjects:
    """The open subjects of a run, by point. A context manager: leaving it closes all."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._open: dict[Point, Subject] = {}

    def __enter__(self) -> Subjects:
        return self

    def __exit__(self, *exc: object) -> None:
        self.keep(())

    def __getitem__(self, point: Point) -> Subject:
        if point not in self._open:
            self._open[point] = Subject(self._setting, point)
        return self._open[point]

    def keep(self, points: Iterable[Point]) -> None:
        """Close the subjects of all other points."""
        kept = set(points)
        with ExitStack() as closing:  # closes all, even if one fails
            for point in [point for point in self._open if point not in kept]:
                closing.callback(self._open.pop(point).close)

    def measure(self, points: Mapping[Mode, Sequence[Point]], until: float, least: int) -> tuple[Rates, ...]:
        """Measure every point of each mode in turns until this time, at least `least` rounds."""
        takes: dict[tuple[Mode, Point], Take] = {}
        for mode, chosen in points.items():
            for point in chosen:
                subject = self[point]
                takes[mode, point] = subject.rollout if mode == "rollout" else subject.step
        rates = interleave(takes, self._setting.window_s, until, least)
        return tuple(
            Rates(
                point,
                rates.get(("rollout", point), ()),
                rates.get(("step", point), ()),
                self[point].shares() if ("rollout", point) in rates else None,
            )
            for point in sorted({point for _, point in takes})
        )


def interleave(takes: Mapping[K, Take], window_s: float, until: float, least: int) -> dict[K, tuple[float, ...]]:
    """Run all takes once per round, in an order that is reversed in every other round; return the rates of each.

    The first run of each is a warm-up. Ends after `least` rounds, or before the round that would end after `until`.
    """
    rates: dict[K, list[float]] = {key: [] for key in takes}
    for take in takes.values():
        take(window_s / 4)
    rounds, round_s = 0, 0.0
    while takes and (rounds < least or time.monotonic() + round_s <= until):
        begin = time.monotonic()
        order = list(takes) if rounds % 2 == 0 else list(takes)[::-1]
        for key in order:
            rates[key].append(takes[key](window_s))
        rounds, round_s = rounds + 1, time.monotonic() - begin
    return {key: tuple(values) for key, values in rates.items()}


def has_native(target: Target) -> bool:
    """Return whether `simulator="native"` exists for this environment."""
    if not target.is_id:
        return False
    try:
        native(target.env, "native", None)
    except SpecError:
        return False
    return True


def head_cost(setting: Setting, envs: int, seconds: float) -> HeadCost:
    """Return what rows from a node cost the head, measured with one node agent that has one worker."""
    subject = Subject(setting, Point(1, envs), backend=Loopback(nodes=1, workers_per_node=1))
    try:
        subject.rollout(seconds)
        return HeadCost(subject.head_row_s(), subject.row_bytes())
    finally:
        subject.close()
