"""The owners of a run's facts, for the modules of the engine that change several of them together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from clusterenv.engine.collecting.weights import WeightLedger
from clusterenv.engine.incarnations import Incarnations
from clusterenv.engine.instructions import Instruction, Send
from clusterenv.engine.requests import Kind, Request, Requests
from clusterenv.engine.rows import Delivery
from clusterenv.engine.slots import Slots
from clusterenv.engine.workers import Workers
from clusterenv.events import EventLog

__all__ = ["State"]


@dataclass
class State:
    workers: Workers
    slots: Slots
    rows: Delivery
    requests: Requests
    incarnations: Incarnations
    weights: WeightLedger
    events: EventLog
    is_vector: bool
    """The slots of a worker are one vector environment: they step, fail and are rebuilt together."""
    out: deque[Instruction] = field(default_factory=deque, init=False)
    errors: list[Exception] = field(default_factory=list, init=False)
    """To be raised by the current call, after all received messages have been processed."""

    def ask(self, worker: int, kind: Kind, slots: list[int], message: Any, now_s: float) -> Request:
        """Open a request and queue its message; `message.request` is its number."""
        request = self.requests.open(worker, kind, slots, message)
        self.workers[worker].asked(now_s)
        self.out.append(Send(worker, message, request))
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request whose message cannot be sent, and all unsent requests of the same kind."""
        self.requests.close(request)
        kept = []
        for later in self.out:
            if isinstance(later, Send) and later.request is not None and later.request.kind is request.kind:
                self.requests.close(later.request)
            else:
                kept.append(later)
        self.out.clear()
        self.out.extend(kept)

    def send(self, worker: int, message: Any) -> None:
        """Queue a message that is not answered."""
        self.out.append(Send(worker, message, None))

    def incarnations_of(self, slots: list[int]) -> list[int]:
        return [self.incarnations.numbers[slot] for slot in slots]
