"""Measure how long the steps of each environment take, so that slow ones can be named.

Only some steps are timed: timing all would cost 2 % on CartPole. `EnvGroup` counts whole steps here, the fragment loop
the steps of its fragments.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["TIMED_EVERY", "Pace"]

TIMED_EVERY = 32

Step = Callable[[Any], Any]


class Pace:
    """Count the steps of one worker, and keep a moving average in seconds for each of its slots."""

    def __init__(self, pace_s: Any) -> None:
        self._pace_s = pace_s  # [N], shared
        self.steps = 0  # so far; every TIMED_EVERY-th is timed

    def next_timed(self, num_steps: int) -> int:
        """Count the steps of a fragment; return the first of them, from 0, whose environments are to be timed."""
        first = (-self.steps - 1) % TIMED_EVERY
        self.steps += num_steps
        return first

    def note(self, slot: int, elapsed_s: float) -> None:
        """Add one step. A single one that was held up, by the operating system or by lazy imports, matters little."""
        before = self._pace_s[slot]
        if before == 0.0:
            self._pace_s[slot] = elapsed_s
        elif elapsed_s < before:
            self._pace_s[slot] = 0.5 * (before + elapsed_s)
        else:
            self._pace_s[slot] = 0.75 * before + 0.25 * min(elapsed_s, 4.0 * before)

    def timed(self, slots: list[int], steps: list[Step], envs: Sequence[Any]) -> list[Step]:
        """Wrap step functions to note how long they take, except those of environments that are gone."""

        def timed(slot: int, step: Step, action: Any) -> Any:
            start = time.perf_counter()
            result = step(action)
            self.note(slot, time.perf_counter() - start)
            return result

        pairs = zip(slots, steps, envs, strict=True)
        return [step if env is None else functools.partial(timed, slot, step) for slot, step, env in pairs]
