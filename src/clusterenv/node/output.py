"""Limit how much of its workers' output a node passes on. Pure: the clock is passed in."""

from __future__ import annotations

from clusterenv.cluster.flow import Flow
from clusterenv.wire.messages import Output

__all__ = ["OutputLimit"]

_LONGEST = 1 << 18


class OutputLimit:
    """A rate with a burst, a quarter of what a head accepts. Dropped lines are counted for each worker, and reported
    with its next output, or by `unreported` if nothing follows."""

    def __init__(self, rate: float = 1 << 20, burst: float = 4 << 20) -> None:
        self._flow = Flow(rate, burst)
        self._dropped: dict[tuple[int, int], int] = {}  # (shard, worker) → lines

    def passes(self, output: Output, now: float) -> bool:
        """Return whether this may be sent; shorten its text, and set how many lines were dropped before it."""
        key, lines = (output.shard, output.worker), output.num_lines
        if lines and not self._flow.spend(min(len(output.text), _LONGEST), now, now):
            self._dropped[key] = self._dropped.get(key, 0) + output.dropped + lines
            return False
        output.dropped += self._dropped.pop(key, 0)
        output.text = output.text[:_LONGEST]
        if output.num_lines < lines:
            self._dropped[key] = lines - output.num_lines
        return True

    def unreported(self) -> list[Output]:
        """Return a message without text for each worker whose last lines were dropped; they count as reported."""
        dropped, self._dropped = self._dropped, {}
        return [Output(shard, worker, "", lines) for (shard, worker), lines in dropped.items()]
