"""The request ledger: every request to a worker that is not answered yet. Pure.

A request is opened before its message is sent, and closed by its last answer or by the end of the worker's process.
A step of all slots has one number for all workers; it opens requests only for workers that did not answer as usual.
Executors keep no copy of a request: answers from other machines are checked against its entry, and recorded in it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from clusterenv.wire.channel import Brings
from clusterenv.wire.requests import Reply

__all__ = ["Kind", "Request", "Requests"]


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
    """The slots that it concerns, ascending."""
    message: Any = None
    """What was sent; None: a whole step."""
    version: int | None = None
    """Fragments: the version that acts."""
    info_keys: tuple[str, ...] = ()
    """Fragments: the requested infos."""
    brings: Brings = field(init=False)

    # What has arrived so far.
    remaining: set[int] = field(init=False)
    """Slots whose row has not arrived yet, if it brings rows."""
    parts: list[Any] = field(default_factory=list, init=False)
    """Results of a call that have arrived, if they come in parts."""
    received_bytes: int = field(default=0, init=False)
    reserved_bytes: int = field(default=0, init=False)
    """Maximum size of its answers while they are expected from another machine; 0: none is expected."""
    reply: Reply | None = field(default=None, init=False)
    """The answer to a call, until the caller has read it."""

    def __post_init__(self) -> None:
        self.brings = _BRINGS.get(self.kind, Brings.NOTHING)
        self.remaining = set(self.slots) if self.brings is Brings.ROWS else set()


_BRINGS: dict[Kind, Brings] = {
    Kind.STEP: Brings.ROWS,
    Kind.RESET: Brings.ROWS,
    Kind.REBUILD: Brings.ROWS,
    Kind.FRAGMENT: Brings.FRAGMENT,
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
        """Number of open requests."""

    def next_number(self) -> int:
        """Return the number of the next request; 0 is never used."""
        self.number = self.number % 0xFFFF_FFFF + 1
        return self.number

    def open(self, worker: int, kind: Kind, slots: list[int], message: Any) -> Request:
        """Open a request for `message`, which is sent to `worker`."""
        return self._add(Request(message.request, kind, worker, slots, message))

    def part_of_step(self, worker: int) -> Request:
        """Return this worker's part of the step of all slots; it is open only if `open_step` opened it."""
        request = self._open[worker].get(self.step_all)
        return request or Request(self.step_all, Kind.STEP, worker, self.slots_of[worker])

    def open_step(self, worker: int) -> Request:
        """Return the open request for this worker's part of the step of all slots; open it if necessary."""
        request = self._open[worker].get(self.step_all)
        return self._add(self.part_of_step(worker)) if request is None else request

    def _add(self, request: Request) -> Request:
        self._open[request.worker][request.number] = request
        self.count += 1
        return request

    def get(self, worker: int, number: int) -> Request | None:
        """Return the open request with this number; None: it was answered, abandoned, or never made."""
        return self._open[worker].get(number)

    def close(self, request: Request) -> None:
        if self._open[request.worker].pop(request.number, None) is not None:
            self.count -= 1

    def close_all(self, worker: int) -> list[Request]:
        """Close all requests to this worker, whose process is gone, and return them."""
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
