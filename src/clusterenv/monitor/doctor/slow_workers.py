"""Rules about workers that are slow: one environment, resets, a CPU quota, or everything on one worker. Pure.

A worker's progress is sampled once a second: where a busy worker is found most often is where its time goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from clusterenv.monitor.doctor import thresholds as at
from clusterenv.monitor.doctor.findings import Cause, Evidence, Finding, Severity, Subject
from clusterenv.monitor.doctor.window import Window, median
from clusterenv.monitor.sample import WorkerSample

__all__ = ["slow_environments", "slow_resets", "slow_workers", "throttled_workers"]


class _Profile(NamedTuple):
    """In how many recent samples a worker was busy, and where it was."""

    total: int
    places: Counter[tuple[int | None, str]]
    is_certain: bool
    """It was busy; else it may have waited, and shown the place where it was last."""

    def share(self, phase: str) -> float:
        return self.seen(phase) / self.total if self.total else 0.0

    def seen(self, phase: str) -> int:
        return sum(times for (_, its), times in self.places.items() if its == phase)


def _profile(window: Window, worker: int) -> _Profile:
    # Steps of all slots at once open no request that could be seen: within `step`, a worker may be busy.
    pairs = [(s.call == "step", w) for s in window.recent for w in s.workers if w.worker == worker]
    busy = [w for is_stepping, w in pairs if (w.is_busy or is_stepping) and w.phase]
    return _Profile(len(busy), Counter((w.slot, w.phase) for w in busy), all(w.is_busy for w in busy))


# -- one environment ----------------------------------------------------------------------------------------------


def slow_environments(
    window: Window, skipped: Collection[int], resetting: Collection[int], busy_nodes: Collection[int]
) -> Iterator[Finding]:
    """Find environments whose steps take much longer than those of the others.

    Args:
        skipped: workers that are slow for a reason that is known already.
        resetting: workers that spend their time in resets.
        busy_nodes: nodes without a free core, where steps are interrupted.
    """
    times = window.step_s()
    found: set[int] = set()
    for slot, own_s in times.items():
        worker = window.worker_of(slot)
        usual_s = median(other_s for other, other_s in times.items() if other != slot)
        if worker is None or worker in skipped or not usual_s:
            continue
        is_busy = window.workers[worker].node in busy_nodes
        factor, extra_s = own_s / usual_s, own_s - usual_s
        lost = _lost_by(window, worker, extra_s)
        is_slow = factor >= (at.SLOW_FACTOR_BUSY if is_busy else at.SLOW_FACTOR)
        if is_slow and extra_s >= at.SLOW_S and lost >= at.MATTERS and _is_confirmed(window, worker, extra_s):
            found.add(worker)
            text = f"a step of slot {slot} (worker {worker}) takes {_ms(own_s)}, {factor:.0f}x the median of the others"
            evidence: Evidence = {
                "step_s": round(own_s, 5),
                "median_step_s": round(usual_s, 6),
                "factor": round(factor, 1),
            }
            yield _slow_env(window, slot, worker, text, evidence, lost)
    for worker in window.workers:
        if worker not in found and worker not in skipped and worker not in resetting:
            yield from _by_profile(window, worker, times)


def _slow_env(window: Window, slot: int, worker: int, text: str, evidence: Evidence, lost: float) -> Finding:
    cpu = window.worker_median(worker, lambda w: w.cpu)
    if cpu is not None:
        evidence["worker_cpu"] = round(cpu, 2)
    hint = "" if window.is_stream else "; until then, stream(), balance=True or deadline_s let the others go on"
    is_waiting = cpu is not None and cpu < 0.5
    does = f"it waits (sleep, I/O, another process): `clusterenv stack {slot}`" if is_waiting else "profile its step()"
    return Finding(
        Severity.WARNING,
        Cause.SLOW_ENV,
        Subject("slot", slot),
        text,
        f"look at this environment's step(): {does}{hint}",
        evidence,
        lost=window.lost_by_worker(lost),
        workers=(worker,),
    )


def _lost_by(window: Window, worker: int, extra_s: float) -> float:
    """Return the share of a worker's time for one step of its slots that `extra_s` is."""
    pace = window.paces.get(worker)
    if pace is not None:
        total_s = pace.environment_s + pace.policy_s
    else:
        first, last = window.workers[worker].slots
        times = window.step_s()
        total_s = sum(times.get(slot, 0.0) for slot in range(first, last + 1))
    return min(1.0, extra_s / total_s) if total_s > 0 else 0.0


def _is_confirmed(window: Window, worker: int, extra_s: float) -> bool:
    """Return whether the worker's fragments, in which every step is timed, show the time that some steps took."""
    pace = window.paces.get(worker)
    return pace is None or pace.environment_s >= at.CONFIRMED * extra_s


def _by_profile(window: Window, worker: int, times: dict[int, float]) -> Iterator[Finding]:
    """Find an environment in which its worker nearly always is, before one of its slow steps has been timed."""
    first, last = window.workers[worker].slots
    profile, pace = _profile(window, worker), window.paces.get(worker)
    if last == first or profile.total < at.PROFILE:
        return
    (slot, phase), seen = profile.places.most_common(1)[0]
    is_in_env = pace is None or pace.environment_s * 2 >= pace.environment_s + pace.policy_s
    # While nothing runs, a worker shows the last place where it was: only fragments tell that from working there.
    is_waiting = pace is not None and pace.gap_s > pace.work_s
    if not profile.is_certain and slot == last:  # where a worker that has stepped all its slots was last
        return
    if slot is None or phase != "step" or seen < at.ONE_PLACE * profile.total or slot in times:
        return
    if is_in_env and not is_waiting and not _moves_bytes(window, worker):
        share = seen / profile.total
        text = f"worker {worker} is in step of slot {slot} in {seen} of {profile.total} samples"
        yield _slow_env(window, slot, worker, text, {"samples": seen, "share": round(share, 2)}, share)


def _moves_bytes(window: Window, worker: int) -> bool:
    node = window.nodes.get(window.workers[worker].node)
    return node is not None and node.sent_bytes + node.received_bytes > 0


# -- resets -------------------------------------------------------------------------------------------------------


def slow_resets(window: Window, skipped: Collection[int]) -> Iterator[Finding]:
    """Find workers that spend much of their time in resets."""
    found: dict[int, tuple[float, Counter[int | None]]] = {}
    for worker in window.workers:
        profile = _profile(window, worker)
        if worker in skipped or profile.total < at.PROFILE or profile.seen("reset") < at.FEW:
            continue
        if profile.share("reset") >= at.RESET_SHARE:
            slots = Counter({slot: times for (slot, phase), times in profile.places.items() if phase == "reset"})
            found[worker] = profile.share("reset"), slots
    is_spread = all(slots.most_common(1)[0][1] < at.ONE_PLACE * sum(slots.values()) for _, slots in found.values())
    is_all = len(found) > 1 and len(found) == len(window.workers)
    if is_all and (is_spread or len(found) > 2):  # a property of the environment, not of one of them
        share = median(share for share, _ in found.values()) or 0.0
        yield _slow_reset(Subject(), tuple(found), share, share, "the workers")
        return
    for worker, (share, slots) in found.items():
        slot, times = slots.most_common(1)[0]
        is_one = slot is not None and times >= at.ONE_PLACE * sum(slots.values())
        subject = Subject("slot", slot) if is_one else Subject("worker", worker)
        whose = f"worker {worker}" + (f", nearly always of slot {slot}," if is_one else "")
        yield _slow_reset(subject, (worker,), share, window.lost_by_worker(share), whose)


def _slow_reset(subject: Subject, workers: tuple[int, ...], share: float, lost: float, whose: str) -> Finding:
    return Finding(
        Severity.WARNING,
        Cause.SLOW_RESET,
        subject,
        f"resets take {share:.0%} of the time of {whose}".rstrip(","),
        "make reset() cheaper (cache assets, reuse the simulator), or episodes longer; stream() lets others go on",
        {"reset_share": round(share, 2)},
        lost=lost,
        workers=workers,
    )


# -- CPU quotas ---------------------------------------------------------------------------------------------------


def throttled_workers(window: Window) -> Iterator[Finding]:
    """Find workers that the CPU quota of their control group holds back."""
    throttled: dict[int, tuple[float, float | None]] = {}
    for node in window.nodes.values():
        share = window.of_host(node.node, lambda n: n.host.throttled if n.host else None)
        here = window.here.workers if window.here is not None else {}
        workers = window.workers_on(node.node)
        known = [w for w in workers if w in here and here[w].throttled is not None]
        own = {w: here[w] for w in known if (here[w].throttled or 0.0) >= at.THROTTLED}
        if share is not None and share >= at.THROTTLED and len(own) == len(known):
            yield _throttled(window, _node_subject(window, node.node), workers, share, None, "all workers there")
        elif len(own) == len(workers) > 1:
            shares, quotas = [p.throttled for p in own.values()], [p.quota for p in own.values()]
            subject = _node_subject(window, node.node)
            yield _throttled(window, subject, workers, median(shares) or 0.0, median(quotas), "all workers there")
        else:
            throttled |= {w: (p.throttled or 0.0, p.quota) for w, p in own.items()}
    for worker, (share, quota) in throttled.items():
        yield _throttled(window, Subject("worker", worker), [worker], share, quota, f"worker {worker}")


def _node_subject(window: Window, node: int) -> Subject:
    return Subject("node", node) if len(window.nodes) > 1 else Subject()


def _throttled(
    window: Window, subject: Subject, workers: list[int], share: float, quota: float | None, who: str
) -> Finding:
    evidence: Evidence = {"throttled_share": round(share, 2)}
    if quota is not None:
        evidence["quota_cpus"] = round(quota, 2)
    cpu = median(window.worker_median(worker, lambda w: w.cpu) for worker in workers)
    if cpu is not None:
        evidence["worker_cpu"] = round(cpu, 2)
    limit = "" if quota is None else f" of {quota:g} CPUs"
    # Throttled workers run for their quota's share of the time; without it, half of a throttled period is a guess.
    extra = 1 - min(1.0, quota) if quota is not None and len(workers) == 1 else share / 2
    is_all = len(workers) == len(window.workers)
    return Finding(
        Severity.WARNING,
        Cause.CPU_THROTTLED,
        subject,
        f"{who} {'is' if len(workers) == 1 else 'are'} throttled in {share:.0%} of the CPU periods by a quota{limit}",
        "raise the CPU limit of the job, pod or container"
        + (", or use fewer workers: Local(workers=...)" if len(workers) > 1 else ", or find out who put it there"),
        evidence,
        lost=min(1.0, extra) if is_all else window.lost_by_worker(extra),
        workers=tuple(workers),
    )


# -- everything on one worker -------------------------------------------------------------------------------------


def slow_workers(window: Window, skipped: Collection[int]) -> Iterator[Finding]:
    """Find workers that are slower than the others in environment and policy alike: their process gets less CPU."""
    for index in window.workers:
        environment = window.relative(index, lambda pace: pace.environment_s)
        policy = window.relative(index, lambda pace: pace.policy_s)
        pace = window.paces.get(index)
        if index in skipped or environment is None or policy is None or pace is None:
            continue
        factor = min(environment, policy)
        extra_s = (pace.environment_s + pace.policy_s) * (1 - 1 / factor) if factor > 1 else 0.0
        if (
            factor >= at.SLOW_WORKER_FACTOR
            and extra_s >= at.SLOW_S / 10
            and _is_alike(window, index, environment, policy)
        ):
            yield _slow_worker(window, window.workers[index], environment, policy, factor)


def _is_alike(window: Window, worker: int, environment: float, policy: float) -> bool:
    """Return whether everything is slow to the same degree, and not one environment.

    A process that often sleeps, as one with a slow environment does, finds its caches cold: its policy is slower too.
    But there the slots' own step times explain the worker's; with too little CPU, few of the timed steps are hit.
    """
    if environment > at.ALIKE * policy:
        return False
    times, (first, last) = window.step_s(), window.workers[worker].slots
    own = [times[slot] for slot in range(first, last + 1) if slot in times]
    if not own or sum(own) < window.paces[worker].environment_s / 2:
        return True
    return len(own) > 1 and max(own) < 2 * min(own)


def _slow_worker(window: Window, worker: WorkerSample, environment: float, policy: float, factor: float) -> Finding:
    evidence: Evidence = {"environment_factor": round(environment, 1), "policy_factor": round(policy, 1)}
    cpu = window.worker_median(worker.worker, lambda w: w.cpu)
    text = f"worker {worker.worker} is {factor:.1f}x slower than the others, in environment and policy"
    if cpu is not None:
        evidence["cpu"] = round(cpu, 2)
        text += f", and uses {cpu:.0%} of a core"
    process = window.here.workers.get(worker.worker) if window.here is not None else None
    if process is not None and process.queued is not None:
        evidence["waits_for_core"] = round(process.queued, 2)
    return Finding(
        Severity.WARNING,
        Cause.SLOW_WORKER,
        Subject("worker", worker.worker),
        text,
        "its process gets less CPU: look for a quota (cgroup), a lower priority (nice), pinning to a shared core, or a "
        "slower machine; balance=True or stream() let the others go on",
        evidence,
        lost=window.lost_by_worker(1 - 1 / factor),
        workers=(worker.worker,),
    )


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
