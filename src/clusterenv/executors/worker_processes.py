"""Worker processes of this machine: requests in as bytes, messages out. Used by the local executor and by nodes.

Each worker has a socket pair, the fork server a control pair. Only `poll` and `close` block, and both have a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import re
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from clusterenv.engine.inputs import Exit, Stack
from clusterenv.errors import ClusterEnvError, SpecError
from clusterenv.events import emit
from clusterenv.executors.contract import Printed
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.progress import BELL, PROGRESS_BYTES, TICK
from clusterenv.memory.rows import Layout
from clusterenv.policy.onnx.actor import preload
from clusterenv.spec import Blueprint
from clusterenv.system.exits import how_it_ended
from clusterenv.system.open_files import allow_open_files
from clusterenv.wire.channel import FrameReader, encode, encode_quick
from clusterenv.wire.requests import Close
from clusterenv.worker.main import SharedMemory
from clusterenv.worker.setup import ForkServerSetup, WorkerConfig

__all__ = ["WorkerProcesses", "write_weights"]

_PROGRESS_WORDS = PROGRESS_BYTES // 4
_RECEIVE_TIMEOUT = struct.pack("@ll", 0, 250_000)
"""A timeval: how long a whole step waits for one worker before all of them are polled."""


class _Link:
    """This process's end of the channel to one worker."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader()
        self.outbox = bytearray()
        self.pid = 0
        self.lost_at: float | None = None
        self.killed_for = ""
        """Why this process killed it, if its exit status does not show that."""


class WorkerProcesses:
    """Manage `workers` processes, forked from a separate interpreter.

    `weights_fd`: where they read weights, on a node whose shards share them.
    """

    def __init__(self, blueprint: Blueprint, workers: int, config: WorkerConfig, weights_fd: int | None = None) -> None:
        # Per worker: its channel here; its pidfd and the pipe of its output in the fork server.
        allow_open_files(f"{workers} worker processes", more=workers + 16, in_child=2 * workers + 24)
        self._setup = ForkServerSetup.of(blueprint, config)
        self._owner = os.getpid()
        self._links: dict[int, _Link] = {}
        self._losing: dict[int, float] = {}  # worker → when its channel closed; the fork server's report is awaited
        self._by_fd: dict[int, int] = {}
        self._poller = select.epoll()
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._events: list[tuple[int, Any]] = []
        self._memory: mmap.mmap | None = None
        self._scratch = bytearray(1 << 18)  # reused: a new buffer per message would cost more
        self._scratch_view = memoryview(self._scratch)
        self._shared = SharedMemory(*(os.memfd_create(f"clusterenv-{name}") for name in SharedMemory._fields))
        if weights_fd is not None:
            os.dup2(weights_fd, self._shared.weights, inheritable=False)
        os.ftruncate(self._shared.progress, PROGRESS_BYTES * workers)
        self._progress_map = mmap.mmap(self._shared.progress, 0)
        self._fragments: mmap.mmap | None = None
        self._progress = memoryview(self._progress_map).cast("i")

    # -- starting ---------------------------------------------------------------------------------------------

    def start(self, index: int) -> None:
        """Fork worker `index`. Its first message must be `Build`."""
        if self._control is None:
            self._start_server()
        ours, theirs = socket.socketpair()
        with theirs:
            # Only whole steps block, and not for long: everything else passes MSG_DONTWAIT.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECEIVE_TIMEOUT)
            self._progress[index * _PROGRESS_WORDS] = -1
            self._tell(("spawn", index), [theirs.fileno(), *self._shared])
        self._links[index] = _Link(ours)
        self._by_fd[ours.fileno()] = index
        self._poller.register(ours, select.EPOLLIN)

    def _start_server(self) -> None:
        if not sys.executable:
            raise SpecError("sys.executable is empty: this interpreter cannot start another; use Local(workers=0)")
        env = dict(os.environ)
        threads = self._setup.config.threads
        if threads is not None:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
                env[name] = str(threads)
        # The child must find this package even if the script put it on sys.path by hand.
        package_parent = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, env.get("PYTHONPATH")]))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "clusterenv.worker.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A head that was started without one of these has no descriptor for its children to inherit.
                stdout=None if sys.__stdout__ is not None else subprocess.DEVNULL,
                stderr=None if sys.__stderr__ is not None else subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the head, which then closes
            )
        self._control = ours
        self._poller.register(ours, select.EPOLLIN)
        setup_fd = os.memfd_create("clusterenv-setup")
        try:
            with os.fdopen(os.dup(setup_fd), "wb") as file:
                pickle.dump(self._setup, file)
            os.lseek(setup_fd, 0, os.SEEK_SET)
            self._tell(("setup",), [setup_fd])
        finally:
            os.close(setup_fd)
        if self._setup.imports_onnx:  # here too, for the export: this process would only wait for the fork server
            preload()

    def _tell(self, message: tuple[Any, ...], fds: list[int]) -> None:
        assert self._control is not None
        with contextlib.suppress(ConnectionError):  # `poll` notices a dead server by its end of file
            socket.send_fds(self._control, [pickle.dumps(message)], fds)

    # -- memory -----------------------------------------------------------------------------------------------

    def allocate(self, layout: Layout) -> mmap.mmap:
        """Return the shared memory of the rows, which every worker maps when it receives the layout."""
        os.ftruncate(self._shared.rows, layout.size)
        self._memory = mmap.mmap(self._shared.rows, 0)
        return self._memory

    def allocate_arena(self, layout: ArenaLayout) -> mmap.mmap:
        """Return the shared memory of fragments, which workers map when they receive its layout. It never shrinks."""
        os.ftruncate(self._shared.fragments, max(layout.size, os.fstat(self._shared.fragments).st_size))
        if self._fragments is not None:
            with contextlib.suppress(BufferError):  # the user still holds a view: freed with it
                self._fragments.close()
        self._fragments = mmap.mmap(self._shared.fragments, 0)
        return self._fragments

    # -- messages ---------------------------------------------------------------------------------------------

    def ring(self, request: int) -> bytes:
        """Ask every worker to step all its slots. Return the bytes sent: the usual answer is identical."""
        data = encode_quick(request)
        for index, link in self._links.items():
            if link.outbox or link.lost_at is not None:
                self._queue(link, data)
            else:
                try:
                    link.sock.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._queue(link, data)
                except ConnectionError:
                    continue  # end of file follows
            self._progress[index * _PROGRESS_WORDS + BELL] = request & 0x7FFF_FFFF
        return data

    def forward(self, index: int, frame: bytes) -> None:
        """Send an encoded request."""
        link = self._links.get(index)
        if link is not None:  # else its `Exit` was already returned, and settles its requests
            self._queue(link, frame)
            at = index * _PROGRESS_WORDS + BELL
            self._progress[at] = (self._progress[at] + 1) & 0x7FFF_FFFF

    def _queue(self, link: _Link, data: bytes) -> None:
        """Send without blocking: a worker may itself be blocked while it writes a large reply to this process."""
        link.outbox += data
        self._push(link)

    def _push(self, link: _Link) -> None:
        if link.lost_at is not None:
            return
        try:
            while link.outbox:
                sent = link.sock.send(memoryview(link.outbox)[: 1 << 18], socket.MSG_DONTWAIT)
                del link.outbox[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            link.outbox.clear()
        wanted = select.EPOLLIN | (select.EPOLLOUT if link.outbox else 0)
        self._poller.modify(link.sock, wanted)

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Return (worker, message) pairs: an int, an answer or `Raw`; `Printed`, `Stack`, `Exit`. May be empty."""
        events, self._events = self._events, []
        if events:
            timeout_s = 0.0
        if self._losing:
            timeout_s = min(timeout_s, 0.1)
        control = self._control.fileno() if self._control is not None else -1
        for fd, what in self._poller.poll(timeout_s):
            if fd == control:
                self._read_control(events)
                continue
            index = self._by_fd.get(fd)
            if index is None:
                continue
            link = self._links[index]
            if what & select.EPOLLOUT:
                self._push(link)
            if what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read_worker(index, link, events)
        for index in list(self._losing):
            if time.monotonic() - self._losing[index] > 2.0:
                self._forget(index)
                events.append((index, Exit("ended for an unknown reason", "")))
        return events

    def _read_worker(self, index: int, link: _Link, events: list[tuple[int, Any]]) -> None:
        try:
            size = link.sock.recv_into(self._scratch, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            size = 0
        if size:
            events += [(index, message) for message in self._messages(index, link, size)]
        elif link.lost_at is None:
            # The fork server knows how it ended, and reports it next.
            link.lost_at = self._losing[index] = time.monotonic()
            self._poller.unregister(link.sock)
            self._tell(("kill", index, False), [])

    def _messages(self, index: int, link: _Link, size: int) -> list[Any]:
        """Decode what was read from a worker. If that fails, kill the worker: its request would stay unanswered."""
        if link.killed_for:
            return []  # it is being ended: rows that it sent later would be followed by their loss
        try:
            return link.reader.feed(self._scratch_view[:size])
        except Exception as error:  # unpickling runs code of the user's classes
            link.killed_for = f"was killed: its answer cannot be unpickled: {type(error).__name__}: {error}"
            self._tell(("kill", index, False), [])
            return link.reader.feed(b"")

    def _read_control(self, events: list[tuple[int, Any]]) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(1 << 17)
        except ConnectionError:
            data = b""
        if not data:
            self._server_died(events)
            return
        kind, *rest = pickle.loads(data)
        if kind == "spawned":
            self._links[rest[0]].pid = rest[1]
        elif kind == "output":
            events.append((rest[0], Printed(rest[1], rest[2])))
        elif kind == "stack":
            events.append((rest[0], Stack(_untag(rest[1]))))
        elif kind == "threads":
            emit(
                logging.WARNING,
                f"importing the environments' code started threads: {rest[0]}. Workers forked from that process would "
                "not have them, and could wait forever for their locks, so each worker imports the code itself, which "
                "takes longer and shares no memory. To avoid this, start such threads when an environment is made",
            )
        elif kind == "failed":
            raise SpecError(f"the environments' code could not be loaded in a worker:\n{rest[0]}")
        elif kind == "exited":
            index, pid, status, tail = rest
            link = self._links.get(index)
            if link is not None and link.pid == pid:
                # Replies that it sent before it died are complete.
                if link.lost_at is None:
                    self._read_worker(index, link, events)
                self._forget(index)
                reason = link.killed_for or how_it_ended(os.waitstatus_to_exitcode(status))
                events.append((index, Exit(reason, _untag(tail))))

    def _server_died(self, events: list[tuple[int, Any]]) -> None:
        assert self._control is not None and self._server is not None
        self._poller.unregister(self._control)
        self._control.close()
        self._control = None
        code = self._server.wait()
        for index in list(self._links):
            self._forget(index)
            events.append((index, Exit(f"ended with its fork server ({how_it_ended(code)})", "")))

    def _forget(self, index: int) -> None:
        link = self._links.pop(index)
        self._losing.pop(index, None)
        del self._by_fd[link.sock.fileno()]
        with contextlib.suppress(OSError):  # unregistered when its channel ended
            self._poller.unregister(link.sock)
        link.sock.close()

    # -- watching and ending ----------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._poller.fileno()

    def progress(self, index: int) -> tuple[int, int, int]:
        """Return (slot, phase, step of a fragment) that the worker is in; slot -1 before the first."""
        at = index * _PROGRESS_WORDS
        return self._progress[at], self._progress[at + 1], self._progress[at + TICK]

    def is_running(self, index: int) -> bool:
        return index in self._links

    def pid(self, index: int) -> int | None:
        link = self._links.get(index)
        return link.pid if link is not None and link.pid else None

    def kill(self, index: int) -> None:
        """Kill a hung worker; its `Exit` says where it hung."""
        self._tell(("kill", index, True), [])

    def stack(self, index: int) -> None:
        """Request the worker's stack; answered by a `Stack`."""
        self._tell(("stack", index), [])

    def signal(self, word: int, value: int) -> None:
        """Set a word of `memory.progress` for all workers: STOP or LINK."""
        for index in self._links:
            self._progress[index * _PROGRESS_WORDS + word] = value

    def close(self, timeout_s: float) -> None:
        """End all processes within about `timeout_s` + 4 s, whatever their state. Idempotent."""
        if os.getpid() != self._owner:
            return  # a fork of the head: the workers belong to the parent
        try:
            deadline = time.monotonic() + timeout_s
            for index in list(self._links):
                self.forward(index, encode(Close(0)))
            while self._links and time.monotonic() < deadline:
                self.poll(max(0.0, deadline - time.monotonic()))
        except (ClusterEnvError, OSError) as error:
            emit(logging.DEBUG, f"while closing: {error}")
        finally:
            self._end_now()

    def _end_now(self) -> None:
        for index in list(self._links):
            self._forget(index)
        if self._control is not None:
            self._control.close()  # the fork server sees the end of file, and kills what is left
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        progress, self._progress = self._progress, memoryview(bytearray(self._progress.nbytes)).cast("i")
        progress.release()
        with contextlib.suppress(BufferError):
            self._progress_map.close()
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # the user still holds a view: freed with it
                self._memory.close()
            self._memory = None
        if self._fragments is not None:
            with contextlib.suppress(BufferError):
                self._fragments.close()
            self._fragments = None
        self._poller.close()
        for fd in self._shared:
            if fd >= 0:
                os.close(fd)
        self._shared = SharedMemory(-1, -1, -1, -1)


def write_weights(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write weights where workers read them; the file grows as needed."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _untag(text: str) -> str:
    return re.sub("\x00-?\\d+\x00", "", text)
