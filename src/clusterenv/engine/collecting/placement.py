"""Decide where a collector's policy acts: on the workers, or at the head. Pure; rates are measured by the caller."""

from __future__ import annotations

from typing import Literal

__all__ = ["Act", "Place", "Placement"]

Place = Literal["workers", "head"]
Act = Literal["workers", "head", "auto"]

_TRIALS = 3
"""Rollouts in each place before the decision; the first of each, in which things start, does not count."""


class Placement:
    """Where the next rollout acts. With "auto", both places are tried in turn, and the faster one is used from then on.

    >>> placement = Placement("auto")
    >>> for steps_per_s in (100, 20, 100, 30, 100, 30):
    ...     placement.measured(placement.next, steps=100, seconds=100 / steps_per_s)
    >>> placement.next, placement.reason
    ('workers', 'measured: 100 steps/s on the workers, 30 at the head')
    """

    def __init__(self, act: Act) -> None:
        self._decided: Place | None = None if act == "auto" else act
        self.reason = f"act={act!r}" if act != "auto" else "not decided yet: both places are being measured"
        self._trials: dict[Place, list[tuple[int, float]]] = {"workers": [], "head": []}

    @property
    def is_decided(self) -> bool:
        return self._decided is not None

    @property
    def next(self) -> Place:
        if self._decided is not None:
            return self._decided
        return "head" if len(self._trials["head"]) < len(self._trials["workers"]) else "workers"

    def measured(self, place: Place, steps: int, seconds: float) -> None:
        """Record a rollout that was collected in this place."""
        if self._decided is not None:
            return
        self._trials[place].append((steps, seconds))
        if min(map(len, self._trials.values())) == _TRIALS:
            workers, head = (_rate(self._trials[name][1:]) for name in ("workers", "head"))
            self._decided = "head" if head > workers else "workers"
            self.reason = f"measured: {workers:.0f} steps/s on the workers, {head:.0f} at the head"


def _rate(trials: list[tuple[int, float]]) -> float:
    return sum(steps for steps, _ in trials) / max(sum(seconds for _, seconds in trials), 1e-9)
