"""`Probe`: measure the run's processes on this machine between two moments, from /proc and the CPU control groups.

`watch.py` uses it if the doctor runs on the head's machine. Everything that vanishes meanwhile is left out.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

from clusterenv.monitor.doctor.here import Here, ProcessSample
from clusterenv.monitor.sample import RunInfo, Sample
from clusterenv.system.cpus import control_groups, quota_of

__all__ = ["Probe", "is_here", "parse_stat", "state_of"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NAMED = 3


class Stat(NamedTuple):
    """A line of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent: int
    cpu_s: float


class _Throttling(NamedTuple):
    """The CPU periods of a process' groups, and the smallest quota among them."""

    periods: int
    throttled: int
    quota: float | None


class _Moment(NamedTuple):
    time_s: float
    busy_s: float
    """Of all cores together."""
    stats: Mapping[int, Stat]
    queued_s: Mapping[int, float]
    throttling: Mapping[int, _Throttling]


def is_here(info: RunInfo) -> bool:
    """Return whether the head's process runs on this machine, in this process namespace."""
    return info.host in (socket.gethostname(), socket.getfqdn()) and Path(f"/proc/{info.pid}").exists()


def parse_stat(text: str) -> Stat:
    """Read a line of /proc/PID/stat; the name may contain spaces and parentheses."""
    begin, _, rest = text.rpartition(")")
    pid, _, name = begin.partition(" (")
    fields = rest.split()
    return Stat(int(pid), name, fields[0], int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


def state_of(pid: int) -> str:
    """Return the state of a process, as in /proc/PID/stat; "" if it is gone."""
    text = _read(f"/proc/{pid}/stat")
    return parse_stat(text).state if text else ""


class Probe:
    """Remembers the first moment; `measure` compares it with the present one."""

    def __init__(self, info: RunInfo, sample: Sample | None) -> None:
        self._info = info
        self._begin = _moment(_watched(info, sample))

    def measure(self, sample: Sample) -> Here:
        info, before = self._info, self._begin
        workers = _workers(info, sample)
        after = _moment(_watched(info, sample))
        elapsed_s = max(after.time_s - before.time_s, 1e-6)
        used = {pid: _cpu(before, stat) / elapsed_s for pid, stat in after.stats.items()}
        roots = {info.pid, *workers.values(), *_agents(info, sample).values()}
        own = _tree(after.stats, roots) | {os.getpid()}
        children = {
            worker: _largest(after.stats, used, _tree(after.stats, {pid}) - {pid}) for worker, pid in workers.items()
        }
        stopped = {
            node: [p for p in sorted(_tree(after.stats, {pid})) if after.stats[p].state in "Tt"]
            for node, pid in _agents(info, sample).items()
        }
        return Here(
            os.cpu_count() or 1,
            max(0.0, after.busy_s - before.busy_s) / elapsed_s,
            sum(used.get(pid, 0.0) for pid in own),
            _largest(after.stats, used, used.keys() - own),
            _process(info.pid, before, after, used),
            {w: process for w, pid in workers.items() if (process := _process(pid, before, after, used)) is not None},
            {worker: its for worker, its in children.items() if its},
            {node: pids for node, pids in stopped.items() if pids},
        )


def _largest(stats: Mapping[int, Stat], used: Mapping[int, float], pids: Set[int]) -> list[tuple[str, float]]:
    """Return the names of these processes with the cores that they use together, the largest first."""
    by_name: defaultdict[str, float] = defaultdict(float)
    for pid in pids:
        by_name[stats[pid].name] += used[pid]
    largest = sorted(by_name.items(), key=lambda entry: -entry[1])[:_NAMED]
    return [(name, round(cores, 2)) for name, cores in largest if cores > 0.05]


def _watched(info: RunInfo, sample: Sample | None) -> set[int]:
    return {info.pid} if sample is None else {info.pid, *_workers(info, sample).values()}


def _workers(info: RunInfo, sample: Sample) -> dict[int, int]:
    """Return the workers on this machine: number → process. Elsewhere, the same number is another process."""
    here = {node.node for node in sample.nodes if node.host_name == info.host}
    return {w.worker: w.pid for w in sample.workers if w.pid is not None and w.node in here}


def _agents(info: RunInfo, sample: Sample) -> dict[int, int]:
    """Return the node agents on this machine: number → process."""
    return {n.node: n.pid for n in sample.nodes if n.pid not in (None, info.pid) and n.host_name == info.host}


def _process(pid: int, before: _Moment, after: _Moment, used: Mapping[int, float]) -> ProcessSample | None:
    stat = after.stats.get(pid)
    if stat is None:
        return None
    elapsed_s = max(after.time_s - before.time_s, 1e-6)
    queued = throttled = None
    if pid in before.queued_s and pid in after.queued_s:
        queued = max(0.0, after.queued_s[pid] - before.queued_s[pid]) / elapsed_s
    now, then = after.throttling.get(pid), before.throttling.get(pid)
    if now is not None and then is not None and now.periods > then.periods:
        throttled = max(0, now.throttled - then.throttled) / (now.periods - then.periods)
    return ProcessSample(pid, stat.state, used.get(pid), queued, throttled, None if now is None else now.quota)


def _cpu(before: _Moment, stat: Stat) -> float:
    """Return the CPU time of a process since `before`; of a new one, all of it."""
    known = before.stats.get(stat.pid)
    return max(0.0, stat.cpu_s - (known.cpu_s if known is not None else 0.0))


def _tree(stats: Mapping[int, Stat], roots: set[int]) -> set[int]:
    """Return these processes and all their descendants."""
    found = {pid for pid in roots if pid in stats}
    while True:
        more = {stat.pid for stat in stats.values() if stat.parent in found} - found
        if not more:
            return found
        found |= more


# -- reading ------------------------------------------------------------------------------------------------------


def _moment(pids: set[int]) -> _Moment:
    stats = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (text := _read(f"/proc/{name}/stat")):
            stats[int(name)] = parse_stat(text)
    queued = {pid: sum(map(_queued_s, _tasks(pid))) for pid in pids if pid in stats}
    throttling = {pid: found for pid in pids if (found := _throttling(pid)) is not None}
    return _Moment(time.monotonic(), _busy_s(), stats, queued, throttling)


def _tasks(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _queued_s(task: str) -> float:
    words = (_read(f"{task}/schedstat") or "").split()
    return int(words[1]) / 1e9 if len(words) == 3 else 0.0


def _busy_s() -> float:
    words = (_read("/proc/stat") or "cpu").partition("\n")[0].split()[1:9]
    numbers = [int(word) for word in words]
    # user, nice, system, (idle, iowait), irq, softirq, steal
    return sum(number for index, number in enumerate(numbers) if index not in (3, 4)) / _TICKS_PER_S


def _throttling(pid: int) -> _Throttling | None:
    """Return the throttling of the process' group or parent that throttles most often; None: there is no quota."""
    memberships, mountinfo = _read(f"/proc/{pid}/cgroup"), _read("/proc/self/mountinfo")
    found: list[_Throttling] = []
    for folder, is_v2 in control_groups(memberships, mountinfo) if memberships and mountinfo else []:
        quota = quota_of(folder, is_v2, _read)
        lines = (line.split() for line in (_read(f"{folder}/cpu.stat") or "").splitlines())
        counts = {words[0]: int(words[1]) for words in lines if len(words) == 2}
        if quota is not None and "nr_periods" in counts:
            found.append(_Throttling(counts["nr_periods"], counts.get("nr_throttled", 0), quota))
    return min(found, key=lambda one: one.quota or 0.0) if found else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return None
