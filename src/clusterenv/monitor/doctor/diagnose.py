"""Say why a run is slow, stale or dead: `diagnose` turns samples, events and fragments into ranked findings. Pure.

Each rule is a function of a `Window`. A rule is told which workers are slow for a reason that is already known, so that
a symptom is not listed beside its cause; causes of different workers, and of different kinds, are all listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clusterenv.monitor.doctor import dead_workers, environments, links, machines, records, script, slow_workers
from clusterenv.monitor.doctor.findings import Cause, Finding, Severity
from clusterenv.monitor.doctor.here import Here
from clusterenv.monitor.doctor.window import Window
from clusterenv.monitor.sample import EventRecord, FragmentRecord, RunInfo, Sample

__all__ = ["concerning", "diagnose"]

_LEVELS = list(Severity)
_LOST = (Cause.NODE_PREEMPTED, Cause.NODE_LOST, Cause.NODE_REFUSED, Cause.PENDING, Cause.NODE_SILENT)
_INVALIDATES = (Cause.CRASH_LOOP, Cause.LOSS, Cause.NODE_LOST, Cause.NODE_PREEMPTED, Cause.WORKER_ABSENT)


def diagnose(
    info: RunInfo,
    samples: Sequence[Sample],
    events: Sequence[EventRecord],
    fragments: Sequence[FragmentRecord],
    here: Here | None = None,
) -> list[Finding]:
    """Return what is wrong with a run, the most important first; an empty list if nothing is.

    Args:
        samples: of the last minute, oldest first.
        here: the run's processes as the kernel of the head's machine shows them, if the caller runs there.
    """
    if not samples:
        return []
    window = Window(info, samples, events, fragments, here)
    recorded = list(records.recorded(window))
    if window.last.is_over:  # only what explains the end is left to say
        return ranked([*dead_workers.crashes(window), *recorded])
    gone = list(machines.absent_nodes(window))
    missing = _workers(f for f in gone if f.cause in _LOST)
    head = here.head if here is not None else None
    stopped = list(dead_workers.stopped_head(head.pid, head.state)) if head is not None else []
    stuck = [] if stopped else [f for f in dead_workers.stuck_workers(window) if not missing.issuperset(f.workers)]
    crashed = [f for f in dead_workers.crashes(window) if not missing.issuperset(f.workers) or not f.workers]
    throttled = list(slow_workers.throttled_workers(window))
    swapping = list(machines.swapping(window))
    children = list(environments.child_processes(window))
    crowded = [*children, *machines.oversubscribed(window)]
    dead = missing | _workers(stuck)
    held = dead | _workers([*throttled, *swapping])
    busy_nodes = {window.workers[w].node for w in _workers(crowded) if w in window.workers}
    resets = list(slow_workers.slow_resets(window, held))
    slow = list(slow_workers.slow_workers(window, held | _workers(resets)))
    slow += slow_workers.slow_environments(window, held | _workers(slow), _workers(resets), busy_nodes)
    waiting = environments.waiting_environments(window, held | _workers([*resets, *slow]))
    linked = list(links.slow_links(window, dead | _workers(crashed) | _workers(swapping)))
    growing = environments.growing_memory(window)
    stale = [f for f in links.stale_weights(window) if not f.workers or not _workers(linked).issuperset(f.workers)]
    found = [*stopped, *gone, *stuck, *crashed, *throttled, *swapping, *crowded, *resets, *slow, *waiting]
    found += [*growing, *linked, *stale, *links.never_published(window), *recorded]
    explained = _workers(f for f in found if f.severity is not Severity.ADVICE)
    if not any(f.cause in _INVALIDATES for f in found):
        found += script.invalid_rows(window)
    if not (dead or stopped or linked):
        found += script.lockstep(window, explained)
        found += script.learner(window)
        found += script.policy(window)
    if not any(f.cause is Cause.PENDING for f in found):
        found += script.starting(window)
    return ranked(found)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, errors first, then those that cost most; the same cause of a subject only once."""
    chosen: dict[object, Finding] = {}
    for finding in findings:
        chosen.setdefault((finding.cause, finding.subject), finding)
    return sorted(chosen.values(), key=lambda f: (f.severity is not Severity.ERROR, -f.lost, _LEVELS.index(f.severity)))


def concerning(findings: Iterable[Finding], worker: int) -> list[Finding]:
    """Return the findings that explain why this worker is slow, stale or dead."""
    return [finding for finding in findings if worker in finding.workers]


def _workers(findings: Iterable[Finding]) -> set[int]:
    return {worker for finding in findings for worker in finding.workers}
