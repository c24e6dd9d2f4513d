"""Who hangs, and who is slow: pure judgements over progress words, step times and a clock."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["HangWatch", "LongCalls", "PaceWatch"]

_SLOW_FACTOR = 5.0
_SLOW_S = 0.001
"""Below this a step's time is the scheduler's noise, not the environment's."""


class HangWatch:
    """Since when each worker shows the same progress."""

    def __init__(self, workers: int) -> None:
        self._seen: list[tuple[Any, float]] = [((), 0.0)] * workers

    def began(self, worker: int, now_s: float) -> None:
        """It was given something to do."""
        self._seen[worker] = ((), now_s)

    def stuck_s(self, worker: int, progress: tuple[int, int, int], now_s: float) -> float:
        seen, since = self._seen[worker]
        if progress != seen:
            self._seen[worker] = (progress, now_s)
            return 0.0
        return now_s - since


class LongCalls:
    """Whose call takes so long that the user should know, long before a timeout ends it."""

    def __init__(self, workers: int, warn_after_s: float | None) -> None:
        self._warn_after_s = [math.inf if warn_after_s is None else warn_after_s] * workers

    def is_due(self, worker: int, stuck_s: float) -> bool:
        """Whether to warn now. The next warning of the same worker takes twice as long: it may just be slow."""
        if stuck_s <= self._warn_after_s[worker]:
            return False
        while self._warn_after_s[worker] < stuck_s:
            self._warn_after_s[worker] *= 2
        return True


class PaceWatch:
    """An environment much slower than its peers is named, never declared dead."""

    def __init__(self) -> None:
        self.slow: set[int] = set()

    def newly_slow(self, pace_s: Any) -> list[tuple[int, str]]:
        """(slot, why) of those not named before; `pace_s` [N], 0 where nothing was measured."""
        known = pace_s > 0
        if known.sum() < 3:
            return []
        median = float(np.median(pace_s[known]))
        found = []
        for slot in np.flatnonzero(pace_s > max(_SLOW_FACTOR * median, _SLOW_S)).tolist():
            if slot not in self.slow:
                self.slow.add(slot)
                times = pace_s[slot] / median
                found.append((slot, f"a step takes {pace_s[slot] * 1000:.2f} ms, {times:.0f}x the median"))
        return found
