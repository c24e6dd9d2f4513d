"""Read a run's `Source` as the JSON that the page's scripts take.

`Updates` returns what is new since the last call: the stream sends it, and the report is the first one of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from clusterenv.monitor.sample import EventRecord, FragmentRecord, Point, RunInfo, Sample
from clusterenv.monitor.source import Source

__all__ = ["Cursor", "Update", "Updates", "thin"]

MOST_POINTS = 2000
"""Of a history that is sent at once; more than a chart has pixels."""

_MEANS = ("environment", "policy", "waiting", "cpu")


class Cursor(NamedTuple):
    """Up to where a page has the data: the `id` of a server-sent event, which browsers send back on reconnecting."""

    point_s: float = 0.0
    event: int = -1
    fragment_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.point_s!r},{self.event},{self.fragment_s!r}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor that was written so; the beginning, if it is none."""
        try:
            point_s, event, fragment_s = text.split(",")
            return cls(float(point_s), int(event), float(fragment_s))
        except ValueError:
            return cls()


class Update(msgspec.Struct, frozen=True):
    """The present moment, and what came since the last update."""

    info: RunInfo
    sample: Sample | None
    points: list[Point]
    events: list[EventRecord]
    fragments: list[FragmentRecord]


class Updates:
    """The updates of one viewer."""

    def __init__(self, source: Source, cursor: Cursor | None = None) -> None:
        self._source = source
        self.cursor = Cursor() if cursor is None else cursor
        self._last: Sample | None = None
        self._is_first = True

    def read(self) -> Update | None:
        """Return what is new; None if there is no newer sample. The first call always returns an update."""
        sample = self._source.sample()
        if not self._is_first and not _is_newer(sample, self._last):
            return None
        self._is_first = False
        self._last = sample
        points = self._source.points(self.cursor.point_s)
        events = self._source.events(self.cursor.event)
        fragments = self._source.fragments(self.cursor.fragment_s)
        self.cursor = Cursor(
            points[-1].time_s if points else self.cursor.point_s,
            events[-1].number if events else self.cursor.event,
            fragments[-1].arrived_at if fragments else self.cursor.fragment_s,
        )
        return Update(self._source.info(), sample, thin(points), events, fragments)


def _is_newer(sample: Sample | None, last: Sample | None) -> bool:
    if sample is None or last is None:
        return sample is not last
    return (sample.point.time_s, sample.is_over) != (last.point.time_s, last.is_over)


def thin(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most about `most` points: the newer half of that number as they are, older ones merged."""
    if len(points) <= most:
        return points
    old, new = points[: -most // 2], points[-most // 2 :]
    size = -(-len(old) // (most - len(new)))
    return [_merge(old[i : i + size]) for i in range(0, len(old), size)] + new


def _merge(points: list[Point]) -> Point:
    """Return the last of these points, with the means of rates and shares."""
    means: dict[str, Any] = {name: _mean(getattr(point, name) for point in points) for name in _MEANS}
    rate = sum(point.steps_per_s for point in points) / len(points)
    return msgspec.structs.replace(points[-1], steps_per_s=rate, **means)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
