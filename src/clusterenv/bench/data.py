"""What a benchmark of one environment measured and concluded, as plain data.

`measure.py` fills it, `model.py` and `advise.py` read it, `report.py` prints it. Times are seconds, rates are true
transitions per second: rows that only reset an environment do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

Mode = Literal["rollout", "step"]
"""Who acts: the workers, in `collector.rollout`, or the head, in `step`."""


@dataclass(frozen=True, order=True)
class Point:
    """A number of workers, and of environments that each of them has. Ordered by cost: workers first."""

    workers: int
    envs: int

    @property
    def num_envs(self) -> int:
        return self.workers * self.envs


@dataclass(frozen=True)
class Bare:
    """The environment in a loop that records and sends nothing, on one core and on all of them at once."""

    cores: int
    """CPUs that this process may use."""
    processes: int
    """Number of loops that ran at once for `all_rate`."""
    rate: float
    """Steps per second of one loop alone, resets included, without the time that other processes took."""
    all_rate: float
    """Sum of the rates of `processes` loops at once: the limit."""
    step_s: tuple[float, ...]
    """A sample of the times of single steps, of one loop alone."""
    reset_s: float
    reset_share: float
    """Share of the environment's time that resets take."""
    episode_steps: float | None
    """Mean length of the episodes that ended; None: none ended."""
    cpu_share: float
    """Cores that one environment keeps busy: below 1 it sleeps or waits for something, above 1 it has threads."""
    taken_share: float
    """Share of the time in which one loop alone was ready to run, but other processes had the cores."""
    make_s: float
    memory_bytes: int
    """Growth of a worker by one more environment."""
    is_single: bool = False
    """A second environment could not be made in the same process."""

    @property
    def row_s(self) -> float:
        """Time of a step of one loop alone, with its share of the resets."""
        return 1.0 / self.rate

    @property
    def slowdown(self) -> float:
        """How much longer a step takes while `processes` loops run, from 1."""
        return max(1.0, self.rate * self.processes / self.all_rate)


@dataclass(frozen=True)
class Shares:
    """Where the workers' time in rollouts goes; the sum is 1."""

    environment: float
    policy: float
    overhead: float
    """The head computes (copies rows, sends requests), and the workers are idle."""
    waiting: float
    """Idle for another reason: a worker that is slower, a core that others use."""


@dataclass(frozen=True)
class Rates:
    """What was measured at one point, one number for each round; every point of a stage has the same rounds."""

    point: Point
    rollout: tuple[float, ...] = ()
    step: tuple[float, ...] = ()
    shares: Shares | None = None
    """Of the rollouts."""

    def of(self, mode: Mode) -> tuple[float, ...]:
        return self.rollout if mode == "rollout" else self.step


def middle(values: tuple[float, ...]) -> float:
    """Return the median, or 0 of nothing."""
    return median(values) if values else 0.0


@dataclass(frozen=True)
class Space:
    """What may be proposed: up to so many workers and environments per worker, within memory and time."""

    workers: tuple[int, ...]
    envs: tuple[int, ...]
    envs_limit: str = ""
    """Why there are not more environments per worker; empty: for no reason of this environment."""
    workers_limit: str = ""
    """Why there are not more workers; empty: because of the cores, or of what the user asked for."""

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(Point(w, e) for w in self.workers for e in self.envs)


@dataclass(frozen=True)
class Coefficients:
    """Seconds of one vector step; see `model.py`."""

    environment: float
    policy_call: float
    policy_row: float
    fixed: float
    per_worker: float
    per_row: float


@dataclass(frozen=True)
class Choice:
    """The recommended point for one mode."""

    mode: Mode
    point: Point
    rate: float
    of_limit: float
    ratio_to_best: float
    """Median of the ratios to the fastest candidate; below 1 if a smaller point was preferred."""
    noise: float
    """Spread of these ratios between rounds (median absolute deviation)."""


@dataclass(frozen=True)
class Compared:
    """Another way to run the recommended point, in rounds interleaved with it."""

    name: str
    ratio: float
    noise: float


@dataclass(frozen=True)
class HeadCost:
    """What the head does for each row that a node sends, measured over one node agent on loopback."""

    row_s: float
    """CPU time of the head's process, its network threads included."""
    row_bytes: float


@dataclass(frozen=True)
class Note:
    kind: str
    text: str


@dataclass(frozen=True)
class Report:
    """All results of one run, as printed."""

    target: str
    seconds: float
    rollout_steps: int
    bare: Bare
    load_before: float | None
    """Load average of the machine before the run; None if the system does not tell."""
    explored: tuple[Rates, ...]
    candidates: tuple[Rates, ...]
    coefficients: Mapping[Mode, Coefficients]
    choices: tuple[Choice, ...]
    shares: Shares
    code: tuple[str, ...]
    notes: tuple[Note, ...]
    compared: tuple[Compared, ...] = ()
    head_cost: HeadCost | None = None
