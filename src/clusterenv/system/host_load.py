"""Measure the load of this machine: CPU, memory, swapping, throttling, network. Nodes send it with their heartbeats."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from clusterenv.system.cpus import group_folders

__all__ = ["HostMeter", "HostSample", "load_average"]

_AT_LEAST_S = 0.9  # two readings closer than this give the same sample: rates of shorter times mean little


class HostSample(msgspec.Struct, frozen=True):
    """The load of a machine; None: it cannot be read there. The first sample of a machine has no rates."""

    cores: int
    cpu: float | None = None
    """Share of all its cores that was busy."""
    load: float | None = None
    """Load average of one minute."""
    memory_used: int | None = None
    memory_total: int | None = None
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


def load_average() -> float | None:
    """Return the load average of one minute; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _counters() -> dict[str, float]:
    """Return what can be read: sandboxes hide or forbid some of it, and none of it is worth the end of a node."""
    counters: dict[str, float] = {}
    for read in (_cpu, _memory, _network, _swapped, _throttling):
        counters |= _tolerant(read)
    return counters


def _tolerant(read: Callable[[], dict[str, float]]) -> dict[str, float]:
    try:
        return read()
    except Exception:  # OSError, psutil.Error, and whatever parsing an unusual /proc raises
        return {}


def _sample(now: dict[str, float], before: dict[str, float], elapsed_s: float) -> HostSample:
    grown = {name: max(0.0, now[name] - before[name]) for name in now.keys() & before.keys()}

    def share(part: str, whole: str) -> float | None:
        return min(1.0, grown[part] / grown[whole]) if grown.get(whole) else None

    def rate(name: str) -> float | None:
        return grown[name] / elapsed_s if name in grown else None

    has_memory = "total" in now
    return HostSample(
        cores=os.cpu_count() or 1,
        cpu=share("busy", "all"),
        load=load_average(),
        memory_used=int(now["used"]) if has_memory else None,
        memory_total=int(now["total"]) if has_memory else None,
        swap_bytes_per_s=rate("swapped"),
        throttled=share("throttled", "periods"),
        sent_bytes_per_s=rate("sent"),
        received_bytes_per_s=rate("received"),
    )


def _cpu() -> dict[str, float]:
    import psutil

    cpu = psutil.cpu_times()
    guest = getattr(cpu, "guest", 0.0)
    return {"busy": sum(cpu) - cpu.idle - getattr(cpu, "iowait", 0.0) - guest, "all": sum(cpu) - guest}


def _memory() -> dict[str, float]:
    import psutil

    memory = psutil.virtual_memory()
    return {"used": memory.total - memory.available, "total": memory.total}


def _network() -> dict[str, float]:
    import psutil

    network = psutil.net_io_counters()
    return {"sent": network.bytes_sent, "received": network.bytes_recv} if network else {}


def _swapped() -> dict[str, float]:
    """Return the bytes read from and written to swap since the machine started."""
    lines = (line.partition(" ") for line in _text(Path("/proc/vmstat")).splitlines())
    pages = [int(value) for name, _, value in lines if name in ("pswpin", "pswpout")]
    return {"swapped": sum(pages) * os.sysconf("SC_PAGE_SIZE")} if pages else {}


def _throttling() -> dict[str, float]:
    """Return the periods of this process' CPU quotas, and in how many of them it was throttled."""
    periods = throttled = 0
    for folder in group_folders():
        for line in _text(Path(folder) / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            periods += int(value) if name == "nr_periods" else 0
            throttled += int(value) if name == "nr_throttled" else 0
    return {"periods": periods, "throttled": throttled}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
