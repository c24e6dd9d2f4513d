"""Describe how a process ended."""

from __future__ import annotations

import signal

NEVER = 42
"""Exit code of a node agent for which starting it again would not help."""


def how_it_ended(code: int) -> str:
    """Describe an exit code of `subprocess`, negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"
