"""The request ledger: what was asked of each worker and is not answered yet. Pure.

A request is opened before its message is sent, and closed by its last answer or by the end of the worker's process.
A step of all slots is one number for all workers; requests are opened for it only where one has not answered as usual.
Executors keep no copy of a request: answers from other machines are checked against the entry here, and noted in it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterenv.wire.requests import Reply

__all__ = ["Brings", "Kind", "Request", "Requests"]

Brings = Literal["nothing", "rows", "fragment"]
"""What an answer carries beside its message."""


class Kind(enum.Enum):
    BUILD = "build"
    STEP = "step"
    RESET = "reset"
    REBUILD = "rebuild"
    CALL = "call"
    POLICY = "policy"
    FRAGMENT = "fragment"


@dataclass(slots=True, eq=False)
class Request:
    """One request to one worker."""

    number: int
    kind: Kind
    worker: int
    slots: list[int]
    """The slots that it is about, ascending."""
    message: Any = None
    """What was sent; None: a whole step."""
    version: int | None = None
    """Fragments: the version that acts."""
    info_keys: tuple[str, ...] = ()
    """Fragments: the infos that were asked for."""
    brings: Brings = field(init=False)

    # What has come so far.
    remaining: set[int] = field(init=False)
    """Slots whose row has not come yet, where it brings rows."""
    parts: list[Any] = field(default_factory=list, init=False)
    """Results of a call that have come, where they come in parts."""
    received_bytes: int = field(default=0, init=False)
    reserved_bytes: int = field(default=0, init=False)
    """How much its answers may have, while they are to come from another machine; 0: none is to come."""
    reply: Reply | None = field(default=None, init=False)
    """The answer to a call, until the caller has read it."""

    def __post_init__(self) -> None:
        self.brings = _BRINGS.get(self.kind, "nothing")
        self.remaining = set(self.slots) if self.brings == "rows" else set()


_BRINGS: dict[Kind, Brings] = {
    Kind.STEP: "rows",
    Kind.RESET: "rows",
    Kind.REBUILD: "rows",
    Kind.FRAGMENT: "fragment",
}


class Requests:
    """Every open request, by worker and number."""

    def __init__(self, slots_of: list[list[int]]) -> None:
        self.number = 0
        """Of the last request."""
        self.step_all = 0
        """Of the last step that all workers were asked for at once."""
        self.slots_of = slots_of
        self._open: list[dict[int, Request]] = [{} for _ in slots_of]
        self.count = 0
        """How many are open."""

    def next_number(self) -> int:
        """Return the number of the next request; 0 is never used."""
        self.number = self.number % 0xFFFF_FFFF + 1
        return self.number

    def open(self, worker: int, kind: Kind, slots: list[int], message: Any) -> Request:
        """Record that `message` is asked of `worker`."""
        return self._add(Request(message.request, kind, worker, slots, message))

    def part_of_step(self, worker: int) -> Request:
        """Return what this worker is asked by the step of all slots; it is not open unless `open_step` did that."""
        request = self._open[worker].get(self.step_all)
        return request or Request(self.step_all, Kind.STEP, worker, self.slots_of[worker])

    def open_step(self, worker: int) -> Request:
        """Open a request of its own for this worker's part of the step of all slots, unless there is one."""
        request = self._open[worker].get(self.step_all)
        return self._add(self.part_of_step(worker)) if request is None else request

    def _add(self, request: Request) -> Request:
        self._open[request.worker][request.number] = request
        self.count += 1
        return request

    def get(self, worker: int, number: int) -> Request | None:
        """Return the open request with this number; None: it was answered, abandoned, or never asked."""
        return self._open[worker].get(number)

    def close(self, request: Request) -> None:
        if self._open[request.worker].pop(request.number, None) is not None:
            self.count -= 1

    def close_all(self, worker: int) -> list[Request]:
        """Close everything that this worker was asked: its process is gone. Returns what it was."""
        requests = list(self._open[worker].values())
        self._open[worker].clear()
        self.count -= len(requests)
        return requests

    def is_open(self, request: Request) -> bool:
        return self._open[request.worker].get(request.number) is request

    def of(self, worker: int) -> Iterable[Request]:
        return self._open[worker].values()

    def is_busy(self, worker: int) -> bool:
        return bool(self._open[worker])

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        return (request for requests in self._open for request in requests.values())
