"""Rules about workers that do nothing: stopped, in one call for ever, failing again and again, absent. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from clusterenv.monitor.doctor import thresholds as at
from clusterenv.monitor.doctor.findings import Cause, Evidence, Finding, Severity, Subject
from clusterenv.monitor.doctor.window import Window
from clusterenv.monitor.sample import EventRecord, WorkerSample

__all__ = ["crashes", "stopped_head", "stuck_workers"]

_LOSSES = ("env_error", "worker_lost", "env_lost")


def stopped_head(pid: int, state: str) -> Iterator[Finding]:
    if state in ("T", "t"):
        yield Finding(
            Severity.ERROR,
            Cause.HEAD_STOPPED,
            Subject(),
            f"the script (process {pid}) is stopped{_by(state)}",
            _continue(state, pid),
            {"process_state": state},
            lost=1.0,
        )


def stuck_workers(window: Window) -> Iterator[Finding]:
    """Find workers that have something to do and make no progress: their process is stopped, or a call hangs."""
    for worker in window.workers.values():
        process = window.here.workers.get(worker.worker) if window.here is not None else None
        if process is not None and process.is_stopped:
            yield _stopped(window, worker, process.pid, process.state)
            continue
        stuck_s = _stuck_s(window, worker)
        if worker.state == "killed" or not worker.is_busy or stuck_s <= 0:
            continue
        among = window.here.stopped.get(worker.node, []) if window.here is not None else []
        if among and stuck_s >= at.STOPPED_S and worker.pid is None:
            yield _stopped(window, worker, among[0], "T")
        elif stuck_s >= _limit_s(window, worker):
            traced = _long_call(window, worker, stuck_s)
            has_no_cpu = worker.cpu is not None and worker.cpu < at.NO_CPU
            if traced is None and (stuck_s > at.SILENT_TRACE_S or (worker.phase == "policy" and has_no_cpu)):
                yield _stopped(window, worker, worker.pid, "")
            else:
                yield _hangs(window, worker, stuck_s, traced)


def _stuck_s(window: Window, worker: WorkerSample) -> float:
    """Return for how long a worker that was busy all the time showed no progress.

    An answer that the head has not read yet is not a hang, nor is a worker that was idle until a moment ago.
    """
    now_s = window.last.point.time_s
    since_s = now_s - worker.stuck_s
    if any(f.worker == worker.worker and f.arrived_at > since_s + 0.5 for f in window.fragments):
        return 0.0
    if _has_long_call(window, worker):
        return worker.stuck_s
    busy_s = now_s - window.busy_since(worker)
    if window.is_stream:
        return min(worker.stuck_s, busy_s, window.listened_until() - since_s)
    # The others wait for it: rows that are delivered show that it goes on, even if each step looks like the last.
    return min(worker.stuck_s, busy_s, now_s - window.stepped_at()) if window.last.call else 0.0


def _limit_s(window: Window, worker: WorkerSample) -> float:
    if worker.phase in ("init", "call"):
        return at.BUILD_HANG_S
    if _is_remote(window, worker) and worker.phase != "reset" and not _has_long_call(window, worker):
        limit_s = at.REMOTE_HANG_S
    else:
        limit_s = at.HANG_S
    steps = window.last.step_s
    usual_s = steps[worker.slot] if worker.slot is not None and 0 <= worker.slot < len(steps) else 0.0
    return max(limit_s, at.HANG_FACTOR * usual_s)


def _is_remote(window: Window, worker: WorkerSample) -> bool:
    node = window.nodes.get(worker.node)
    return node is not None and node.sent_bytes + node.received_bytes > 0


def _has_long_call(window: Window, worker: WorkerSample) -> bool:
    return _long_call(window, worker, worker.stuck_s) is not None


def _long_call(window: Window, worker: WorkerSample, stuck_s: float) -> EventRecord | None:
    """Return the warning that shows where this call is; it came after the call had begun."""
    since_s = window.last.point.time_s - stuck_s
    its = (e for e in reversed(window.events) if e.kind == "long_call" and e.worker == worker.worker)
    return next((event for event in its if event.time_s >= since_s), None)


def _stopped(window: Window, worker: WorkerSample, pid: int | None, state: str) -> Finding:
    evidence: Evidence = {"stuck_s": round(worker.stuck_s, 1)}
    if state:
        evidence["process_state"] = state
    if worker.cpu is not None:
        evidence["cpu"] = round(worker.cpu, 3)
    who = f"worker {worker.worker}" + ("" if pid is None else f" (process {pid})")
    what = f"is stopped{_by(state)}" if state else "uses no CPU and does not answer signals: its process is stopped"
    return Finding(
        Severity.ERROR,
        Cause.WORKER_STOPPED,
        Subject("worker", worker.worker),
        f"{who} {what}; its slots {_span(worker)} make no progress",
        _continue(state, pid),
        evidence,
        lost=window.lost_by_worker(1.0),
        workers=(worker.worker,),
    )


def _by(state: str) -> str:
    return " by a debugger" if state == "t" else " (SIGSTOP or Ctrl-Z)"


def _continue(state: str, pid: int | None) -> str:
    if state == "t":
        return "continue it in the debugger, or detach the debugger"
    return (
        f"continue it: kill -CONT {'PID' if pid is None else pid}; find out what stopped it (a batch system, a shell)"
    )


def _hangs(window: Window, worker: WorkerSample, stuck_s: float, traced: EventRecord | None) -> Finding:
    phase = worker.phase or "one call"
    place = traced.reason.partition(" at ")[2] if traced is not None else ""
    evidence: Evidence = {"stuck_s": round(stuck_s, 1), "phase": phase}
    if worker.cpu is not None:
        evidence["cpu"] = round(worker.cpu, 2)
    slot = worker.slot
    who = f"the environment of slot {slot}" if slot is not None else "a call"
    if phase == "policy":
        who = "the policy"
    where = f" of worker {worker.worker}"
    return Finding(
        Severity.ERROR,
        Cause.ENV_HANGS,
        Subject("worker", worker.worker) if slot is None or phase == "policy" else Subject("slot", slot),
        f"{who}{where} has not returned from {phase} for {stuck_s:.0f} s" + (f": {place}" if place else ""),
        f"look at that line; Recovery({_option(phase)}=...) replaces the worker after a shorter time"
        if place
        else f"see where it is: clusterenv stack {worker.slots[0] if slot is None else slot}; "
        f"Recovery({_option(phase)}=...) replaces the worker",
        evidence,
        lost=window.lost_by_worker(1.0),
        workers=(worker.worker,),
        detail=traced.detail if traced is not None else "",
    )


def _option(phase: str) -> str:
    return f"{phase}_timeout_s" if phase in ("init", "reset") else "step_timeout_s"


def _span(worker: WorkerSample) -> str:
    first, last = worker.slots
    return str(first) if first == last else f"{first}-{last}"


# -- losses -------------------------------------------------------------------------------------------------------


def crashes(window: Window) -> Iterator[Finding]:
    """Find slots and workers that failed: in a loop, or once just now, or whose process is missing."""
    by_subject: defaultdict[Subject, list[EventRecord]] = defaultdict(list)
    for event in window.events:
        if event.kind in _LOSSES and event.time_s >= window.now_s - at.CRASH_WINDOW_S:
            by_subject[_subject(event)].append(event)
    failed: set[int] = set()
    singles: list[EventRecord] = []
    for subject, losses in by_subject.items():
        last, age_s = losses[-1], window.now_s - losses[-1].time_s
        if _is_loop(losses) and age_s <= at.CRASH_RECENT_S:
            failed |= {w for w in (last.worker, _worker(window, subject)) if w is not None}
            yield _loop(window, subject, losses)
        elif age_s <= at.LOSS_RECENT_S:
            singles.append(last)
    for event in singles:
        if event.worker not in failed:
            yield _loss(window, event)
            failed |= {event.worker} if event.worker is not None else set()
    if window.last.is_over:
        return
    for worker in window.workers.values():
        if worker.state != "running" and worker.worker not in failed and worker.losses:
            yield _absent(window, worker)


def _subject(event: EventRecord) -> Subject:
    if event.kind == "env_error" and event.slots:
        return Subject("slot", event.slots[0])
    return Subject("worker", event.worker) if event.worker is not None else Subject("slot", min(event.slots, default=0))


def _worker(window: Window, subject: Subject) -> int | None:
    if subject.kind == "worker" or subject.number is None:
        return subject.number
    return window.worker_of(subject.number)


def _is_loop(losses: list[EventRecord]) -> bool:
    alike = len({re.sub(r"0x[0-9a-f]+|[\d.]+", "", event.reason) for event in losses[-2:]}) == 1
    return len(losses) >= at.CRASHES or (len(losses) >= 2 and alike)


def _loop(window: Window, subject: Subject, losses: list[EventRecord]) -> Finding:
    last, worker = losses[-1], _worker(window, subject)
    span_s = losses[-1].time_s - losses[0].time_s
    evidence: Evidence = {"losses": len(losses), "within_s": round(span_s, 1)}
    for name in ("phase", "seed", "incarnation", "step"):
        value = getattr(last, name)
        if value is not None:
            evidence[name] = value
    share = _invalid_share(window)
    if share:
        evidence["invalid_rows_share"] = round(share, 4)
    return Finding(
        Severity.ERROR,
        Cause.CRASH_LOOP,
        subject,
        f"{subject} failed {len(losses)} times in {span_s:.0f} s, the last time with: {_line(last.reason)}",
        _repair(last),
        evidence,
        lost=max(share, window.lost_by_worker(at.MATTERS)),
        workers=() if worker is None else (worker,),
        detail=last.detail,
    )


def _loss(window: Window, event: EventRecord) -> Finding:
    subject = _subject(event)
    worker = _worker(window, subject)
    return Finding(
        Severity.WARNING,
        Cause.LOSS,
        subject,
        f"{subject} failed {window.now_s - event.time_s:.0f} s ago: {_line(event.reason)}",
        _repair(event),
        {"losses": 1, "phase": event.phase or "unknown"},
        workers=() if worker is None else (worker,),
        detail=event.detail,
    )


def _absent(window: Window, worker: WorkerSample) -> Finding:
    reason = next(
        (why for slot, why in window.last.last_loss.items() if worker.slots[0] <= slot <= worker.slots[1]), ""
    )
    return Finding(
        Severity.ERROR,
        Cause.WORKER_ABSENT,
        Subject("worker", worker.worker),
        f"worker {worker.worker} has no process ({worker.state})" + (f": {_line(reason)}" if reason else ""),
        "it is started again after a pause that doubles with each loss (Recovery(backoff_s=...)); see events()",
        {"losses": worker.losses, "state": worker.state},
        lost=window.lost_by_worker(1.0),
        workers=(worker.worker,),
    )


def _repair(event: EventRecord) -> str:
    reason = event.reason.lower()
    if event.kind != "env_error" and ("signal 9" in reason or "sigkill" in reason):
        return "something killed it: the kernel if memory ran out (dmesg, memory limit of the job or pod), or a person"
    if "hung for" in reason:
        return "the call took longer than the timeout of Recovery: repair the environment, or allow more time"
    if event.seed is not None:
        return f"replay it: build this environment alone, reset(seed={event.seed}), and step until it fails"
    return "repair the environment; the last lines that its process wrote are below, if there are any"


def _line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:200]}..."


def _invalid_share(window: Window) -> float:
    invalid = window.growth(lambda s: s.point.invalid_rows)
    return invalid / (invalid + window.growth(lambda s: s.point.steps)) if invalid else 0.0
