"""The request ledger: what was asked of each worker and is not answered yet. Pure.

A request is opened before its message is sent, and closed by its last answer or by the end of the worker's process.
What an answer brings follows from the message: the executor is given the `Request`, and keeps no copy of it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterenv.wire.requests import Rebuild, Reply, Reset, RunFragment, Step

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
    brings: Brings = "nothing"
    side: int = 0
    """Fragments: where in the memory of fragments its rows go."""
    num_steps: int = 0
    reply: Reply | None = None
    """The answer to a call, until the caller has read it."""
    remaining: set[int] = field(default_factory=set)
    """Slots whose row has not come yet, where it brings rows."""
    message: Any = None
    """What was sent; None: a whole step."""
    parts: list[Any] = field(default_factory=list)
    """Results of a call that have come, where they come in parts."""
    received_bytes: int = 0
    version: int | None = None
    """Fragments: the version that acts."""
    info_keys: tuple[str, ...] = ()
    """Fragments: the infos that were asked for."""

    def __post_init__(self) -> None:
        if self.brings == "rows":
            self.remaining = set(self.slots)


class Requests:
    """Every open request, by worker and number."""

    def __init__(self, workers: int) -> None:
        self.number = 0
        """Of the last request."""
        self._open: list[dict[int, Request]] = [{} for _ in range(workers)]
        self.count = 0
        """How many are open."""

    def next_number(self) -> int:
        """Return the number of the next request; 0 is never used."""
        self.number = self.number % 0xFFFF_FFFF + 1
        return self.number

    def open(self, worker: int, kind: Kind, slots: list[int], message: Any) -> Request:
        """Record that `message`, or a whole step with that number, is asked of `worker`."""
        number = message if isinstance(message, int) else message.request
        sent = None if isinstance(message, int) else message
        request = Request(number, kind, worker, slots, *_brings(message), message=sent)
        self._open[worker][number] = request
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


def _brings(message: Any) -> tuple[Brings, int, int]:
    """Return what the answer to this message brings, on which side, and of how many steps."""
    if isinstance(message, (int, Step, Reset, Rebuild)):
        return "rows", 0, 0
    if isinstance(message, RunFragment):
        return "fragment", message.side, message.num_steps
    return "nothing", 0, 0
