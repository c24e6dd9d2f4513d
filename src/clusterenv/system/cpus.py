"""Count the CPUs that this process may use: its affinity, bounded by the CPU quotas of its control groups (v1, v2).

Pods and batch jobs often limit CPUs by a quota alone: the affinity of a pod with 4 CPUs has all cores of its machine.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

Read = Callable[[str], str | None]
"""Return the text of the file at a path, or None if it cannot be read."""


class Mount(NamedTuple):
    """A mounted hierarchy of control groups; the group `root` appears at `point`."""

    root: str
    point: str
    is_v2: bool
    controllers: tuple[str, ...]  # of a v1 hierarchy; empty for v2


def cpu_limit() -> float:
    """Return how many CPUs this process and its children may use at the same time; may be less than 1."""
    return min(len(os.sched_getaffinity(0)), own_quota() or math.inf)


def usable_cores() -> int:
    """Return the number of processes that can be busy at the same time, at least 1."""
    return whole_cores(cpu_limit())


def whole_cores(limit: float) -> int:
    """Return the limit rounded down: workers that step together would all wait for a throttled one."""
    return max(1, math.floor(limit))


def cpu_quota(memberships: str, mountinfo: str, read: Read) -> float | None:
    """Return the smallest CPU quota of a process' groups and their parents, in CPUs; None if there is none.

    Args:
        memberships: the text of /proc/PID/cgroup.
        mountinfo: the text of /proc/PID/mountinfo.
        read: function that reads a file of a mounted hierarchy.
    """
    quotas = [quota_of(folder, is_v2, read) for folder, is_v2 in control_groups(memberships, mountinfo)]
    return min((quota for quota in quotas if quota is not None), default=None)


def group_folders() -> list[str]:
    """Return the folders of the control groups that limit the CPUs of this process, and of their parents."""
    return [folder for folder, _ in own_groups("cpu")]


def own_groups(controller: str) -> list[tuple[str, bool]]:
    """Return the folders of this process' control groups and their parents, and whether each is of version 2."""
    memberships, mountinfo = read_text("/proc/self/cgroup"), read_text("/proc/self/mountinfo")
    return control_groups(memberships, mountinfo, controller) if memberships and mountinfo else []


def control_groups(memberships: str, mountinfo: str, controller: str = "cpu") -> list[tuple[str, bool]]:
    """Return the folders of a process' control groups and their parents, and whether each is of version 2."""
    mounts = list(mounts_of(mountinfo))
    found = []
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        is_v2 = not names
        if not is_v2 and controller not in names.split(","):
            continue
        fitting = [m for m in mounts if (m.is_v2 if is_v2 else controller in m.controllers)]
        found += [(folder, is_v2) for folder in _folders(path, fitting)]
    return found


def quota_of(folder: str, is_v2: bool, read: Read) -> float | None:
    """Return the CPU quota of one control group, in CPUs; None if it has none."""
    return _quota_v2(folder, read) if is_v2 else _quota_v1(folder, read)


def mounts_of(mountinfo: str) -> Iterator[Mount]:
    """Yield the control group hierarchies in the text of /proc/PID/mountinfo."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, point = (_unescaped(text) for text in before.split(" ")[3:5])
            yield Mount(root, point, kind == "cgroup2", () if kind == "cgroup2" else tuple(options.split(",")))


def _folders(path: str, mounts: list[Mount]) -> list[str]:
    """Return the folders of a group and its parents, as far as they are mounted."""
    folders = []
    for mount in mounts:
        root = mount.root.rstrip("/")
        if "/.." not in path and (path == root or path.startswith(f"{root}/")):
            parts = [part for part in path[len(root) :].split("/") if part]
            folders += ["/".join([mount.point, *parts[:count]]) for count in range(len(parts) + 1)]
    # The group is outside of what is mounted: a container sees its own group at the mount point, whatever its path.
    return folders or [mount.point for mount in mounts]


def _quota_v1(folder: str, read: Read) -> float | None:
    quota, period = (_number(read(f"{folder}/cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return quota / period if quota is not None and period is not None and quota > 0 and period > 0 else None


def _quota_v2(folder: str, read: Read) -> float | None:
    words = (read(f"{folder}/cpu.max") or "").split()
    if len(words) != 2:
        return None
    quota, period = map(_number, words)  # None for "max"
    return quota / period if quota is not None and period else None


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def own_quota() -> float | None:
    """Return the CPU quota of this process, in CPUs; None if it has none."""
    memberships, mountinfo = read_text("/proc/self/cgroup"), read_text("/proc/self/mountinfo")
    return cpu_quota(memberships, mountinfo, read_text) if memberships and mountinfo else None


def read_text(path: str) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None
