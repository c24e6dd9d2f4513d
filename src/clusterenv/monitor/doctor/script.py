"""Rules about the script as a whole: who waits for whom, rows that are lost, the start. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from clusterenv.monitor.doctor import thresholds as at
from clusterenv.monitor.doctor.findings import Cause, Finding, Severity, Subject
from clusterenv.monitor.doctor.window import Window, bounded, median

__all__ = ["invalid_rows", "learner", "lockstep", "policy", "starting"]


_LARGE_POLICY = "use a smaller network, more slots per worker, or act='head' with a GPU"


def learner(window: Window) -> Iterator[Finding]:
    """Find workers that are idle while the script does something else."""
    outside = [s for s in window.samples if not s.call]
    last = window.last
    if last.is_over or not outside or not _collects(window):
        return
    busy = sum(any(w.is_busy for w in s.workers) for s in outside) / len(outside)
    if busy > at.OVERLAP:
        return
    share = len(outside) / len(window.samples)
    is_long = not last.call and last.call_s >= at.LEARNER_S
    if is_long or (share >= at.LEARNER_SHARE and len(window.samples) >= at.PROFILE):
        what = f"for {last.call_s:.0f} s" if is_long else f"{share:.0%} of the time"
        yield Finding(
            Severity.ADVICE,
            Cause.LEARNER,
            Subject(),
            f"the workers are idle {what}, while the learner works",
            "collect meanwhile: rollout(prefetch=True) or stream(); more workers would not help",
            {"learner_share": round(share, 2)},
            lost=bounded(share),
        )


def _collects(window: Window) -> bool:
    """Return whether the script collects rollouts: in a script that steps, its own policy is part of each step."""
    return bool(window.fragments) or any(s.call in ("rollout", "stream") for s in window.samples)


def policy(window: Window) -> Iterator[Finding]:
    """Find policies that take more of the workers' time than their environments do."""
    if not window.fragments:  # a very large one is seen long before its first fragment is done
        yield from _policy_seen(window)
        return
    share = median(s.point.policy for s in window.recent)
    waiting = median(s.point.waiting for s in window.recent) or 0.0
    if share is None or len(window.recent) < at.FEW or waiting >= 1:
        return
    of_work = share / (1 - waiting)
    step_s = median(pace.policy_s for pace in window.paces.values())
    if of_work >= at.POLICY_SHARE and share >= at.POLICY_SHARE / 2 and step_s is not None and step_s >= at.POLICY_S:
        runtime = window.last.policy.get("runtime")
        export = "; install onnxruntime, which runs it faster than torch" if runtime == "torch" else ""
        yield Finding(
            Severity.ADVICE,
            Cause.POLICY,
            Subject(),
            f"the policy takes {of_work:.0%} of the workers' working time, {step_s * 1000:.3g} ms per step",
            f"{_LARGE_POLICY}{export}",
            {"policy_share": round(of_work, 2), "policy_step_s": round(step_s, 5)},
            lost=bounded(share),
            workers=tuple(window.workers),
        )


def _policy_seen(window: Window) -> Iterator[Finding]:
    """Judge by where busy workers are seen."""
    calls = ("rollout", "stream")
    phases = [w.phase for s in window.recent if s.call in calls for w in s.workers if w.is_busy and w.phase]
    share = phases.count("policy") / len(phases) if phases else 0.0
    if len(phases) >= at.PROFILE * len(window.workers) and share >= at.POLICY_SHARE:
        yield Finding(
            Severity.ADVICE,
            Cause.POLICY,
            Subject(),
            f"the workers are in the policy {share:.0%} of the time, and their first fragment is not done yet",
            _LARGE_POLICY,
            {"policy_share": round(share, 2)},
            lost=bounded(share),
            workers=tuple(window.workers),
        )


def lockstep(window: Window, explained: Collection[int]) -> Iterator[Finding]:
    """Find rollouts in which all workers wait for one that is slower.

    Args:
        explained: workers that are slow for a reason that is known already.
    """
    if window.is_stream or window.in_call < 0.5 or not any(s.call == "rollout" for s in window.samples):
        return
    times = {
        worker: value
        for worker in window.workers
        if (value := window.worker_median(worker, lambda w: w.step_s)) is not None and value > 0
    }
    waiting = median(s.point.waiting for s in window.recent)
    usual = median(times.values())
    if len(times) < 2 or not usual or waiting is None or waiting < at.LOCKSTEP_WAITING:
        return
    slowest = max(times, key=lambda worker: times[worker])
    others = median(value for worker, value in times.items() if worker != slowest) or usual
    factor = times[slowest] / others
    if slowest not in explained and factor >= at.LOCKSTEP_FACTOR and times[slowest] - others >= at.SLOW_S / 10:
        yield Finding(
            Severity.ADVICE,
            Cause.LOCKSTEP,
            Subject("worker", slowest),
            f"every rollout waits for worker {slowest}, which is {factor:.1f}x slower; the workers wait {waiting:.0%}",
            "rollout(balance=True) gives it fewer steps; stream() or deadline_s do not wait for it",
            {"factor": round(factor, 1), "waiting_share": round(waiting, 2)},
            lost=1 - 1 / factor,
            workers=(slowest,),
        )


def invalid_rows(window: Window) -> Iterator[Finding]:
    invalid = window.growth(lambda s: s.point.invalid_rows)
    total = invalid + window.growth(lambda s: s.point.steps)
    if invalid and invalid / total >= at.INVALID_SHARE:
        yield Finding(
            Severity.WARNING,
            Cause.INVALID_ROWS,
            Subject(),
            f"{invalid / total:.1%} of the rows of the last minute are invalid ({invalid:.0f} rows)",
            "use the mask `valid` in the loss; events() says which environments were lost",
            {"invalid_rows": int(invalid), "share": round(invalid / total, 4)},
            lost=invalid / total,
        )


def starting(window: Window) -> Iterator[Finding]:
    """Say what a run that has made no step yet waits for."""
    last = window.last
    if last.is_over or last.point.steps or window.fragments or any(value > 0 for value in last.step_s):
        return
    missing = [node.node for node in last.nodes if node.state == "missing"]
    building = [w.worker for w in last.workers if w.is_busy and w.phase == "init"]
    age_s = max(0.0, last.point.time_s - window.info.began_at)
    if missing or building:
        what = f"{len(missing)} of {len(last.nodes)} nodes have not joined" if missing else ""
        build = f"{len(building)} of {len(last.workers)} workers build their environments" if building else ""
        yield Finding(
            Severity.ADVICE,
            Cause.STARTING,
            Subject(),
            f"the run has been starting for {age_s:.0f} s: {' and '.join(filter(None, (what, build)))}",
            "wait; building takes as long as the environments' constructors and imports",
            {"age_s": round(age_s, 1), "missing_nodes": len(missing), "building_workers": len(building)},
        )
