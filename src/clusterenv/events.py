"""What happened to the environments: structured records with their cause, newest last.

Faults enter from the pool; `ClusterEnv.events()` hands them to the user, and each one is logged once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field

__all__ = ["Event", "EventLog", "emit"]

logger = logging.getLogger("clusterenv")


@dataclass(frozen=True)
class Event:
    """One fact about a slot or a worker, complete enough to replay the failure."""

    kind: str
    """"env_error", "worker_lost", "worker_replaced", "worker_moved", "env_rebuilt", "slow", "long_call", "pull",
    "dropped", "resumed", or what happened to a node."""
    reason: str
    """One line: what happened."""
    slots: tuple[int, ...] = ()
    worker: int | None = None
    phase: str | None = None
    seed: int | None = None
    """Seed of the environment's current incarnation, if it is known."""
    incarnation: int | None = None
    step: int | None = None
    """Number of the failing `step` call in its episode, from 1; 0: its `reset`. A replay fails in the same call."""
    detail: str = ""
    """Traceback, faulthandler text, or the last lines that the worker wrote."""
    time_s: float = field(default_factory=time.time)

    def __str__(self) -> str:
        where = []
        if self.slots:
            where.append(f"slot {self.slots[0]}" if len(self.slots) == 1 else f"slots {_spans(self.slots)}")
        for name in ("phase", "incarnation", "seed", "step"):
            value = getattr(self, name)
            if value is not None:
                where.append(f"{name} {value}")
        text = f"{self.kind}: {self.reason}" + (f" ({', '.join(where)})" if where else "")
        return f"{text}\n{self.detail.rstrip()}" if self.detail else text


class EventLog:
    """The last `size` events, and how many of each kind there were in all."""

    def __init__(self, size: int = 1000) -> None:
        self._events: deque[Event] = deque(maxlen=size)
        self.counts: Counter[str] = Counter()

    def add(self, event: Event, level: int = logging.WARNING) -> None:
        self._events.append(event)
        self.counts[event.kind] += 1
        emit(level, str(event))

    def __call__(self) -> tuple[Event, ...]:
        return tuple(self._events)


def emit(level: int, text: str) -> None:
    """Log `text`; where nobody configured logging, what a worker printed must still be seen."""
    if logger.hasHandlers():
        logger.log(level, text)
    elif level >= logging.INFO:
        sys.stderr.write(f"clusterenv: {text}\n")


def _spans(slots: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) → "0-2, 5"."""
    parts: list[str] = []
    start = previous = slots[0] if slots else -1
    for slot in (*slots[1:], None):
        if slot is not None and slot == previous + 1:
            previous = slot
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if slot is not None:
            start = previous = slot
    return ", ".join(parts)
