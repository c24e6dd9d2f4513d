"""Rules about events that are findings by themselves: what could not be written, sent or found. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from clusterenv.monitor.doctor.findings import Cause, Finding, Severity, Subject
from clusterenv.monitor.doctor.window import Window
from clusterenv.monitor.sample import EventRecord

__all__ = ["recorded"]

_FRESH_S = 600.0
"""Older events are history; `events()` still has them."""


class _Meaning(NamedTuple):
    cause: Cause
    advice: str
    ended_by: str = ""
    """Event after which it is over."""


_EVENTS = {
    "log_not_written": _Meaning(Cause.NOT_WRITTEN, "free the disk of the log, or give the script a stderr"),
    "journal_not_written": _Meaning(
        Cause.NOT_WRITTEN, "free the disk of the journal (resume=...): a restart may reuse seeds until it is written"
    ),
    "scheduler_lost": _Meaning(
        Cause.SCHEDULER_LOST,
        "check it by hand (squeue, kubectl get pods): until it answers, no node is replaced",
        "scheduler_back",
    ),
    "missing_key": _Meaning(Cause.MISSING_KEY, "check the spelling of action_mask and info_keys"),
    "info_not_sent": _Meaning(Cause.MISSING_KEY, "put plain numbers, strings and arrays into infos"),
    "weights_damaged": _Meaning(Cause.DAMAGED, "if it repeats, check the memory and network of that machine"),
    "weights_refused": _Meaning(Cause.DAMAGED, "see the reason; the workers keep their old weights until then"),
    "jobs_left": _Meaning(Cause.NODE_LOST, "remove them: clusterenv gc"),
    "nodes_not_resumed": _Meaning(Cause.NODE_LOST, "new nodes are started instead; clusterenv gc removes the old jobs"),
}


def recorded(window: Window) -> Iterator[Finding]:
    for kind, meaning in _EVENTS.items():
        its = [event for event in window.events if event.kind == kind and event.time_s >= window.now_s - _FRESH_S]
        if not its or any(e.kind == meaning.ended_by and e.number > its[-1].number for e in window.events):
            continue
        count = max(len(its), window.last.event_counts.get(kind, 0))
        yield _finding(its[-1], meaning, count)


def _finding(event: EventRecord, meaning: _Meaning, count: int) -> Finding:
    times = f" ({count} times)" if count > 1 else ""
    return Finding(
        Severity.WARNING,
        meaning.cause,
        Subject("slot", event.slots[0]) if len(event.slots) == 1 else Subject(),
        f"{event.reason.strip().partition(chr(10))[0] or event.kind}{times}",
        meaning.advice,
        {"event": event.kind, "count": count},
        detail=event.detail,
    )
