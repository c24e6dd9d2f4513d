"""Keep the points of a run: every second of the last hour, every minute of the last days. Pure."""

from __future__ import annotations

from collections import deque

import msgspec

from clusterenv.monitor.sample import Point

__all__ = ["History"]

_SECONDS = 3600
_MINUTES = 7 * 24 * 60


class History:
    """The points of a run, bounded."""

    def __init__(self) -> None:
        self._seconds: deque[Point] = deque(maxlen=_SECONDS)
        self._minutes: deque[Point] = deque(maxlen=_MINUTES)
        self._minute_began: Point | None = None

    def add(self, point: Point) -> None:
        """Add the newest point."""
        self._seconds.append(point)
        if self._minute_began is None:
            self._minute_began = point
        elif point.time_s - self._minute_began.time_s >= 60.0:
            self._minutes.append(_over(self._minute_began, point))
            self._minute_began = point

    def points(self, after_s: float = 0.0) -> list[Point]:
        """Return the points later than this Unix time, oldest first: by the minute where seconds are not kept."""
        seconds = list(self._seconds)
        first = seconds[0].time_s if seconds else float("inf")
        earlier = [point for point in list(self._minutes) if after_s < point.time_s < first]
        return [*earlier, *(point for point in seconds if point.time_s > after_s)]


def _over(first: Point, last: Point) -> Point:
    """Return the last point, with its rate over the time since the first."""
    rate = (last.steps - first.steps) / (last.time_s - first.time_s)
    return msgspec.structs.replace(last, steps_per_s=max(0.0, rate))
