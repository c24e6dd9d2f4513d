"""The executor that uses the calling process as worker (`Local(workers=0)`), e.g. for a breakpoint in environment code.

Same interface as `ProcessExecutor`; requests are carried out at once, and no timeout ends a debugging session.
"""

from __future__ import annotations

import copy
import mmap
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.engine.collecting.weights import Transfer
from clusterenv.engine.inputs import Cause, Exit
from clusterenv.engine.requests import Request
from clusterenv.executors.contract import is_plain
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.progress import PROGRESS_BYTES
from clusterenv.memory.rows import Layout
from clusterenv.spec import Blueprint, load_makers
from clusterenv.system import interrupts
from clusterenv.wire.requests import Close, Reply
from clusterenv.worker.dispatch import Dispatcher

__all__ = ["InlineExecutor"]


class _Own:
    """`Memory` that is not shared."""

    def __init__(self) -> None:
        self.weight_bytes = b""

    def rows(self) -> bytearray:
        return self.row_bytes

    def fragments(self) -> mmap.mmap:
        return self.arena

    def weights(self) -> memoryview:
        return memoryview(self.weight_bytes)

    row_bytes: bytearray
    arena: mmap.mmap


class InlineExecutor:
    processes = None
    nodes = None

    def __init__(self, blueprint: Blueprint, mode: AutoresetMode | None, check: bool, workers: int = 1) -> None:
        self._makers = load_makers(blueprint.payload, blueprint.num_envs, blueprint.is_named, is_here=True)
        self._mode = mode
        self._check = check
        self._at = [memoryview(bytearray(PROGRESS_BYTES)).cast("i") for _ in range(workers)]
        self._memory = [_Own() for _ in range(workers)]
        self._events: list[tuple[int, Any]] = []
        self._dispatchers: dict[int, Dispatcher] = {}
        self._interrupted: set[int] = set()
        """Workers with an environment that Ctrl-C interrupted: they do nothing until they are started again."""
        interrupts.environments_opened(self)

    def start(self, index: int) -> None:
        self._interrupted.discard(index)
        if index in self._dispatchers:
            self._dispatchers[index].close()
        self._dispatchers[index] = Dispatcher(
            self._makers, self._mode, self._check, self._at[index], self._memory[index]
        )

    def allocate(self, layout: Layout) -> bytearray:
        rows = bytearray(layout.size)
        for memory in self._memory:
            memory.row_bytes = rows
        return rows

    def allocate_arena(self, layout: ArenaLayout) -> mmap.mmap:
        arena = mmap.mmap(-1, layout.size)
        for memory in self._memory:
            memory.arena = arena
        return arena

    def put_weights(self, transfer: Transfer) -> bool:
        """Store the weights for one worker: each worker is a separate node here."""
        memory, data, offset = self._memory[transfer.machine.node], transfer.weights.data, transfer.offset
        held = memory.weight_bytes
        memory.weight_bytes = held[:offset].ljust(offset, b"\0") + data + held[offset + len(data) :]
        return True

    def send(self, index: int, message: Any, request: Request | None = None) -> None:
        if isinstance(message, Close) or index in self._interrupted:
            return  # `close` does it; what was interrupted is gone, although its exit may not have been processed yet
        try:
            reply = self._run(index, message)
        except BaseException:  # Ctrl-C within an environment: its state is unknown
            self._events.append((index, Exit("was interrupted", "", Cause.INTERRUPTED)))
            self._interrupted.add(index)
            raise
        if reply is not None:
            self._answer(index, reply)

    def _answer(self, index: int, reply: Any) -> None:
        if isinstance(reply, Reply) and reply.objects:
            # Nothing is pickled here, and an environment may later modify what it returned.
            reply = reply._replace(objects=copy.deepcopy(reply.objects))
        self._events.append((index, reply))

    @interrupts.interruptible
    def _run(self, index: int, message: Any) -> Any:
        return self._dispatchers[index].handle(message, lambda part: self._answer(index, part))

    def step_all(self, number: int) -> tuple[int, list[tuple[int, Any]]] | None:
        waiting = list(self._dispatchers)
        try:
            while waiting:
                self.send(waiting.pop(0), number)
        finally:  # after Ctrl-C, the other workers answer without rows
            self._events += [(index, Reply(number, [])) for index in waiting]
        events = self.poll(0.0)
        done = 0
        while done < len(events) and is_plain(events[done][1], number):
            done += 1
        heard = [event for event in events if event[1] != number]
        return (done, heard) if heard else None

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        events, self._events = self._events, []
        return events

    def progress(self, index: int) -> tuple[int, int, int]:
        return self._at[index][0], self._at[index][1], 0

    def stats(self) -> dict[str, Any]:
        return {"output_lines_dropped": [0] * len(self._at)}  # environments print to the caller's own stdout

    def is_running(self, index: int) -> bool:
        return True

    def close(self, timeout_s: float) -> None:
        try:
            for dispatcher in self._dispatchers.values():
                dispatcher.close()
        finally:
            interrupts.environments_closed(self)
