"""The loop of one worker process: requests in, rows and replies out. Called by the fork server, never returns.

Dies with its parent (PR_SET_PDEATHSIG), so that nothing outlives the head however it ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import mmap
import os
import random
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

import numpy as np
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
    FrameReader,
    LoadWeights,
    MapArena,
    Rebuild,
    Reply,
    Reset,
    RunFragment,
    SetAttr,
    SetPolicy,
    Step,
    encode,
    encode_quick,
)
from clusterenv.pool.vector_group import VectorGroup
from clusterenv.spec import Vector

__all__ = ["BELL", "PROGRESS_BYTES", "SharedMemory", "make_group", "run"]

BELL = 2
"""Which progress word the head changes after it sent something: looking at it takes no system call."""

PROGRESS_BYTES = 64
"""Progress words of one worker: a cache line each, so that workers do not share one."""

_PR_SET_PDEATHSIG = 1


class SharedMemory(NamedTuple):
    """Descriptors of what head and workers share."""

    rows: int
    progress: int
    fragments: int
    weights: int


def make_group(makers: Any, mode: AutoresetMode | None, check: bool, progress: memoryview) -> EnvGroup | VectorGroup:
    if isinstance(makers, Vector):
        return VectorGroup(makers, mode, check, progress)
    return EnvGroup(makers, mode or AutoresetMode.NEXT_STEP, check, progress)


class _TaggedOutput(io.TextIOBase):
    """sys.stdout or sys.stderr of a worker: each line is marked with the slot that was running."""

    def __init__(self, fd: int, progress: memoryview) -> None:
        self._fd = fd
        self._at = progress
        self._line = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            os.write(self._fd, f"\x00{self._at[0]}\x00{line}\n".encode(errors="replace"))
        return len(text)


def run(
    index: int,
    channel: socket.socket,
    memory: SharedMemory,
    makers: Any,
    mode: AutoresetMode | None,
    check: bool,
    spin_s: float,
) -> None:
    """Serve requests until the head closes the channel."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above took effect
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to handle
    progress_map = mmap.mmap(memory.progress, 0)
    progress = memoryview(progress_map).cast("i")[index * PROGRESS_BYTES // 4 :]
    sys.stdout = _TaggedOutput(1, progress)
    sys.stderr = _TaggedOutput(2, progress)
    faulthandler.enable(file=2, all_threads=True)
    # Forked siblings would otherwise share the state of the global generators.
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))

    group = make_group(makers, mode, check, progress)
    receiver = _Receiver(channel, progress, spin_s)
    reader = FrameReader()

    def send(reply: Any) -> None:
        channel.sendall(encode_quick(reply) if isinstance(reply, int) else encode(reply))

    while True:
        data = receiver.receive()
        if not len(data):
            os._exit(0)
        for message in reader.feed(data):
            if isinstance(message, int):
                reply: Any = group.step_all(message)
                send(message if reply is None else reply)
            elif isinstance(message, Step):
                send(group.step(message, send))
            elif isinstance(message, (Reset, Rebuild)):
                send(group.reset(message))
            elif isinstance(message, (Call, SetAttr)):
                send(group.call(message))
            elif isinstance(message, Build):
                send(group.build(message))
            elif isinstance(message, Attach):
                buffers = Buffers(message.layout, mmap.mmap(memory.rows, 0))
                group.attach(buffers, message.observation_space, message.action_space)
                if isinstance(group, EnvGroup):
                    loop = FragmentLoop(group, message.observation_space)
            elif isinstance(message, RunFragment):
                send(loop.run(message))
            elif isinstance(message, LoadWeights):
                send(loop.load(message, memoryview(mmap.mmap(memory.weights, 0, prot=mmap.PROT_READ))))
            elif isinstance(message, Evaluate):
                send(loop.evaluate(message))
            elif isinstance(message, SetPolicy):
                send(loop.set_policy(message))
            elif isinstance(message, MapArena):
                loop.map_arena(message.layout, mmap.mmap(memory.fragments, 0))
            elif isinstance(message, Close):
                group.close()
                if isinstance(group, EnvGroup):
                    loop.close()
                sys.stdout.flush()
                send(Reply(message.request, []))
                os._exit(0)


class _Receiver:
    """Reads from the channel; waits awake first, because waking a halted core costs more than a small batch's head.

    Where waiting awake was in vain (a learner thinks between two steps), it is given up for a growing number of
    requests, so that it takes no time from that learner.
    """

    def __init__(self, channel: socket.socket, bell: memoryview, spin_s: float) -> None:
        self._channel = channel
        self._bell = bell
        self._rung = bell[BELL]
        self._spin_s = spin_s
        self._asleep = 0
        self._misses = 0
        self._buffer = memoryview(bytearray(1 << 16))

    def receive(self) -> memoryview:
        """What the head sent, valid until the next call; empty when it is gone."""
        if self._asleep:
            self._asleep -= 1
        elif self._spin_s > 0:
            bell, rung = self._bell, self._rung
            end = time.perf_counter() + self._spin_s
            while bell[BELL] == rung and time.perf_counter() < end:
                os.sched_yield()
            if bell[BELL] == rung:
                self._misses = min(self._misses + 1, 10)
                self._asleep = (1 << self._misses) - 2  # one miss alone is forgiven
            else:
                self._misses = 0
        size = self._channel.recv_into(self._buffer)
        self._rung = self._bell[BELL]
        return self._buffer[:size]
