"""The calling process as its own and only worker (`Local(workers=0)`): for a breakpoint in environment code.

Same face as `ProcessCrew`; requests are carried out at once, and no timeout ends a debugging session.
"""

from __future__ import annotations

import mmap
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.pool.dispatch import Dispatcher
from clusterenv.pool.messages import Close
from clusterenv.pool.worker import PROGRESS_BYTES
from clusterenv.spec import Blueprint, Vector, load_makers

__all__ = ["InlineCrew"]


class _Own:
    """`Memory` that nobody shares."""

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


class InlineCrew:
    is_inline = True

    def __init__(
        self, blueprint: Blueprint, mode: AutoresetMode | None, check: bool, slots: list[int] | None = None
    ) -> None:
        makers = load_makers(blueprint.payload, blueprint.num_envs)
        self._makers = makers if slots is None or isinstance(makers, Vector) else [makers[slot] for slot in slots]
        self._mode = mode
        self._check = check
        self._at = memoryview(bytearray(PROGRESS_BYTES)).cast("i")
        self._memory = _Own()
        self._events: list[tuple[int, Any]] = []
        self._dispatcher: Dispatcher | None = None

    def start(self, index: int) -> None:
        self._dispatcher = Dispatcher(self._makers, self._mode, self._check, self._at, self._memory)

    def allocate(self, size: int) -> bytearray:
        self._memory.row_bytes = bytearray(size)
        return self._memory.row_bytes

    def allocate_arena(self, size: int) -> mmap.mmap:
        self._memory.arena = mmap.mmap(-1, size)
        return self._memory.arena

    def put_weights(self, data: bytes, offset: int) -> None:
        held = self._memory.weight_bytes
        self._memory.weight_bytes = held[:offset].ljust(offset, b"\0") + data + held[offset + len(data) :]

    def ring(self, request: int) -> None:
        self.send(0, request)

    def take(self, index: int) -> list[Any]:
        return [message for _, message in self.wait(0.0)]

    def send(self, index: int, message: Any) -> None:
        if isinstance(message, Close):
            return  # `close` does it
        assert self._dispatcher is not None
        reply = self._dispatcher.handle(message, lambda part: self._events.append((index, part)))
        if reply is not None:
            self._events.append((index, reply))

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        events, self._events = self._events, []
        return events

    def progress(self, index: int) -> tuple[int, int, int]:
        return self._at[0], self._at[1], 0

    def is_running(self, index: int) -> bool:
        return True

    def pid(self, index: int) -> int | None:
        return None

    def kill(self, index: int) -> None:
        raise AssertionError("timeouts are off in the calling process")

    def close(self, timeout_s: float) -> None:
        if self._dispatcher is not None:
            self._dispatcher.close()
