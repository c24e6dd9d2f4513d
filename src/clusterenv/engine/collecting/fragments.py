"""Fragments under way: which worker runs which, where each is stored, and its state. Pure.

A rollout is one fragment of every worker, all on the same side of the memory; it is delivered when all have arrived. A
stream lets every worker run ahead by a bounded number of fragments, each on a separate side: while the learner reads
one, the next is filled; when all sides are full, the worker waits. This bounds the age of the data.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from clusterenv.engine.collecting.counters import Counters
from clusterenv.wire.requests import FragmentResult

__all__ = ["Done", "Fragment", "FragmentState", "Fragments", "Mode", "OnLoss"]

_DONE = 2000  # fragments that are remembered for a timeline

OnLoss = Literal["rerun", "mask"]
"""What to do with the unfinished fragment of a worker that is lost in a rollout."""


class FragmentState(enum.Enum):
    QUEUED = "to be asked as soon as the worker's environments are there"
    RUNNING = "asked"
    ARRIVED = "whole; the learner has not got it yet"
    READ = "being copied into a batch"


class Mode(enum.Enum):
    IDLE = "nothing is wanted"
    ROLLOUT = "one fragment of every worker"
    STREAM = "fragments as they arrive"


@dataclass(slots=True, eq=False)
class Fragment:
    """`num_steps` steps of the slots of one worker."""

    worker: int
    side: int
    num_steps: int
    state: FragmentState = field(default=FragmentState.QUEUED, init=False)
    number: int = field(default=0, init=False)
    """Of its request."""
    incarnations: list[int] = field(default_factory=list, init=False)
    """Of the worker's slots when it began."""
    asked_at_s: float = field(default=0.0, init=False)
    is_wanted: bool = field(default=True, init=False)
    """False: it was abandoned while it ran. Its slots advance nevertheless."""
    is_late: bool = field(default=False, init=False)
    """Its rollout was delivered without it: it belongs to the next one."""
    was_lost: bool = field(default=False, init=False)
    """Its worker was lost while it ran, and it is to run again."""
    is_last: bool = field(default=False, init=False)
    """Its slots move to another node: episodes that would continue after it are truncated."""
    result: FragmentResult | None = field(default=None, init=False)
    """None although the state is ARRIVED: it was lost, and is not run again."""


class Done(NamedTuple):
    """When a fragment was asked for and read (monotonic clock), and what its worker did meanwhile."""

    worker: int
    asked_at_s: float
    read_at_s: float
    environment_s: float
    policy_s: float
    num_steps: int
    version: int | None


class Fragments:
    def __init__(self, workers: int) -> None:
        self.mode = Mode.IDLE
        self.num_steps = 0
        self.owner: Counters | None = None
        """Counters of the collector that started them."""
        self.on_loss: OnLoss = "rerun"
        self._of: list[list[Fragment]] = [[] for _ in range(workers)]
        self._side = 0
        self._num_sides = 2
        self._arrived: deque[Fragment] = deque()
        self.done: deque[Done] = deque(maxlen=_DONE)

    def __iter__(self) -> Iterator[Fragment]:
        return (fragment for fragments in self._of for fragment in fragments)

    def _in(self, *states: FragmentState) -> list[Fragment]:
        return [fragment for fragment in self if fragment.state in states]

    @property
    def running(self) -> list[Fragment]:
        return self._in(FragmentState.RUNNING)

    @property
    def unfinished(self) -> list[int]:
        """Workers whose fragment of the rollout has not arrived."""
        return [f.worker for f in self._in(FragmentState.QUEUED, FragmentState.RUNNING) if f.is_wanted]

    @property
    def is_rollout_begun(self) -> bool:
        """Whether a rollout was started and not yet delivered; late fragments of the one before do not count."""
        return self.mode is Mode.ROLLOUT and not all(fragment.is_late for fragment in self)

    @property
    def has_data(self) -> bool:
        return any(fragment.result is not None for fragment in self._in(FragmentState.ARRIVED))

    def is_abandoned(self, worker: int) -> bool:
        """Return whether this worker still runs a fragment that was abandoned."""
        return any(not fragment.is_wanted for fragment in self._of[worker])

    # -- beginning --------------------------------------------------------------------------------------------

    def start_rollout(self, num_steps: int, on_loss: OnLoss, owner: Counters, lengths: Sequence[int]) -> None:
        """Queue a fragment for each worker, of at most `num_steps` steps: `lengths` has the steps of each.

        The late fragment of a worker is its fragment of this rollout.
        """
        self._start(Mode.ROLLOUT, num_steps, owner)
        self.on_loss = on_loss
        self._side = 1 - self._side
        for worker, fragments in enumerate(self._of):
            if fragments:
                fragments[0].is_late = False
            else:
                fragments.append(Fragment(worker, self._side, lengths[worker]))

    def start_stream(self, num_steps: int, num_sides: int, owner: Counters) -> None:
        self._start(Mode.STREAM, num_steps, owner)
        self._num_sides = num_sides

    def _start(self, mode: Mode, num_steps: int, owner: Counters) -> None:
        is_free = all(fragment.is_late for fragment in self) and (mode is self.mode or self.mode is Mode.IDLE)
        assert is_free, "fragments of an earlier call are under way"
        self.mode, self.num_steps, self.owner = mode, num_steps, owner

    def next(self, worker: int, is_leaving: bool) -> Fragment | None:
        """Return the next fragment to request from this worker; None: there is none, or no free side for it.

        `is_leaving`: its slots move to another node. It runs one more only if it has none to end their episodes with.
        """
        if self.mode is Mode.ROLLOUT:
            return next((f for f in self._of[worker] if f.state is FragmentState.QUEUED), None)
        if self.mode is Mode.IDLE or (is_leaving and self._of[worker]):
            return None
        side = self._free_side(worker)
        return None if side is None else Fragment(worker, side, self.num_steps)

    def _free_side(self, worker: int) -> int | None:
        used = {fragment.side for fragment in self._of[worker]}
        return next((side for side in range(self._num_sides) if side not in used), None)

    def with_room(self) -> list[int]:
        """Return the workers of a stream that have a free side."""
        return [worker for worker in range(len(self._of)) if self._free_side(worker) is not None]

    def asked(self, fragment: Fragment, number: int, incarnations: list[int], now_s: float) -> None:
        if self.mode is Mode.STREAM:
            self._of[fragment.worker].append(fragment)
        fragment.asked_at_s = now_s
        fragment.state, fragment.number, fragment.incarnations = FragmentState.RUNNING, number, incarnations

    # -- arriving ---------------------------------------------------------------------------------------------

    def arrived(self, worker: int, number: int, result: FragmentResult, now_s: float) -> Fragment:
        """Record the answer to request `number`. Return its fragment."""
        fragment = next(f for f in self._of[worker] if f.number == number and f.state is FragmentState.RUNNING)
        busy = (result.env_s, result.policy_s, result.num_steps, result.version)
        self.done.append(Done(worker, fragment.asked_at_s, now_s, *busy))
        if not fragment.is_wanted:
            self._of[worker].remove(fragment)
            return fragment
        self._arrive(fragment, result)
        return fragment

    def _arrive(self, fragment: Fragment, result: FragmentResult | None) -> None:
        fragment.state, fragment.result = FragmentState.ARRIVED, result
        if self.mode is Mode.STREAM:
            self._arrived.append(fragment)

    def worker_lost(self, worker: int) -> None:
        """Drop, mask or requeue the unfinished fragments of a worker whose process is gone."""
        for fragment in list(self._of[worker]):
            if fragment.state is not FragmentState.RUNNING:
                continue
            if self.mode is not Mode.ROLLOUT or not fragment.is_wanted:
                self._of[worker].remove(fragment)
            elif self.on_loss == "mask" or fragment.is_late:  # a late one: the next rollout has to report its loss
                self._arrive(fragment, None)
            else:
                fragment.state, fragment.was_lost = FragmentState.QUEUED, True
        if self.mode is Mode.ROLLOUT and not any(self):
            self._clear()

    def worker_moved(self, worker: int) -> None:
        """Let the last finished fragment that the learner has not received end the episodes of slots that move."""
        finished = [f for f in self._of[worker] if f.state in (FragmentState.ARRIVED, FragmentState.READ)]
        if finished:
            finished[-1].is_last = True
        self.worker_lost(worker)

    # -- delivering -------------------------------------------------------------------------------------------

    def pop_rollout(self) -> list[Fragment]:
        """Return the fragments of a rollout, by worker: of those that have not arrived, an empty one without a result.

        Those that run are late. They are delivered with the next rollout. One that waits to run again does not: the
        next call may be a step, so this rollout has to report its loss.
        """
        taken, running, rollout = [], self.running, (self.mode, self.num_steps, self.owner)
        for fragment in self:
            is_lost = fragment.was_lost and fragment.state is FragmentState.QUEUED
            if fragment.state is not FragmentState.ARRIVED and not is_lost:
                fragment = Fragment(fragment.worker, fragment.side, 0)
            taken.append(fragment)
        self._clear()
        for fragment in running:
            self.mode, self.num_steps, self.owner = rollout
            fragment.is_late = True
            self._of[fragment.worker].append(fragment)
        return taken

    def pop_next(self) -> Fragment | None:
        """Return the next fragment of a stream, in order of arrival. It occupies its side until `release`."""
        if not self._arrived:
            return None
        fragment = self._arrived.popleft()
        fragment.state = FragmentState.READ
        return fragment

    def put_back(self, fragment: Fragment) -> None:
        """Put a fragment back at the front, for a later batch."""
        fragment.state = FragmentState.ARRIVED
        self._arrived.appendleft(fragment)

    def release(self, fragment: Fragment) -> None:
        """Free the side of a fragment that was copied into a batch."""
        self._of[fragment.worker].remove(fragment)

    def drop(self) -> None:
        """Abandon all fragments, and count them as dropped for the collector that started them."""
        owner, dropped = self.owner, self.abandon()
        if owner is not None:
            owner.counts["dropped_fragments"] += dropped

    def abandon(self) -> int:
        """Abandon all fragments: those that run are finished, then dropped. Return how many are dropped."""
        if self.mode is Mode.IDLE:
            return 0
        running = self.running
        dropped = len(running) + len(self._in(FragmentState.ARRIVED))
        self._clear()
        for fragment in running:
            fragment.is_wanted = False
            self._of[fragment.worker].append(fragment)
        return dropped

    def _clear(self) -> None:
        self.mode, self.owner = Mode.IDLE, None
        self._arrived.clear()
        for fragments in self._of:
            fragments.clear()
