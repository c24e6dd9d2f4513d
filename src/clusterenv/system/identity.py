"""Identify a process beyond its number, which a later process, or one of another machine, may have too."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["machine", "process_start"]


def machine() -> str:
    """Return an identifier of this machine's boot and PID namespace, within which process ids are valid."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {os.urandom(8).hex()}"  # different from every other


def process_start(pid: int) -> str:
    """Return when this process started, in clock ticks, to distinguish it from a later one with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""
