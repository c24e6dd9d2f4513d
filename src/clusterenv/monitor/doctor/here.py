"""What the kernel of the head's machine shows about the run's processes, measured over a few seconds: `Here`.

`watch.py` measures it if the doctor runs on the head's machine; `diagnose` takes it as evidence beside the samples.
"""

from __future__ import annotations

import msgspec

__all__ = ["Here", "ProcessSample"]


class ProcessSample(msgspec.Struct, frozen=True):
    """A process of the run on this machine."""

    pid: int
    state: str = ""
    """Its letter in /proc/PID/stat: "R" runs, "S" sleeps, "T" is stopped by a signal, "t" by a debugger."""
    cpu: float | None = None
    """Share of one core that it used."""
    queued: float | None = None
    """Share of the time in which it wanted to run and had no core."""
    throttled: float | None = None
    """Share of its control group's CPU periods in which the group was throttled."""
    quota: float | None = None
    """CPUs that its control group may use; None: no limit."""

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")


class Here(msgspec.Struct, frozen=True):
    """The machine of the head."""

    cores: int
    busy_cores: float | None = None
    """Cores in use by all processes, those of the run (below), and the largest others with their names."""
    own_cores: float | None = None
    others: list[tuple[str, float]] = []
    head: ProcessSample | None = None
    workers: dict[int, ProcessSample] = {}
    children: dict[int, list[tuple[str, float]]] = {}
    """Worker → the processes that its environments have started, with the cores that those of a name use."""
    stopped: dict[int, list[int]] = {}
    """Node on this machine → its processes that are stopped."""
