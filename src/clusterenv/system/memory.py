"""Tell how much memory this process and its children may use: of the machine, and of its control groups (v1, v2)."""

from __future__ import annotations

from typing import NamedTuple

from clusterenv.system.cpus import Read, own_groups, read_text

__all__ = ["GroupMemory", "available_bytes", "group_memory", "machine_memory", "own_group_memory"]

_UNKNOWN = 1 << 30


class GroupMemory(NamedTuple):
    """The limit of a control group, and what it uses without the file cache, which the kernel gives up when needed."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def available_bytes() -> int:
    """Return how much memory new processes may use, as far as the machine and the control groups say."""
    group, (_, available) = own_group_memory(), machine_memory()
    found = [available] if available else []
    return min([*found, *([] if group is None else [group.free])], default=_UNKNOWN)


def machine_memory(read: Read = read_text) -> tuple[int, int]:
    """Return the machine's memory in bytes, all of it and what is available; 0: not known."""
    lines = _values(read("/proc/meminfo"))
    return lines.get("MemTotal", 0) << 10, lines.get("MemAvailable", 0) << 10


def own_group_memory() -> GroupMemory | None:
    """Return the control group of this process, or its parent, that has the least memory left; None: no limits."""
    return group_memory(own_groups("memory"), read_text)


def group_memory(groups: list[tuple[str, bool]], read: Read) -> GroupMemory | None:
    """Return the one of these groups that has the least memory left; None: none has a limit.

    Args:
        groups: folder of each group, and whether it is of version 2; see `cpus.control_groups`.
        read: function that reads a file of a mounted hierarchy.
    """
    found = []
    for folder, is_v2 in groups:
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = ((read(f"{folder}/{name}") or "").strip() for name in names)
        if limit.isdecimal() and used.isdecimal():
            # Names without "total_" leave out the children of a group of version 1.
            cache, of = _values(read(f"{folder}/memory.stat")), "" if is_v2 else "total_"
            reclaimable = cache.get(f"{of}inactive_file", 0) + cache.get(f"{of}active_file", 0)
            found.append(GroupMemory(int(limit), max(0, int(used) - reclaimable)))
    return min(found, key=lambda group: group.free, default=None)


def _values(text: str | None) -> dict[str, int]:
    """Return the numbers of lines such as "MemTotal: 5 kB" and "active_file 5"."""
    words = [line.split() for line in (text or "").splitlines()]
    return {line[0].removesuffix(":"): int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
