"""Answers of workers on other machines: check each against its request in the ledger, then write it.

Enters: requests that are sent, and answers of nodes. Leaves: rows and fragments in the memory of this process, and
replies for the engine. Only the request ledger knows the requests; this module keeps the shards that owe one answer for
all their workers, and how many bytes each shard may still send. A node whose answer raises here is ended by the caller.
"""

from __future__ import annotations

import mmap
from typing import Any

from clusterenv.engine.answers import Known, check, check_step, limit_bytes, record, unpack
from clusterenv.engine.requests import Request, Requests
from clusterenv.errors import ProtocolError
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.memory.rows import Buffers, Layout
from clusterenv.memory.transfer import Block, write_fragment, write_rows
from clusterenv.wire.channel import Brings
from clusterenv.wire.messages import Answer, SteppedAll

__all__ = ["RemoteAnswers"]

Replies = list[tuple[int, Any]]
"""(worker, reply)"""


class RemoteAnswers:
    """Check and write the answers of workers on other machines.

    Args:
        workers: the workers of each shard.
        open_bytes: per shard, the maximum size of its open answers; updated here.
    """

    def __init__(
        self,
        requests: Requests,
        slots_of: list[list[int]],
        workers: list[list[int]],
        is_vector: bool,
        open_bytes: list[int],
    ) -> None:
        self._requests = requests
        self._slots_of = slots_of
        self._workers = workers
        self._shard_of = {worker: shard for shard, its in enumerate(workers) for worker in its}
        self._open_bytes = open_bytes
        self._is_vector = is_vector
        self._known = [Known(slots, is_vector=is_vector) for slots in slots_of]
        self._stepping: set[int] = set()  # shards that owe one answer for all workers to the step of all slots
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
        limits = [limit_bytes(self._requests.part_of_step(w), known) for w, known in enumerate(self._known)]
        self._step_bytes = [sum(limits[worker] for worker in its) for its in self._workers]
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

    # -- requests ---------------------------------------------------------------------------------------------

    def expect(self, request: Request) -> None:
        """Accept answers to this request from now on: it is being sent."""
        request.reserved_bytes = limit_bytes(request, self._known[request.worker])
        self._open_bytes[self._shard_of[request.worker]] += request.reserved_bytes

    def expect_step(self, shard: int, running: set[int]) -> None:
        """Accept the answer of this shard to the step of all slots, from those of its workers that are running."""
        if running.issuperset(self._workers[shard]):
            self._stepping.add(shard)
            self._open_bytes[shard] += self._step_bytes[shard]
        else:
            for worker in running.intersection(self._workers[shard]):
                self.expect(self._requests.open_step(worker))

    def exited(self, worker: int) -> None:
        """Expect nothing more from a worker whose process is gone. The others of its shard answer steps one by one."""
        self._divide_step(self._shard_of[worker])
        for request in self._requests.of(worker):
            self._expect_no_more(request)

    def busy_shards(self) -> set[int]:
        """Return the shards with a request that a move would lose for good; a step under way does not count."""
        return {
            self._shard_of[request.worker]
            for request in self._requests
            if request.reserved_bytes and request.brings is not Brings.ROWS
        }

    # -- answers ----------------------------------------------------------------------------------------------

    def of_shard(self, shard: int, stepped: SteppedAll, frames: list[Any]) -> Replies | None:
        """Read the answer of a whole shard; None if no such step is open."""
        if shard not in self._stepping or stepped.request != self._requests.step_all:
            return None
        workers = self._workers[shard]
        if len(frames) != 1 + len(stepped.workers):
            raise ProtocolError("a whole step with the wrong number of frames")
        replies: dict[int, Any] = {}
        if stepped.workers:
            if len(set(stepped.workers)) < len(stepped.workers) or not set(stepped.workers) <= set(workers):
                raise ProtocolError(
                    f"a whole step of workers {list(stepped.workers)}, but shard {shard} has workers {workers}"
                )
            replies = {
                worker: check_step(self._requests.part_of_step(worker), self._known[worker], body)
                for worker, body in zip(stepped.workers, frames[1:], strict=True)
            }
        elif self._known[workers[0]].num_objects:
            raise ProtocolError("a whole step without the observations of spaces that have no fixed size")
        self._blocks[shard].write_rows(frames[0])
        self._stepping.discard(shard)
        self._open_bytes[shard] -= self._step_bytes[shard]
        return [(worker, replies.get(worker, stepped.request)) for worker in workers]

    def of_worker(self, answer: Answer, frames: list[Any]) -> Replies | None:
        """Read the answer of a worker, or a part of it; None if no such request is open."""
        worker, number = answer.worker, answer.request
        shard = self._shard_of[worker]
        if shard in self._stepping and number == self._requests.step_all:
            self._divide_step(shard)
        request = self._requests.get(worker, number)
        if request is None or not request.reserved_bytes:
            return None
        if request.brings is Brings.FRAGMENT and request is not self._next_fragment(worker):
            raise ProtocolError("a fragment that comes before an earlier one of the same worker")
        sent_bytes = sum(map(len, frames))
        if answer.packed:
            frames = unpack(request, self._known[worker], answer.packed, frames)
        reply = check(request, self._known[worker], answer.slots, answer.last, frames)
        if request.brings is Brings.FRAGMENT:
            result = reply.result
            saved_bytes = result.saved_bytes + sum(map(len, frames)) - sent_bytes
            reply = reply._replace(result=result._replace(saved_bytes=saved_bytes))
            slots, arena = self._slots_of[worker], self._arena
            assert arena is not None
            columns, done = slice(slots[0], slots[-1] + 1), reply.result.num_steps
            write_fragment(arena.sides[request.message.side], columns, request.message.num_steps, done, frames[1:])
        elif request.brings is Brings.ROWS:
            assert self.buffers is not None
            write_rows(self.buffers, answer.slots, frames[1])
        reply = record(request, answer.slots, reply, sent_bytes)
        if answer.last:
            self._expect_no_more(request)
        return [] if reply is None else [(worker, reply)]

    # -- helpers ----------------------------------------------------------------------------------------------

    def _next_fragment(self, worker: int) -> Request | None:
        """Return the first fragment that this worker has yet to send: in a stream, several are open."""
        fragments = (request for request in self._requests.of(worker) if request.brings is Brings.FRAGMENT)
        return next((request for request in fragments if request.reserved_bytes), None)

    def _expect_no_more(self, request: Request) -> None:
        self._open_bytes[self._shard_of[request.worker]] -= request.reserved_bytes
        request.reserved_bytes = 0

    def _divide_step(self, shard: int) -> None:
        """Expect the workers of a shard to answer a whole step one by one, not with the usual single answer."""
        if shard in self._stepping:
            self._stepping.discard(shard)
            self._open_bytes[shard] -= self._step_bytes[shard]
            for worker in self._workers[shard]:
                self.expect(self._requests.open_step(worker))
