"""Log what workers print, labelled with the slot that printed it, and count the lines that had to be dropped.

Lines come from the executors, with the mark that a worker puts before each (`worker/output.py`); they go to the
`clusterenv.output` logger.
"""

from __future__ import annotations

from typing import Any

from clusterenv.events import emit_output
from clusterenv.executors.contract import Printed
from clusterenv.worker.output import read_mark

__all__ = ["OutputLog"]


class OutputLog:
    def __init__(self, slots_of: list[list[int]]) -> None:
        self._slots_of = slots_of
        self.dropped = [0] * len(slots_of)
        """Number of dropped lines, by worker."""

    def show(self, events: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Log what was printed. Return the other messages."""
        others = [event for event in events if not isinstance(event[1], Printed)]
        if len(others) < len(events):
            for worker, message in events:
                if isinstance(message, Printed):
                    self.log(worker, message)
        return others

    def log(self, worker: int, printed: Printed) -> None:
        slots = self._slots_of[worker]
        everyone = f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]}-{slots[-1]}"
        if printed.dropped > 0:
            self.dropped[worker] += printed.dropped
            emit_output(f"[{everyone}] ({printed.dropped} lines dropped: more was printed than could be passed on)")
        for line in printed.text.split("\n") if printed.text else ():
            slot, text = read_mark(line)
            emit_output(f"[{f'slot {slot}' if slot in slots else everyone}] {text}")
