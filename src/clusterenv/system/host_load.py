"""Measure the load of this machine: CPU, memory, swapping, throttling, network. Nodes send it with their heartbeats."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from clusterenv.system.cpus import group_folders

__all__ = ["HostMeter", "HostSample"]

_AT_LEAST_S = 0.9  # two readings closer than this give the same sample: rates of shorter times mean little


class HostSample(msgspec.Struct, frozen=True):
    """The load of a machine; the first sample of a machine has no rates."""

    cores: int
    cpu: float | None = None
    """Share of all its cores that was busy."""
    load: float = 0.0
    """Load average of one minute."""
    memory_used: int = 0
    memory_total: int = 0
    swap_bytes_per_s: float | None = None
    """Read from and written to swap."""
    throttled: float | None = None
    """Share of the control group's CPU periods in which it was throttled."""
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None

    def is_plausible(self) -> bool:
        """Return whether every number is finite and not negative: a node may send anything."""
        numbers = [value for value in msgspec.structs.astuple(self) if value is not None]
        return all(math.isfinite(number) and 0 <= number < 2**63 for number in numbers)


class HostMeter:
    """Read the counters of this machine, and return the rates since the last reading."""

    def __init__(self) -> None:
        self._sample: HostSample | None = None
        self._read_at = -math.inf
        self._before: dict[str, float] = {}

    def read(self) -> HostSample:
        """Return the present load; at most one reading is made per second."""
        now = time.monotonic()
        if self._sample is None or now - self._read_at >= _AT_LEAST_S:
            counters = _counters()
            self._sample = _sample(counters, self._before, now - self._read_at)
            self._read_at, self._before = now, counters
        return self._sample


def _counters() -> dict[str, float]:
    import psutil

    cpu, memory, network = psutil.cpu_times(), psutil.virtual_memory(), psutil.net_io_counters()
    periods, throttled = _throttling()
    return {
        "busy": sum(cpu) - cpu.idle - getattr(cpu, "iowait", 0.0) - getattr(cpu, "guest", 0.0),
        "all": sum(cpu) - getattr(cpu, "guest", 0.0),
        "used": memory.total - memory.available,
        "total": memory.total,
        "swapped": _swapped(),
        "sent": network.bytes_sent if network else 0,
        "received": network.bytes_recv if network else 0,
        "periods": periods,
        "throttled": throttled,
    }


def _sample(now: dict[str, float], before: dict[str, float], elapsed_s: float) -> HostSample:
    rates: dict[str, Any] = {}
    if before:
        grown = {name: max(0.0, value - before[name]) for name, value in now.items()}
        rates = {
            "cpu": min(1.0, grown["busy"] / grown["all"]) if grown["all"] else None,
            "swap_bytes_per_s": grown["swapped"] / elapsed_s,
            "throttled": min(1.0, grown["throttled"] / grown["periods"]) if grown["periods"] else None,
            "sent_bytes_per_s": grown["sent"] / elapsed_s,
            "received_bytes_per_s": grown["received"] / elapsed_s,
        }
    return HostSample(
        cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        memory_used=int(now["used"]),
        memory_total=int(now["total"]),
        **rates,
    )


def _swapped() -> float:
    """Return the bytes read from and written to swap since the machine started."""
    pages = 0
    for line in _text(Path("/proc/vmstat")).splitlines():
        name, _, value = line.partition(" ")
        if name in ("pswpin", "pswpout"):
            pages += int(value)
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _throttling() -> tuple[float, float]:
    """Return the periods of this process' CPU quotas, and in how many of them it was throttled."""
    periods = throttled = 0
    for folder in group_folders():
        for line in _text(Path(folder) / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            periods += int(value) if name == "nr_periods" else 0
            throttled += int(value) if name == "nr_throttled" else 0
    return periods, throttled


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
