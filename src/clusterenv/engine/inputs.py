"""What an executor reports beside the answers of workers."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Cause", "Exit", "Stack"]


class Cause(enum.Enum):
    """Why a worker is gone. Only a crash is its own fault: it may raise, and counts towards a crash loop."""

    CRASHED = "crashed"
    """It ended by itself, or hung and was killed."""
    NODE_LOST = "node lost"
    """Its machine is gone, or cannot be reached."""
    INTERRUPTED = "interrupted"
    """Ctrl-C in the calling process, where that is the worker."""
    MOVED = "moved"
    """On purpose: its slots go on elsewhere."""


class Exit(NamedTuple):
    """A worker process is gone."""

    reason: str
    tail: str
    cause: Cause = Cause.CRASHED


class Stack(NamedTuple):
    """Where a worker is: what `Crew.stack` asked for."""

    text: str
