"""Record the events of environments, workers and nodes, and do all logging of this package.

The head's modules add events; `ClusterEnv.events()` returns them, and each one is logged once. All logging goes to the
`clusterenv` logger, which shows only warnings unless logging is configured.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field

logger = logging.getLogger("clusterenv")
output = logging.getLogger("clusterenv.output")


@dataclass(frozen=True)
class Event:
    """One event of a slot, worker or node, with the seed and step needed to replay a failure."""

    kind: str
    """"env_error", "worker_lost", "worker_replaced", "worker_moved", "env_rebuilt", "slow", "long_call", "missing_key",
    "info_not_sent", "pull", "dropped", "resumed", or what happened to a node."""
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
    """Traceback, faulthandler output, or the last lines that the worker wrote."""
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
    """The last `size` events, and the total number of each kind."""

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
    """Log `text` on the `clusterenv` logger.

    A log that cannot be written (a full disk, a closed or replaced stderr) must not end the run.
    """
    with contextlib.suppress(Exception):
        logger.log(level, text if logger.hasHandlers() else f"clusterenv: {text}")


def emit_progress(text: str) -> None:
    """Show the progress of a long wait: in a log that accepts INFO, otherwise on the terminal, if there is one."""
    _show(logger, f"clusterenv: {text}", text, only_on_terminal=True)


def emit_output(text: str) -> None:
    """Log a line that an environment printed, marked with its slot, at INFO on the `clusterenv.output` logger.

    If no log accepts INFO it goes to stderr, like a child's output with `AsyncVectorEnv`: `print` is how environments
    are debugged. A level above INFO on that logger (or on `clusterenv`) silences it.
    """
    _show(output, text, text, only_on_terminal=False)


def instruct(text: str) -> None:
    """Tell the user what to do, on stderr, whatever the logging configuration."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _show(log: logging.Logger, plain: str, text: str, *, only_on_terminal: bool) -> None:
    with contextlib.suppress(Exception):
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info(text)
            return
        silenced = log.manager.disable >= logging.INFO or any(
            one.disabled or one.level > logging.INFO for one in (log, logger)
        )
        if not silenced and sys.stderr is not None and (not only_on_terminal or sys.stderr.isatty()):
            instruct(plain)


def _spans(slots: tuple[int, ...]) -> str:
    """Return slots as ranges: (0, 1, 2, 5) → "0-2, 5"."""
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
