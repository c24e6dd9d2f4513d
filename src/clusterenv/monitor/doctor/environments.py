"""Rules about what environments do beside computing: they wait, they keep memory, they start processes. Pure.

These concern all workers alike as often as one, so they compare with what a healthy environment does, not with others.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from clusterenv.monitor.doctor import thresholds as at
from clusterenv.monitor.doctor.findings import Cause, Evidence, Finding, Severity, Subject
from clusterenv.monitor.doctor.window import Window, bounded, median
from clusterenv.monitor.sample import WorkerSample

__all__ = ["child_processes", "growing_memory", "waiting_environments"]


def waiting_environments(window: Window, skipped: Collection[int]) -> Iterator[Finding]:
    """Find environments that take long because they wait, all of them alike.

    Args:
        skipped: workers that are slow for a reason that is known already.
    """
    workers = [worker for worker in window.workers if worker not in skipped]
    step_s = median(window.step_s().values())
    if not workers or len(workers) < len(window.workers) / 2 or step_s is None or step_s < at.SLOW_S:
        return
    wanted = [_wanted(window, worker) for worker in workers]
    shares = [_share_in_steps(window, worker) for worker in workers]
    known = [cpu for cpu in wanted if cpu is not None]
    if len(known) < len(workers) or any(share < at.WAITING_STEPS for share in shares):
        return
    computes = median(known) or 0.0
    if max(known) < at.WAITING_CPU:
        yield Finding(
            Severity.ADVICE,
            Cause.ENV_WAITS,
            Subject(),
            f"the workers are in step() {median(shares) or 0.0:.0%} of the time ({step_s * 1000:.3g} ms each), but "
            f"compute only {computes:.0%} of it: the environments wait",
            f"`clusterenv stack {window.workers[workers[0]].slots[0]}` shows the line (a sleep, a lock, I/O, another "
            "process); if they have to wait, more workers than cores pay: Local(workers=...)",
            {"step_s": round(step_s, 5), "worker_cpu": round(computes, 2)},
            lost=bounded(1 - computes),
            workers=tuple(workers),
        )


def _wanted(window: Window, worker: int) -> float | None:
    """Return the share of the time in which a worker, or a process that it started, ran or wanted to run."""
    cpu = window.worker_median(worker, lambda w: w.cpu)
    here = window.here
    if here is not None and worker in here.workers:
        process = here.workers[worker]
        cpu = process.cpu if cpu is None else cpu
        children = sum(cores for _, cores in here.children.get(worker, ()))
        return None if cpu is None else cpu + (process.queued or 0.0) + children
    return cpu


def _share_in_steps(window: Window, worker: int) -> float:
    measured = window.worker_median(worker, lambda w: w.environment)
    if measured is not None:
        return measured
    seen = [w for s in window.recent for w in s.workers if w.worker == worker and (w.is_busy or s.call == "step")]
    if len(seen) < at.PROFILE:
        return 0.0
    return sum(w.phase == "step" for w in seen) / len(window.recent)


# -- memory -------------------------------------------------------------------------------------------------------


def growing_memory(window: Window) -> Iterator[Finding]:
    """Find workers whose memory grows so steadily that it will fill the machine."""
    if window.last.point.time_s - window.info.began_at < at.WARM_S:  # imports, assets, caches
        return
    rates = {
        worker: rate
        for worker in window.workers
        if (rate := _growth(window.of_worker(worker, window.samples), window.span_s())) is not None
    }
    for node in window.nodes.values():
        own = {worker: rates[worker] for worker in window.workers_on(node.node) if worker in rates}
        host = node.host
        if not own or host is None or host.memory_total is None or host.memory_used is None:
            continue
        left_s = (host.memory_total - host.memory_used) / sum(own.values())
        if left_s > at.FULL_S:
            continue
        is_all = len(own) > 1 and len(own) == len(window.workers)
        for workers in [tuple(own)] if is_all else [(worker,) for worker in own]:
            yield _grows(window, workers, sum(own[worker] for worker in workers), left_s)


def _growth(samples: list[WorkerSample], span_s: float) -> float | None:
    """Return by how many bytes a second a worker's memory grows; None: it does not, or not steadily."""
    if len({sample.pid for sample in samples}) != 1:
        return None
    sizes = [sample.memory for sample in samples if sample.memory is not None]
    if len(sizes) < at.PROFILE or span_s <= 0:
        return None
    rises = sum(after > before for before, after in itertools.pairwise(sizes))
    grown = sizes[-1] - sizes[0]
    is_steady = rises >= at.ONE_PLACE * (len(sizes) - 1) and grown >= at.GROWN_BYTES
    return grown / span_s if is_steady else None


def _grows(window: Window, workers: tuple[int, ...], rate: float, left_s: float) -> Finding:
    is_one = len(workers) == 1
    first, last = window.workers[workers[0]].slots
    which = (f"slot {first}" if first == last else f"one of slots {first}-{last}") if is_one else "the environments"
    size = sum(window.workers[worker].memory or 0 for worker in workers)
    who = f"worker {workers[0]}" if is_one else "all workers"
    return Finding(
        Severity.WARNING,
        Cause.MEMORY_GROWS,
        Subject("worker", workers[0]) if is_one else Subject(),
        f"the memory of {who} grows by {rate / 1e6:.1f} MB/s: the machine's is full in about {left_s / 60:.0f} min",
        f"{which} keeps what it should release (a list, a cache, a renderer, infos): look with memray or tracemalloc",
        {"bytes_per_s": round(rate), "memory_bytes": size, "full_in_s": round(left_s)},
        lost=bounded(1 - left_s / at.FULL_S),  # the sooner it is full, the sooner all is lost
        workers=workers,
    )


# -- processes ----------------------------------------------------------------------------------------------------


def child_processes(window: Window) -> Iterator[Finding]:
    """Find processes of environments that take the cores from the workers."""
    here = window.here
    if here is None or here.busy_cores is None or here.busy_cores < at.BUSY * here.cores:
        return
    used = {worker: sum(cores for _, cores in its) for worker, its in here.children.items()}
    total = sum(used.values())
    queued = [process.queued for process in here.workers.values() if process.queued is not None]
    least = max(at.OTHERS_CORES, at.OTHERS_SHARE * here.cores)
    if here.own_cores is not None:  # beside other programs, they take the cores that are left for the run
        least = min(least, max(at.CHILDREN_CORES, at.CHILDREN_SHARE * here.own_cores))
    if total < least or max(queued, default=1.0) < at.QUEUED:
        return
    most = max(used, key=lambda worker: used[worker])
    is_one = len(window.workers) > 1 and used[most] >= at.ONE_PLACE * total
    names: dict[str, float] = {}
    for its in here.children.values():
        for name, cores in its:
            names[name] = names.get(name, 0.0) + cores
    listed = ", ".join(f"{name} ({cores:.1f})" for name, cores in sorted(names.items(), key=lambda item: -item[1])[:3])
    evidence: Evidence = {"children_cores": round(total, 2), "busy_cores": round(here.busy_cores, 1)}
    whose = f"environments of worker {most}" if is_one else "the environments"
    yield Finding(
        Severity.WARNING,
        Cause.CHILD_PROCESSES,
        Subject("worker", most) if is_one else Subject(),
        f"processes that {whose} started take {total:.1f} of {here.cores} cores: {listed}",
        "end them in close() and before reset() starts others; a simulator that is a process of its own needs a core "
        "too: use fewer workers",
        {**evidence, "cores": here.cores},
        lost=bounded(max(queued, default=total / here.cores)),
        workers=tuple(window.workers),
    )
