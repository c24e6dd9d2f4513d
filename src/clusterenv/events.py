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
from collections.abc import Iterator
from dataclasses import dataclass, field

logger = logging.getLogger("clusterenv")
output = logging.getLogger("clusterenv.output")


LOSSES = ("worker_lost", "env_error", "env_lost")
"""Kinds of events that report lost episodes."""

_LONGEST = 16_000
"""Characters of a text of an event; of longer ones, the first and last are kept."""


@dataclass(frozen=True)
class Event:
    """One event of a slot, worker or node, with the seed and step needed to replay a failure."""

    kind: str
    """"env_error", "env_lost", "worker_lost", "worker_replaced", "worker_moved", "env_rebuilt", "slow", "long_call",
    "stack", "missing_key", "info_not_sent", "pull", "dropped", "resumed", "weights_damaged", "journal_not_written",
    "log_not_written", or what happened to a node."""
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

    def __post_init__(self) -> None:
        """Shorten long texts: a node may send large ones, and a thousand events are kept."""
        for name in ("reason", "detail"):
            text: str = getattr(self, name)
            if len(text) > _LONGEST:
                left_out = f"\n[{len(text) - _LONGEST} characters left out]\n"
                object.__setattr__(self, name, text[: _LONGEST // 2] + left_out + text[-_LONGEST // 2 :])

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
        self._events: deque[tuple[int, Event]] = deque(maxlen=size)
        self.counts: Counter[str] = Counter()
        self._lost_before = _lost.count

    def add(self, event: Event, level: int = logging.WARNING) -> None:
        self._note(event)
        emit(level, str(event))
        self._note_lost_lines()

    def __call__(self) -> tuple[Event, ...]:
        self._note_lost_lines()
        return tuple(event for _, event in self._events.copy())

    def numbered(self) -> list[tuple[int, Event]]:
        """Return the events with their numbers, which count from 0. Any thread may call it."""
        return list(self._events.copy())

    @property
    def lost_lines(self) -> int:
        """Number of lines that this process could not write since this log exists."""
        return _lost.count - self._lost_before

    def _note_lost_lines(self) -> None:
        """Record once that lines are lost. There is nowhere to write it, but `events()` shows it."""
        if self.lost_lines and "log_not_written" not in self.counts:
            self._note(Event("log_not_written", f"lines of the log are lost: {_lost.reason}"))

    def _note(self, event: Event) -> None:
        self._events.append((self.counts.total(), event))
        self.counts[event.kind] += 1


class _LostLines:
    """The lines that this process could not write to its log or stderr."""

    count = 0
    reason = ""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a line instead of raising: a full disk, or a closed or replaced stderr, must not end the run."""
        try:
            yield
        except Exception as error:
            self.count += 1
            self.reason = f"{type(error).__name__}: {error}"


_lost = _LostLines()


def emit(level: int, text: str) -> None:
    """Log `text` on the `clusterenv` logger. A line that cannot be written is counted, and does not end the run.

    Handlers of the user report their own failures on stderr, as Python's `logging` does; they are not counted.
    """
    with _lost.counted():
        if logger.hasHandlers():
            logger.log(level, text)
        elif logging.lastResort is not None and level >= logging.lastResort.level and logger.isEnabledFor(level):
            # As `logging` does, except that it hides a failure.
            record = logger.makeRecord(logger.name, level, __file__, 0, f"clusterenv: {text}", (), None)
            if logger.filter(record):
                _write(record.getMessage())


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
    with _lost.counted():
        _write(text)


def _write(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _show(log: logging.Logger, plain: str, text: str, *, only_on_terminal: bool) -> None:
    with _lost.counted():
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info(text)
            return
        silenced = log.manager.disable >= logging.INFO or any(
            one.disabled or one.level > logging.INFO for one in (log, logger)
        )
        if not silenced and sys.stderr is not None and (not only_on_terminal or sys.stderr.isatty()):
            _write(plain)


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
