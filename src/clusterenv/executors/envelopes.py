"""Wrap requests to workers for the network: whose rows and actions travel with a message. Pure."""

from __future__ import annotations

from typing import Any

from clusterenv.memory.rows import Buffers
from clusterenv.memory.transfer import read_inputs
from clusterenv.wire.messages import ToWorker
from clusterenv.wire.requests import LoadWeights, Rebuild, Reset, RunFragment, Step

__all__ = ["inputs_of", "to_worker_of"]


def to_worker_of(message: Any, shard: int, worker: int, slots: list[int]) -> ToWorker:
    """Return the envelope of a message to a worker with these slots; it names whose sides (and actions) go with it."""
    request = getattr(message, "request", None) or 0
    if isinstance(message, (Step, Reset, Rebuild)):
        actions = isinstance(message, Step) and message.actions is None and message.act is None
        return ToWorker(shard, worker, request, tuple(message.slots), actions)
    weights = message.number if isinstance(message, LoadWeights) else 0
    return ToWorker(shard, worker, request, tuple(slots) if isinstance(message, RunFragment) else (), False, weights)


def inputs_of(tell: ToWorker, buffers: Buffers | None) -> list[bytes]:
    """Return the parts of the rows that the worker reads for this message."""
    return [read_inputs(buffers, tell.slots, tell.actions)] if tell.slots and buffers is not None else []
