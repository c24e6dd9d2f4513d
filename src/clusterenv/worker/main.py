"""Run the loop of one worker process: requests in, rows and replies out. Called by the fork server, never returns.

The process dies with its parent (PR_SET_PDEATHSIG), so that nothing outlives the head, however the head ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from clusterenv.memory.progress import BELL, LINK, PROGRESS_BYTES
from clusterenv.system.orphans import become_subreaper
from clusterenv.wire.channel import FrameReader, encode_answer, encode_quick, open_request
from clusterenv.wire.requests import Close
from clusterenv.worker.compressing import FragmentPacker
from clusterenv.worker.dispatch import Dispatcher
from clusterenv.worker.network_answers import NetworkAnswers
from clusterenv.worker.output import MarkedOutput
from clusterenv.worker.setup import ForkServerSetup

__all__ = ["STACK_SIGNAL", "SharedMemory", "run"]

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a worker write its stack to stderr, even with the GIL held. Simulators rarely use this signal themselves."""

_PR_SET_PDEATHSIG = 1


class SharedMemory(NamedTuple):
    """Descriptors of the memory that head and workers share."""

    rows: int
    progress: int
    fragments: int
    weights: int


class _Mapped:
    """`Memory` over inherited descriptors."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def rows(self) -> mmap.mmap:
        return mmap.mmap(self._shared.rows, 0)

    def fragments(self) -> mmap.mmap:
        return mmap.mmap(self._shared.fragments, 0)

    def weights(self) -> memoryview:
        return memoryview(mmap.mmap(self._shared.weights, 0, prot=mmap.PROT_READ))


def run(index: int, channel: socket.socket, memory: SharedMemory, makers: Any, setup: ForkServerSetup) -> None:
    """Serve requests until the head closes the channel. If the setup `is_named`, nothing is unpickled."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above took effect
        os._exit(0)
    become_subreaper()  # keeps processes that environments start apart from those of other workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C
    progress_map = mmap.mmap(memory.progress, 0)
    progress = memoryview(progress_map).cast("i")[index * PROGRESS_BYTES // 4 :]
    config = setup.config
    sys.stdout, sys.stderr = outputs = MarkedOutput(1, progress), MarkedOutput(2, progress)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    _seed_global_generators()

    mapped = _Mapped(memory)
    dispatcher = Dispatcher(makers, config.mode, config.check, progress, mapped, config.plain == "repr")
    receiver = _Receiver(channel, progress, config.spin_s)
    reader = FrameReader(open_request, allow_pickle=not setup.is_named)
    network = None
    if config.plain is not None:
        packer = FragmentPacker(
            config.compress, config.codecs, lambda: 1e3 * progress[LINK], time.monotonic, time.thread_time
        )
        network = NetworkAnswers(channel, config.plain, mapped.fragments, packer)

    def send_here(reply: Any) -> None:
        channel.sendall(encode_answer(reply))

    send = send_here if network is None else network.send
    while True:
        data = receiver.receive()
        if not len(data):
            os._exit(0)
        for message in reader.feed(data):
            if network is not None:
                network.begin(message)
            reply = dispatcher.handle(message, send)
            if isinstance(reply, int):  # a step of all slots whose answer is rows only
                channel.sendall(encode_quick(reply))
            elif reply is not None:
                send(reply)
            if isinstance(message, Close):
                for output in outputs:
                    output.end_line()
                os._exit(0)


def _seed_global_generators() -> None:
    """Seed the global random generators: forked siblings would otherwise all draw the same numbers."""
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    generator = getattr(sys.modules.get("torch"), "default_generator", None)  # torch seeds itself if imported later
    if generator is not None:
        generator.seed()


class _Receiver:
    """Read from the channel; spin first, because waking a halted core takes longer than stepping a small batch.

    When spinning was in vain (a learner computes between two steps), it is skipped for a growing number of requests,
    so that it takes no CPU time from that learner.
    """

    def __init__(self, channel: socket.socket, bell: memoryview, spin_s: float) -> None:
        self._channel = channel
        self._bell = bell
        self._stepped = bell[BELL]
        self._spin_s = spin_s
        self._asleep = 0
        self._misses = 0
        self._buffer = memoryview(bytearray(1 << 16))

    def receive(self) -> memoryview:
        """Return what the head sent, valid until the next call; empty when the head is gone."""
        if self._asleep:
            self._asleep -= 1
        elif self._spin_s > 0:
            bell, stepped = self._bell, self._stepped
            end = time.perf_counter() + self._spin_s
            while bell[BELL] == stepped and time.perf_counter() < end:
                os.sched_yield()
            if bell[BELL] == stepped:
                self._misses = min(self._misses + 1, 10)
                self._asleep = (1 << self._misses) - 2  # a single miss has no effect
            else:
                self._misses = 0
        size = self._channel.recv_into(self._buffer)
        self._stepped = self._bell[BELL]
        return self._buffer[:size]
