"""How a process ended, in words."""

from __future__ import annotations

import signal

NEVER = 42
"""Exit code of a node agent: this will not work however often it is tried."""


def how_it_ended(code: int) -> str:
    """Of an exit code as `subprocess` has it: negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"
