"""Requests to workers on other machines that are not answered yet, and what their answers do.

Enters: the ledger's `Request` with each message, a number with each whole step, and what nodes answer. Leaves: rows and
fragments in the memory of this process, and replies for the engine. An answer is checked before any of that
(`engine.answers`); whatever it raises ends the node.
"""

from __future__ import annotations

import mmap
from typing import Any

from clusterenv.engine.answers import Known, check, check_step, limit_bytes, record
from clusterenv.engine.requests import Kind, Request
from clusterenv.errors import ProtocolError
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.memory.rows import Buffers, Layout
from clusterenv.memory.transfer import Block, write_fragment, write_rows
from clusterenv.wire.messages import Answer, SteppedAll

__all__ = ["OpenRequests"]

Replies = list[tuple[int, Any]]
"""(worker, reply)"""


class OpenRequests:
    """
    Args:
        workers: of each shard.
        open_bytes: per shard, kept here: how much the answers may have.
    """

    def __init__(
        self, slots_of: list[list[int]], workers: list[list[int]], is_vector: bool, open_bytes: list[int]
    ) -> None:
        self._slots_of = slots_of
        self._workers = workers
        self._shard_of = {worker: shard for shard, its in enumerate(workers) for worker in its}
        self._open_bytes = open_bytes
        self._is_vector = is_vector
        self._known = [Known(slots, is_vector=is_vector) for slots in slots_of]
        self._open: list[dict[int, tuple[Request, int]]] = [{} for _ in slots_of]  # by number, with its limit
        self._steps: dict[int, int] = {}  # shard → the whole step that all its workers were asked for
        self._step_bytes: list[int] = [0] * len(workers)
        self.buffers: Buffers | None = None
        self._blocks: list[Block] = []  # per shard
        self._arena: Arena | None = None

    # -- memory -----------------------------------------------------------------------------------------------

    def allocate(self, layout: Layout) -> bytearray:
        memory = bytearray(layout.size)
        self.buffers = Buffers(layout, memory)
        slots = [[slot for worker in its for slot in self._slots_of[worker]] for its in self._workers]
        self._blocks = [Block(self.buffers, its) for its in slots]
        self._known = [Known(slots, layout, None, self._is_vector) for slots in self._slots_of]
        self._step_bytes = [sum(limit_bytes(self._step(w, 0), self._known[w]) for w in its) for its in self._workers]
        return memory

    def allocate_arena(self, layout: ArenaLayout) -> mmap.mmap:
        memory = mmap.mmap(-1, layout.size)
        self._arena = Arena(layout, memory)
        self._known = [known._replace(fragments=layout) for known in self._known]
        return memory

    def read_inputs(self, shard: int) -> bytes:
        """Return what the workers of a shard need for a whole step: sides and actions."""
        return self._blocks[shard].read_inputs()

    def free(self) -> None:
        self.buffers = self._arena = None
        self._blocks = []

    # -- asking -----------------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        limit = limit_bytes(request, self._known[request.worker])
        self._open[request.worker][request.number] = (request, limit)
        self._open_bytes[self._shard_of[request.worker]] += limit

    def open_step(self, shard: int, number: int, running: set[int]) -> None:
        """The workers of a shard that are running are asked for a whole step."""
        if running.issuperset(self._workers[shard]):
            self._steps[shard] = number
            self._open_bytes[shard] += self._step_bytes[shard]
        else:
            for worker in running.intersection(self._workers[shard]):
                self.open(self._step(worker, number))

    def exited(self, worker: int) -> None:
        """Its process is gone, and with it what it was asked. The others of its shard answer a step one by one."""
        self._divide_step(self._shard_of[worker])
        for number in list(self._open[worker]):
            self._close(worker, number)

    def busy_shards(self) -> set[int]:
        """Return the shards with a request that a move would lose for good; a step under way is not one."""
        return {
            self._shard_of[worker]
            for worker, requests in enumerate(self._open)
            if any(request.brings != "rows" for request, _ in requests.values())
        }

    # -- answers ----------------------------------------------------------------------------------------------

    def close_step(self, shard: int, stepped: SteppedAll, frames: list[Any]) -> Replies | None:
        """Take the answer of a whole shard; None where no such step is open."""
        if self._steps.get(shard) != stepped.request:
            return None
        workers = self._workers[shard]
        if len(frames) != 1 + len(stepped.workers):
            raise ProtocolError("a whole step with frames missing")
        replies: dict[int, Any] = {}
        if stepped.workers:
            if len(set(stepped.workers)) < len(stepped.workers) or not set(stepped.workers) <= set(workers):
                raise ProtocolError(
                    f"a whole step of workers {list(stepped.workers)}, where shard {shard} has {workers}"
                )
            replies = {
                worker: check_step(self._step(worker, stepped.request), self._known[worker], body)
                for worker, body in zip(stepped.workers, frames[1:], strict=True)
            }
        elif self._known[workers[0]].num_objects:
            raise ProtocolError("a whole step without the observations of spaces that have no fixed size")
        self._blocks[shard].write_rows(frames[0])
        del self._steps[shard]
        self._open_bytes[shard] -= self._step_bytes[shard]
        return [(worker, replies.get(worker, stepped.request)) for worker in workers]

    def take(self, answer: Answer, frames: list[Any]) -> Replies | None:
        """Take the answer of a worker, or a part of it; None where no such request is open."""
        worker, number = answer.worker, answer.request
        if self._steps.get(self._shard_of[worker]) == number:
            self._divide_step(self._shard_of[worker])
        request, _ = self._open[worker].get(number, (None, 0))
        if request is None:
            return None
        reply = check(request, self._known[worker], answer.slots, answer.last, frames)
        if request.brings == "fragment":
            slots, arena = self._slots_of[worker], self._arena
            assert arena is not None
            columns, done = slice(slots[0], slots[-1] + 1), reply.result.num_steps
            write_fragment(arena.sides[request.side], columns, request.num_steps, done, frames[1:])
        elif request.brings == "rows":
            assert self.buffers is not None
            write_rows(self.buffers, answer.slots, frames[1])
        reply = record(request, answer.slots, reply, sum(map(len, frames)))
        if answer.last:
            self._close(worker, number)
        return [] if reply is None else [(worker, reply)]

    # -- inside -----------------------------------------------------------------------------------------------

    def _close(self, worker: int, number: int) -> None:
        _, limit = self._open[worker].pop(number)
        self._open_bytes[self._shard_of[worker]] -= limit

    def _divide_step(self, shard: int) -> None:
        """Workers of a shard answer a whole step one by one: its usual form is a single answer for all of them."""
        number = self._steps.pop(shard, None)
        if number is not None:
            self._open_bytes[shard] -= self._step_bytes[shard]
            for worker in self._workers[shard]:
                self.open(self._step(worker, number))

    def _step(self, worker: int, number: int) -> Request:
        return Request(number, Kind.STEP, worker, self._slots_of[worker], "rows")
