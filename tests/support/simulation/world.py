"""The true state of a simulated run, independent of the head: the clock, the environments, and what they produced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.choices import Choices
from simulation.clock import Clock

__all__ = ["Died", "Failure", "Hangs", "Produced", "World"]


class Failure(BaseException):
    """A rule is broken. A BaseException, so that no `except Exception` of the code under test hides it."""


class Died(BaseException):
    """The process of this environment died in the middle of a call."""


class Hangs(BaseException):
    """This call of an environment never returns."""


@dataclass(slots=True)
class Produced:
    """One observation, with the step that led to it."""

    number: int
    slot: int
    env: int
    """Number of the environment object: no two incarnations have the same."""
    episode: int
    t: int
    """Steps since the episode began; 0: from a reset."""
    before: int
    """Number of the observation that was acted on; 0: none."""
    action: int
    terminated: bool
    truncated: bool
    total: float
    """Sum of the rewards of the episode so far."""
    mark: int
    """Value of the attribute that the user may set."""
    is_delivered: bool = False


@dataclass(slots=True)
class EnvRecord:
    slot: int
    incarnation: int
    is_alive: bool = True
    is_evaluating: bool = False
    seed: int | None = None
    """Seed of the last reset."""


FAULTS = (
    "raise",
    "raise in reset",
    "raise_after",
    "die",
    "hang",
    "nan",
    "slow",
    "kill",
    "interrupt",
    "part",
    "late",
    "node",
    "double",
)
"""Possible faults; each schedule has some of them, at its own rates."""


@dataclass
class World:
    choices: Choices
    clock: Clock = field(default_factory=Clock)
    rates: dict[str, float] = field(default_factory=dict)
    rates_in: dict[str, dict[str, float]] = field(default_factory=dict)
    """Call → other rates within it."""
    present_rates: dict[str, float] = field(default_factory=dict)
    produced: list[Produced] = field(default_factory=list)
    envs: list[EnvRecord] = field(default_factory=list)
    trace: list[str] | None = None
    """The events as text; None: not recorded."""
    counts: Counter[str] = field(default_factory=Counter)
    num_events: int = 0
    call: str = ""
    """The user's current call."""
    called_at_s: float = 0.0
    polls: int = 0
    """Number of waits within this call."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """Slot → incarnation that its worker was last asked to make."""
    is_evaluating: bool = False
    seeds: set[int] = field(default_factory=set)
    """Seeds of rebuilt environments."""
    mark: int = 0
    marked_from: int | None = 0
    """Observations with a higher number than this have `mark`; None: unknown."""
    user_seeds: set[int] = field(default_factory=set)
    planned: Callable[[str], bool] | None = None
    """Decides which faults happen, instead of chance."""
    at: tuple[int, str] = (-1, "")
    """Slot and phase of the running environment."""
    calm: bool = False
    """No more faults happen."""
    steps_rows: bool = False
    """Vector environments can step some of their environments."""

    def event(self, kind: str, text: str = "") -> None:
        self.num_events += 1
        self.counts[kind] += 1
        if self.trace is not None:
            self.trace.append(f"{self.clock.now_s:8.2f}  {kind} {text}")

    def happens(self, fault: str) -> bool:
        """Return whether this fault happens now."""
        if self.planned is not None:
            return self.planned(fault)
        rate = self.present_rates.get(fault, 0.0)
        return rate > 0.0 and not self.calm and self.choices.chance(rate)

    def fail(self, text: str) -> None:
        raise Failure(text)

    def begin_call(self, call: str) -> None:
        self.call, self.called_at_s, self.polls = call, self.clock.now_s, 0
        self.present_rates = {**self.rates, **self.rates_in[call]} if call in self.rates_in else self.rates
        self.event("call", call)

    def waits(self) -> None:
        """Count a wait of the head; fail if its call does not end, in virtual time or in number of waits."""
        self.polls += 1
        if self.polls > 3000 or self.clock.now_s - self.called_at_s > 3000.0:
            self.fail(f"{self.call} does not end: {self.polls} waits, {self.clock.now_s - self.called_at_s:.0f} s")

    def rebuilds(self, slot: int, incarnation: int, seed: int | None) -> None:
        """Check that a rebuilt slot gets a higher incarnation than all before, and a seed that was not used."""
        if incarnation <= self.incarnations.get(slot, 0):
            self.fail(f"slot {slot} is rebuilt as incarnation {incarnation}, after {self.incarnations.get(slot, 0)}")
        self.incarnations[slot] = incarnation
        if seed is not None and seed not in self.user_seeds:
            if seed in self.seeds:
                self.fail(f"slot {slot}: seed {seed} is used twice")
            self.seeds.add(seed)

    # -- environments -----------------------------------------------------------------------------------------

    def new_env(self, slot: int) -> int:
        self.envs.append(EnvRecord(slot, self.incarnations.get(slot, 0), True, self.is_evaluating))
        return len(self.envs) - 1

    def env_gone(self, env: int) -> None:
        self.envs[env].is_alive = False

    def produce(self, record: Produced) -> None:
        self.produced.append(record)

    def of_number(self, number: Any) -> Produced:
        """Return the observation of this number."""
        value = int(number)
        if value != number or not 0 < value <= len(self.produced):
            self.fail(f"{self.call}: {number} is no observation that an environment produced")
        return self.produced[value - 1]
