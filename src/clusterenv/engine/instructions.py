"""Instructions of the engine, which the driver carries out in the order in which they were queued."""

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
    """None: the message is not answered."""


class PutWeights(NamedTuple):
    """Transfer weights to where the workers of a machine read them."""

    transfer: Transfer


class Kill(NamedTuple):
    """Kill a hung worker."""

    worker: int


class TraceStack(NamedTuple):
    """Request the stack of a worker."""

    worker: int


class Reserve(NamedTuple):
    """Keep later heads of this run from using incarnations up to this one, before any of them is used."""

    incarnation: int


Instruction = Start | Send | PutWeights | Kill | TraceStack | Reserve
