"""Write what is known of runs for a terminal. Pure: samples in, lines of text out."""

from __future__ import annotations

import time
from collections.abc import Sequence

from clusterenv.monitor.sample import EventRecord, HostSample, NodeSample, RunInfo, Sample, WorkerSample
from clusterenv.monitor.terminal import clean

__all__ = ["bytes_text", "overview", "span", "table"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def bytes_text(size: float) -> str:
    """Return a size in a unit in which it has at most four digits."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def span(seconds: float) -> str:
    """Return a time as people write it: 42 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, their columns aligned; the first row is the heading."""
    rows = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def overview(info: RunInfo, sample: Sample, events: Sequence[EventRecord], most: int = 20) -> list[str]:
    """Return the essence of a run: how fast, where the time goes, nodes, workers that stand out, last events."""
    point = sample.point
    state = "over" if sample.is_over else f"in {sample.call}()" if sample.call else "the learner works"
    lines = [
        f"{info.name}: {info.num_envs} x {info.env}, {info.backend}, {span(point.time_s - info.began_at)}, {state}",
        f"{point.steps_per_s:,.0f} steps/s, {point.steps:,} steps, {point.episodes:,} episodes"
        + ("" if point.episode_return is None else f", mean return {point.episode_return:.1f}"),
    ]
    if point.environment is not None:
        shares = (point.environment, point.policy or 0.0, point.waiting or 0.0)
        lines.append("workers: {:.0%} environment, {:.0%} policy, {:.0%} waiting".format(*shares))
    if point.version is not None and point.version >= 0:
        drift = "" if point.drift is None else f", drift {point.drift:.4f}"
        sent = f", {point.pulls} pulls, {bytes_text(point.weight_bytes)} sent"
        lines.append(f"weights: version {point.version}, held {point.held_version}{drift}{sent}")
    lines += ["", *table([_NODES, *map(_node, sample.nodes)]), ""]
    chosen = sorted(sample.workers, key=_rank)[:most]
    left_out = len(sample.workers) - len(chosen)
    lines += table([_WORKERS, *(_worker(worker) for worker in sorted(chosen, key=lambda worker: worker.worker))])
    lines += [f"... and {left_out} more workers"] if left_out else []
    if sample.slow:
        lines.append(f"slow environments: slots {', '.join(map(str, sample.slow[:20]))}")
    shown = [event for event in events if event.kind not in ("pull", "env_rebuilt")][-5:]
    if shown:
        lines += [
            "",
            *(f"{time.strftime('%H:%M:%S', time.localtime(e.time_s))} {e.kind}: {clean(e.reason)}" for e in shown),
        ]
    return lines


_NODES = ("node", "state", "host", "job", "time left", "CPU", "memory", "sent", "received", "version")


def _node(node: NodeSample) -> tuple[str, ...]:
    host = node.host
    return (
        str(node.node),
        f"{node.state}: {node.scheduler}" if node.scheduler else node.state,
        node.host_name,
        node.job,
        "" if node.time_left_s is None else span(node.time_left_s),
        "" if host is None or host.cpu is None else f"{host.cpu:.0%} of {host.cores}",
        _memory(host),
        bytes_text(node.sent_bytes),
        bytes_text(node.received_bytes),
        "" if node.version is None or node.version < 0 else str(node.version),
    )


def _memory(host: HostSample | None) -> str:
    if host is None or host.memory_used is None or host.memory_total is None:
        return ""
    return f"{bytes_text(host.memory_used)} of {bytes_text(host.memory_total)}"


_WORKERS = ("worker", "node", "slots", "state", "in", "for", "steps/s", "environment", "policy", "waiting", "losses")


def _worker(worker: WorkerSample) -> tuple[str, ...]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.0%}"

    return (
        str(worker.worker),
        str(worker.node),
        f"{worker.slots[0]}-{worker.slots[1]}",
        worker.state,
        f"{worker.phase} of slot {worker.slot}" if worker.slot is not None else "",
        span(worker.stuck_s) if worker.stuck_s >= 2 and worker.is_busy else "",
        "" if worker.steps_per_s is None else f"{worker.steps_per_s:,.0f}",
        share(worker.environment),
        share(worker.policy),
        share(worker.waiting),
        str(worker.losses or ""),
    )


def _rank(worker: WorkerSample) -> tuple[bool, float, int]:
    """Return what puts workers that stand out first: not running, stuck, often lost."""
    return worker.state == "running", -(worker.stuck_s if worker.is_busy else 0.0), -worker.losses
