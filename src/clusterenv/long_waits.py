"""Decide when a wait is long enough to show its progress. Pure: time is passed in.

`Collection` asks in its waiting loops, and shows the line with `emit_progress`. A short wait costs one comparison.
"""

from __future__ import annotations

__all__ = ["LongWaits"]

_QUIET_S = 5.0
"""No line before a wait has lasted this long."""

_MOST_S = 60.0
"""Longest time between two lines."""


class LongWaits:
    """Waits of one kind, one after the other.

    The first line of a wait is due after five seconds, or when it has lasted twice as long as the last one: a training
    loop whose rollouts all take ten seconds shows two lines in the first of them, and no more. Further lines are due
    each time that the wait has doubled, and at least once a minute.
    """

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._began_s = 0.0
        self._due_s = 0.0

    def begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._due_s = now_s + max(_QUIET_S, 2.0 * self._usual_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether to show a line now."""
        if now_s < self._due_s:
            return False
        self._due_s = now_s + min(self.lasted_s(now_s), _MOST_S)
        return True

    def lasted_s(self, now_s: float) -> float:
        return now_s - self._began_s

    def end(self, now_s: float) -> None:
        """Record that what was awaited has come."""
        self._usual_s = self.lasted_s(now_s)
