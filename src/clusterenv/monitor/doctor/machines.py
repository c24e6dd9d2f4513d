"""Rules about machines and nodes: swap, cores, and what the scheduler and the network say about a node. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from clusterenv.monitor.doctor import thresholds as at
from clusterenv.monitor.doctor.findings import Cause, Evidence, Finding, Severity, Subject
from clusterenv.monitor.doctor.here import ProcessSample
from clusterenv.monitor.doctor.window import Window, median
from clusterenv.monitor.sample import EventRecord, NodeSample

__all__ = ["absent_nodes", "oversubscribed", "swapping"]

_REASONS = {
    "resources": "the cluster is full: wait, or ask for less (cores, memory, time), or for another partition",
    "priority": "other jobs are before this one: wait, or use a partition or QOS with more priority",
    "qos": "a limit of your QOS or account is reached: end other jobs, or ask for fewer nodes",
    "assoc": "a limit of your account is reached: end other jobs, or ask for fewer nodes",
    "limit": "a limit is reached: end other jobs, or ask for fewer nodes",
    "nodedown": "the wanted nodes are down: choose others (partition, nodelist)",
    "reqnodenotavail": "the wanted nodes are reserved or down: choose others, or ask for less time",
    "dependency": "it waits for another job",
    "begintime": "it starts later, as asked for",
    "unschedulable": "no machine has this much free: kubectl describe pod says what is short; ask for less",
    "imagepull": "the image cannot be pulled: check its name, and the registry's credentials",
    "errimage": "the image cannot be pulled: check its name, and the registry's credentials",
    "quota": "the namespace's quota is used up: kubectl describe quota",
    "containercreating": "the container is being made: wait; kubectl describe pod shows volumes and images",
    "insufficient": "no machine has this much free: ask for less",
}
"""Words in the scheduler's reason → what to do."""

_TAKEN = ("preempt", "evict", "requeue", "spot", "time limit", "timeout", "node_fail", "deadline")


def swapping(window: Window) -> Iterator[Finding]:
    for node in window.nodes.values():
        rate = window.of_host(node.node, lambda n: n.host.swap_bytes_per_s if n.host else None)
        if rate is None or rate < at.SWAP_BYTES_PER_S or node.host is None:
            continue
        used = (node.host.memory_used or 0) / node.host.memory_total if node.host.memory_total else 0.0
        workers = tuple(window.workers_on(node.node))
        yield Finding(
            Severity.WARNING,
            Cause.SWAPPING,
            _subject(window, node.node),
            f"{_machine(window, node)} moves {rate / 1e6:.0f} MB/s to and from swap: its memory does not suffice",
            "use fewer workers or smaller environments there, or ask for more memory (Slurm(mem=...), the pod's limit)",
            {"swap_bytes_per_s": round(rate), "memory_used_share": round(used, 2)},
            lost=0.5 if len(workers) == len(window.workers) else window.lost_by_worker(0.5),
            workers=workers,
        )


# -- cores --------------------------------------------------------------------------------------------------------


def oversubscribed(window: Window) -> Iterator[Finding]:
    """Find machines on which more processes want to run than there are cores."""
    machines: dict[str, list[NodeSample]] = {}
    for node in window.nodes.values():  # several nodes may be on one machine
        machines.setdefault(node.host_name or f"node {node.node}", []).append(node)
    for nodes in machines.values():
        workers = [worker for node in nodes for worker in window.workers_on(node.node)]
        if workers:
            found = _others_here(window, nodes[0], workers) or _others_by_load(window, nodes[0], workers)
            found = found or _too_many(window, nodes[0], workers)
            if found is not None:
                is_all = len(nodes) == len(window.nodes)
                yield replace(found, subject=Subject() if is_all else Subject("node", nodes[0].node))


def _is_here(window: Window, node: NodeSample) -> bool:
    """Return whether a node is the machine on which the doctor runs."""
    return window.here is not None and (len(window.nodes) == 1 or node.host_name in ("", window.info.host))


def _others_here(window: Window, node: NodeSample, workers: list[int]) -> Finding | None:
    """Judge by the processes of this machine, which the doctor has seen itself."""
    here = window.here
    if here is None or here.busy_cores is None or here.own_cores is None or not _is_here(window, node):
        return None
    others = here.busy_cores - here.own_cores
    # The kernel also counts the time in which a quota holds a process back.
    free = [here.workers[w] for w in workers if w in here.workers and (here.workers[w].throttled or 0) < at.THROTTLED]
    queued = median(map(_queued, free))
    is_full = here.busy_cores >= at.BUSY * here.cores
    if not is_full or others < max(at.OTHERS_CORES, at.OTHERS_SHARE * here.cores):
        return None
    if queued is not None and queued < at.QUEUED:
        return None
    evidence: Evidence = {
        "busy_cores": round(here.busy_cores, 1),
        "others_cores": round(others, 1),
        "cores": here.cores,
    }
    if queued is not None:
        evidence["waits_for_core_share"] = round(queued, 2)
    names = ", ".join(f"{name} ({cores:.1f})" for name, cores in here.others[:3])
    # What it costs is the time that the worker in the greatest need waits for a core.
    waited = [process.queued for process in free if process.queued is not None]
    lost = max(waited, default=others / here.cores / 2)
    return _by_others(window, node, workers, lost, evidence, f"{others:.1f} of {here.cores}", names)


def _queued(process: ProcessSample) -> float | None:
    """Return the share of the time in which a process wanted to run that it waited for a core."""
    wanted = (process.queued or 0.0) + (process.cpu or 0.0)
    return process.queued / wanted if process.queued is not None and wanted > at.NO_CPU else None


def _others_by_load(window: Window, node: NodeSample, workers: list[int]) -> Finding | None:
    """Judge by the machine's load: the workers and the head explain a part of it."""
    if node.host is None or node.host.cores < 1 or (window.here is not None and _is_here(window, node)):
        return None
    cores = node.host.cores
    cpu = window.of_host(node.node, lambda n: n.host.cpu if n.host else None)
    load = window.of_host(node.node, lambda n: n.host.load if n.host else None) or 0.0
    if cpu is None or cpu < at.BUSY or load < max(at.LOAD_FACTOR * cores, len(workers) + at.SPARE_LOAD):
        return None
    others = min(float(cores), load - len(workers) - at.SPARE_LOAD / 2)
    evidence: Evidence = {"cpu": round(cpu, 2), "load": round(load, 1), "cores": cores, "workers": len(workers)}
    return _by_others(window, node, workers, others / (others + len(workers) + 1), evidence, f"about {others:.0f}", "")


def _by_others(
    window: Window, node: NodeSample, workers: list[int], lost: float, evidence: Evidence, cores: str, names: str
) -> Finding:
    return Finding(
        Severity.WARNING,
        Cause.OVERSUBSCRIBED,
        _subject(window, node.node),
        f"processes outside the run take {cores} cores of {_machine(window, node)}" + (f": {names}" if names else ""),
        "end them, or ask for whole machines (sbatch --exclusive, CPU requests of pods); fewer workers wait less",
        evidence,
        lost=min(1.0, lost) if len(workers) == len(window.workers) else window.lost_by_worker(lost),
        workers=tuple(workers),
    )


def _too_many(window: Window, node: NodeSample, workers: list[int]) -> Finding | None:
    """Find more busy workers than cores: each gets only a part of one."""
    if node.host is None or node.host.cores < 1:
        return None
    cores = node.host.cores
    cpu = window.of_host(node.node, lambda n: n.host.cpu if n.host else None)
    if cpu is None or cpu < at.BUSY or len(workers) < at.WORKERS_FACTOR * cores:
        return None
    own = median(window.worker_median(w, lambda sample: sample.cpu) for w in workers)
    waiting = median(window.worker_median(w, lambda sample: sample.waiting) for w in workers)
    if (own is not None and own > 1 / at.WORKERS_FACTOR) or (waiting is not None and waiting > 0.5):
        return None
    return Finding(
        Severity.ADVICE,
        Cause.OVERSUBSCRIBED,
        _subject(window, node.node),
        f"{len(workers)} workers share {cores} cores of {_machine(window, node)}, which are all busy",
        f"about {cores} workers with more slots each do the same with fewer switches: workers={cores}",
        {"workers": len(workers), "cores": cores, "cpu": round(cpu, 2)},
        workers=tuple(workers),
    )


def _subject(window: Window, node: int) -> Subject:
    return Subject("node", node) if len(window.nodes) > 1 else Subject()


def _machine(window: Window, node: NodeSample) -> str:
    name = node.host_name or (window.info.host if len(window.nodes) == 1 else "")
    return f"the machine {name}" if name else f"the machine of node {node.node}"


# -- nodes --------------------------------------------------------------------------------------------------------


def absent_nodes(window: Window) -> Iterator[Finding]:
    """Find nodes that are not there, with the scheduler's reason, and those that send nothing."""
    for node in window.nodes.values():
        state = node.scheduler.lower()
        gone = _last(window, node.node, ("node_lost", "node_asked_again"))
        refused = _last(window, node.node, ("node_refused", "node_unfit"))
        if node.state == "missing" and refused is not None:
            yield _refused(window, node, refused)
        elif node.state == "missing" and state.startswith(("pending", "configuring", "waiting", "containercreating")):
            yield _pending(window, node, gone)
        elif node.state == "missing" and gone is not None:
            yield _lost(window, node, gone)
        elif node.state == "joined" and (node.silent_s or 0.0) >= at.SILENT_S:
            yield _silent(window, node)
        elif node.state == "joined" and gone is not None and window.now_s - gone.time_s <= at.LOSS_RECENT_S:
            yield _lost(window, node, gone)


def _last(window: Window, node: int, kinds: tuple[str, ...]) -> EventRecord | None:
    """Return the last of these events about a node, unless it has joined again since."""
    for event in reversed(window.events):
        named = re.match(r"node (\d+)\b", event.reason)
        if named is not None and int(named[1]) == node:
            if event.kind in kinds:
                return event
            if event.kind in ("node_joined", "node_back") and "node_refused" in kinds:
                return None
    return None


def _pending(window: Window, node: NodeSample, gone: EventRecord | None) -> Finding:
    words = node.scheduler.lower().replace(" ", "")
    advice = next((text for word, text in _REASONS.items() if word.lower() in words), "ask the scheduler why it waits")
    again = f"; its last job ended: {gone.reason}" if gone is not None else ""
    return Finding(
        Severity.WARNING,
        Cause.PENDING,
        Subject("node", node.node),
        f"node {node.node} has not started: {node.scheduler}{again}",
        advice,
        {"scheduler": node.scheduler, "job": node.job},
        lost=1 / max(1, len(window.nodes)),
        workers=tuple(window.workers_on(node.node)),
    )


def _lost(window: Window, node: NodeSample, gone: EventRecord) -> Finding:
    text = f"{gone.reason} {node.scheduler}".lower()
    is_taken = any(word in text for word in _TAKEN)
    is_back = node.state == "joined"
    reason = gone.reason.partition(": ")[2] or gone.reason
    evidence: Evidence = {"seconds_ago": round(window.now_s - gone.time_s, 1)}
    if node.scheduler:
        evidence["scheduler"] = node.scheduler
    advice = "it is asked for again; its log says why the agent ended (clusterenv logs, job output, kubectl logs)"
    if is_taken:
        advice = "it is asked for again; use a partition or pods that are not preempted, or a longer time limit"
    elif is_back:
        advice = "its log says why the agent ended (clusterenv logs, job output, kubectl logs)"
    elif _is_stopped(window, node):
        reason += ", and its agent's process is stopped"
        advice = f"kill -CONT {node.pid}; find out what stopped it (a batch system, a shell)"
    return Finding(
        Severity.WARNING if is_back else Severity.ERROR,
        Cause.NODE_PREEMPTED if is_taken else Cause.NODE_LOST,
        Subject("node", node.node),
        f"node {node.node} {'was lost, and is back' if is_back else 'is lost'}: {reason}",
        advice,
        evidence,
        lost=0.0 if is_back else 1 / max(1, len(window.nodes)),
        workers=tuple(window.workers_on(node.node)),
    )


def _is_stopped(window: Window, node: NodeSample) -> bool:
    return window.here is not None and bool(window.here.stopped.get(node.node))


def _refused(window: Window, node: NodeSample, event: EventRecord) -> Finding:
    return Finding(
        Severity.ERROR,
        Cause.NODE_REFUSED,
        Subject("node", node.node),
        event.reason.partition("\n")[0] or event.kind,
        "install the same Python and package versions there (clusterenv doctor, on that machine)",
        {"event": event.kind},
        lost=1 / max(1, len(window.nodes)),
        workers=tuple(window.workers_on(node.node)),
        detail=event.detail,
    )


def _silent(window: Window, node: NodeSample) -> Finding:
    is_stopped = _is_stopped(window, node)
    why = "its agent's process is stopped" if is_stopped else "its machine, its agent or the network between hangs"
    return Finding(
        Severity.ERROR,
        Cause.NODE_SILENT,
        Subject("node", node.node),
        f"node {node.node} has sent nothing for {node.silent_s or 0.0:.0f} s: {why}",
        f"kill -CONT {node.pid or 'PID'}"
        if is_stopped
        else "look at that machine (ping, ssh, its log); after dead_after_s its environments move to other nodes",
        {"silent_s": round(node.silent_s or 0.0, 1)},
        lost=1 / max(1, len(window.nodes)) if window.is_stream else 1.0,
        workers=tuple(window.workers_on(node.node)),
    )
