"""Fragments without a common beat: every worker runs ahead by a bounded number, and nobody waits for another.

A worker has `queue` places in shared memory. While one fragment is read by the learner, the next is filled; when all
are full, the worker waits. That bound is the data's age.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterenv.errors import DeadlineError, EnvError, PolicyError, WorkerLostError
from clusterenv.wire.requests import FragmentResult

if TYPE_CHECKING:
    from clusterenv.engine.fragments import FragmentDesk

__all__ = ["FragmentStream", "Item"]


class Item(NamedTuple):
    """A whole fragment of one worker."""

    worker: int
    side: int
    result: FragmentResult
    incarnations: list[int]


class FragmentStream:
    def __init__(self, desk: FragmentDesk, num_steps: int, queue: int, workers: int) -> None:
        self._desk = desk
        self.num_steps = num_steps
        self._free: list[deque[int]] = [deque(range(queue)) for _ in range(workers)]
        self._flying: list[deque[tuple[int, list[int]]]] = [deque() for _ in range(workers)]  # side, incarnations
        self._arrived: deque[Item] = deque()
        self._held: list[deque[int]] = [deque() for _ in range(workers)]  # sides that the learner has not copied yet
        self._cut: set[tuple[int, int]] = set()  # worker, side: episodes end with this fragment
        self.is_open = True

    def feed(self, knobs: dict[str, Any]) -> None:
        """Give every worker that has a free place something to do."""
        for worker, free in enumerate(self._free):
            while free and not self._is_last(worker) and self._desk.can_run(worker):
                side = free.popleft()
                incarnations = self._desk.send(worker, self.num_steps, side, knobs)
                self._flying[worker].append((side, incarnations))

    def _is_last(self, worker: int) -> bool:
        """Its slots go on elsewhere, and it has a fragment to end their episodes with."""
        return bool(self._flying[worker] or self._held[worker]) and self._desk.is_leaving(worker)

    def wait(self, deadline: float | None, timeout_s: float | None, knobs: dict[str, Any]) -> Item:
        """The next fragment, in the order of arrival. It stays where it is until `release`."""
        while not self._arrived:
            self.feed(knobs)  # somebody may have come back
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(f"no fragment from any worker within {timeout_s} s")
            self._desk.turn(deadline)
        return self._arrived.popleft()

    @property
    def with_room(self) -> list[int]:
        """Workers that have a free place."""
        return [worker for worker, free in enumerate(self._free) if free]

    def put_back(self, item: Item) -> None:
        self._arrived.appendleft(item)

    def release(self, item: Item) -> None:
        """The learner has copied it: its place is free."""
        self._held[item.worker].remove(item.side)
        self._free[item.worker].append(item.side)

    def cut(self, worker: int) -> None:
        """The worker's slots go on elsewhere: its last fragment ends their episodes."""
        if self._held[worker]:
            self._cut.add((worker, self._held[worker][-1]))

    def result(self, item: Item) -> FragmentResult:
        """What the learner is to see of it; asked once."""
        if (item.worker, item.side) not in self._cut:
            return item.result
        self._cut.discard((item.worker, item.side))
        return self._desk.cut(item.worker, item.side, item.result)

    def took(self, worker: int, result: FragmentResult) -> int:
        """A fragment arrived; returns the side on which it lies."""
        side, incarnations = self._flying[worker].popleft()
        if self.is_open:
            self._held[worker].append(side)
            self._arrived.append(Item(worker, side, result, incarnations))
        return side

    def lost(self, worker: int) -> None:
        """The worker died; what it had not finished is run again by its replacement."""
        for side, _ in self._flying[worker]:
            self._free[worker].append(side)
        self._flying[worker].clear()

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._flying))

    def stop(self) -> int:
        """Take no more; what runs is finished and dropped. Returns how many fragments that are."""
        self.is_open = False
        dropped = self.in_flight + len(self._arrived)
        self._arrived.clear()
        while self.in_flight:
            try:
                self._desk.turn(None)
            except (EnvError, PolicyError, WorkerLostError):
                continue  # it is in the events; leaving the loop must not fail for it
        return dropped
