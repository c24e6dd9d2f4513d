"""What an executor reports to the engine besides the answers of workers."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Cause", "Exit", "Placed", "Stack", "WeightsHeld", "WeightsRefused", "WeightsSent"]


class Cause(enum.Enum):
    """Why a worker is gone. Only a crash is the worker's own fault: it may raise, and counts towards a crash loop."""

    CRASHED = "crashed"
    """It ended by itself, or hung and was killed."""
    NODE_LOST = "node lost"
    """Its machine is gone, or cannot be reached."""
    INTERRUPTED = "interrupted"
    """Ctrl-C in the calling process, which is the worker (`Local(workers=0)`)."""
    MOVED = "moved"
    """On purpose: its slots continue on another node."""


class Exit(NamedTuple):
    """A worker process is gone."""

    reason: str
    tail: str
    cause: Cause = Cause.CRASHED


class Stack(NamedTuple):
    """The stack of a worker, as requested by `Processes.stack`."""

    text: str


class Placed(NamedTuple):
    """The workers of a shard run on this node from now on, in this session; node None: on no node."""

    shard: int
    node: int | None
    session: int = 0


class WeightsSent(NamedTuple):
    """Bytes of these weights went to their machine."""

    number: int
    size: int


class WeightsHeld(NamedTuple):
    """The machine has received these weights completely."""

    number: int
    at: float | None = None
    """When they arrived; None: they did not travel."""


class WeightsRefused(NamedTuple):
    """The machine could not unpack these weights."""

    number: int
