"""Worker processes: whether each runs, since when its progress is unchanged, and when to warn about it. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Progress", "Worker", "WorkerState", "Workers"]

Progress = tuple[int, int, int]
"""(slot, phase, step of a fragment) that a worker is in; slot -1 before the first."""


class WorkerState(enum.Enum):
    ABSENT = "to be started, not before a given time"
    RUNNING = "started"
    KILLED = "killed because it hung; its exit is awaited"


@dataclass(slots=True)
class Worker:
    """A worker: one process, replaced when it ends, always with the same slots."""

    index: int
    slots: list[int]
    node: int
    """The machine whose weights it reads."""
    warn_after_s: float
    state: WorkerState = field(default=WorkerState.RUNNING, init=False)
    start_at_s: float = field(default=0.0, init=False)
    """ABSENT: earliest time to start it."""
    reason: str = field(default="", init=False)
    """KILLED: why."""
    policy_epoch: int = field(default=0, init=False)
    """Which policy it was sent (below: which layout of fragments); 0: none."""
    arena_epoch: int = field(default=0, init=False)
    seen: Progress | None = field(default=None, init=False)
    seen_at_s: float = field(default=0.0, init=False)
    is_traced: bool = field(default=False, init=False)
    """Its stack was requested, and has not come."""
    is_stack_wanted: bool = field(default=False, init=False)
    """A user has requested its stack."""

    def asked(self, now_s: float) -> None:
        """Restart its time limits: it was just given something to do."""
        self.seen, self.seen_at_s = None, now_s

    def stuck_s(self, progress: Progress, now_s: float) -> float:
        """Return how long it has shown this progress."""
        if progress != self.seen:
            self.seen, self.seen_at_s = progress, now_s
            return 0.0
        return now_s - self.seen_at_s

    def is_warning_due(self, stuck_s: float) -> bool:
        """Return whether to warn now, with its stack. The delay doubles each time: the environment may just be slow."""
        if stuck_s <= self.warn_after_s:
            return False
        while self.warn_after_s < stuck_s:
            self.warn_after_s *= 2
        self.is_traced = True
        return True

    def killed(self, reason: str) -> None:
        self.state, self.reason = WorkerState.KILLED, reason

    def exited(self, now_s: float) -> str:
        """Record that its process is gone. Return why it was killed, or an empty string."""
        reason, self.reason = self.reason, ""
        self.state, self.start_at_s = WorkerState.ABSENT, now_s
        self.policy_epoch = self.arena_epoch = 0
        return reason

    def started(self) -> None:
        self.state = WorkerState.RUNNING

    @property
    def is_absent(self) -> bool:
        return self.state is WorkerState.ABSENT


class Workers:
    def __init__(self, slots_of: list[list[int]], node_of: list[int], warn_after_s: float | None) -> None:
        limit_s = math.inf if warn_after_s is None else warn_after_s
        self._workers = [Worker(w, its, node_of[w], limit_s) for w, its in enumerate(slots_of)]
        self._of_slot = [worker for worker in self._workers for _ in worker.slots]
        self.num_nodes = max(node_of) + 1

    def __getitem__(self, index: int) -> Worker:
        return self._workers[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def of_slot(self, slot: int) -> Worker:
        return self._of_slot[slot]

    def absent(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.state is WorkerState.ABSENT]

    def where(self, worker: int) -> str:
        """Return where this worker runs, for messages to the user."""
        return f"node {self._workers[worker].node}" if self.num_nodes > 1 else "the machine of the workers"
