"""The calling process as its own and only worker (`Local(workers=0)`): for a breakpoint in environment code.

Same face as `ProcessCrew`; requests are carried out at once, and no timeout ends a debugging session.
"""

from __future__ import annotations

import mmap
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.pool.fragment import FragmentLoop
from clusterenv.pool.group import EnvGroup
from clusterenv.pool.layout import Buffers
from clusterenv.pool.messages import (
    Attach,
    Build,
    Call,
    Close,
    Evaluate,
    LoadWeights,
    MapArena,
    Rebuild,
    Reset,
    RunFragment,
    SetAttr,
    SetPolicy,
    Step,
)
from clusterenv.pool.worker import PROGRESS_BYTES, make_group
from clusterenv.spec import Blueprint, load_makers

__all__ = ["InlineCrew"]


class InlineCrew:
    is_inline = True

    def __init__(self, blueprint: Blueprint, mode: AutoresetMode | None, check: bool) -> None:
        self._makers = load_makers(blueprint.payload, blueprint.num_envs)
        self._mode = mode
        self._check = check
        self._at = memoryview(bytearray(PROGRESS_BYTES)).cast("i")
        self._weights = b""
        self._events: list[tuple[int, Any]] = []

    def start(self, index: int) -> None:
        self._group = make_group(self._makers, self._mode, self._check, self._at)

    def allocate(self, size: int) -> bytearray:
        self._memory = bytearray(size)
        return self._memory

    def allocate_arena(self, size: int) -> mmap.mmap:
        self._fragments = mmap.mmap(-1, size)
        return self._fragments

    def put_weights(self, data: bytes, version: int) -> int:
        self._weights = data
        return 0

    def ring(self, request: int) -> None:
        reply = self._group.step_all(request)
        self._events.append((0, request if reply is None else reply))

    def take(self, index: int) -> list[Any]:
        return [message for _, message in self.wait(0.0)]

    def send(self, index: int, message: Any) -> None:
        group = self._group
        if isinstance(message, Step):
            reply: Any = group.step(message, lambda part: self._events.append((index, part)))
        elif isinstance(message, (Reset, Rebuild)):
            reply = group.reset(message)
        elif isinstance(message, (Call, SetAttr)):
            reply = group.call(message)
        elif isinstance(message, Build):
            reply = group.build(message)
        elif isinstance(message, Attach):
            buffers = Buffers(message.layout, self._memory)
            group.attach(buffers, message.observation_space, message.action_space)
            if isinstance(group, EnvGroup):
                self._loop = FragmentLoop(group, message.observation_space)
            return
        elif isinstance(message, RunFragment):
            reply = self._loop.run(message)
        elif isinstance(message, Evaluate):
            reply = self._loop.evaluate(message)
        elif isinstance(message, SetPolicy):
            reply = self._loop.set_policy(message)
        elif isinstance(message, LoadWeights):
            reply = self._loop.load(message, memoryview(self._weights))
        elif isinstance(message, MapArena):
            self._loop.map_arena(message.layout, self._fragments)
            return
        else:
            assert isinstance(message, Close)
            return
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
        if hasattr(self, "_group"):
            self._group.close()
        if hasattr(self, "_loop"):
            self._loop.close()
