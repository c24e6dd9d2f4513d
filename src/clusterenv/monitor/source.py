"""Where watchers get a run's data from: its monitor in the same process, or a client of its socket."""

from __future__ import annotations

from typing import Protocol

from clusterenv.monitor.sample import EventRecord, FragmentRecord, Point, RunInfo, Sample

__all__ = ["Source"]


class Source(Protocol):
    """A run that can be watched. Any thread may call it."""

    def info(self) -> RunInfo: ...

    def sample(self) -> Sample | None:
        """Return the newest sample; None before the first."""

    def points(self, after_s: float = 0.0) -> list[Point]:
        """Return the points of the history later than this Unix time, oldest first."""

    def events(self, after: int = -1) -> list[EventRecord]:
        """Return the events with higher numbers than this, oldest first; at most the last 1000."""

    def fragments(self, after_s: float = 0.0) -> list[FragmentRecord]:
        """Return the fragments that arrived later than this Unix time, oldest first; at most the last 2000."""
