"""What the engine wants done: the driver carries it out, in the order in which it was left."""

from __future__ import annotations

from typing import Any, NamedTuple

from clusterenv.engine.collecting.weights import Transfer
from clusterenv.engine.requests import Request

__all__ = ["Instruction", "Kill", "PutWeights", "Reserve", "Send", "Start", "TraceStack"]


class Start(NamedTuple):
    """Start the process of a worker."""

    worker: int


class Send(NamedTuple):
    """Send a message to a worker."""

    worker: int
    message: Any
    request: Request | None
    """None: it is not answered."""


class PutWeights(NamedTuple):
    """Bring weights to where the workers of a machine read them."""

    transfer: Transfer


class Kill(NamedTuple):
    """End a worker that hangs."""

    worker: int


class TraceStack(NamedTuple):
    """Ask where a worker is."""

    worker: int


class Reserve(NamedTuple):
    """Have no later head of this run use incarnations up to this one, before any of them is used."""

    incarnation: int


Instruction = Start | Send | PutWeights | Kill | TraceStack | Reserve
