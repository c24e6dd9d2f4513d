"""Wait for processes that end by themselves, or by their parent's end."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def survivors(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for these processes, and return those that still run.

    Orphans are reaped by the machine's first process, which may take its time: until then they are zombies.
    """
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
