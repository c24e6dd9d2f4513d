"""Run the process between the head and its workers: import the environments' code once, fork workers, watch them.

Started by `WorkerProcesses` as `python -m clusterenv.worker.forkserver FD`. It holds no environment and runs no user
code but imports. If these start threads, workers are not forked: each one imports the code itself. The fork server
collects the workers' output, reports how they ended, and ends them when the head is gone.

Messages are pickled tuples, one per packet of a SOCK_SEQPACKET pair:
    head → here:  ("setup",) + [setup fd] · ("spawn", index) + [channel, shared memory fds]
                  ("kill", index, with_traceback) · ("stack", index)
    here → head:  ("failed", text) · ("threads", names) · ("spawned", index, pid) · ("stack", index, text)
                  ("output", index, text, lines dropped before) · ("exited", index, pid, status, tail)
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from clusterenv.code import packages as sources
from clusterenv.policy.onnx.actor import preload
from clusterenv.spec import load_makers
from clusterenv.system.orphans import Orphans, become_subreaper, kill_group
from clusterenv.worker import main as worker
from clusterenv.worker.output import LineBuffer
from clusterenv.worker.setup import ForkServerSetup

__all__ = ["main"]

_TAIL_BYTES = 16_000
_OUTPUT_BYTES = 1 << 20
"""Most bytes of one worker's output to queue while the head does not read; lines beyond are dropped and counted."""

_PACKET_BYTES = 32_000
_STACK_S = 0.3
"""How long a worker may take to write its stack: microseconds of work, but it may have to wait for a core."""

_ORPHANS_S = 0.02
"""How soon to check again on orphans that were killed and have not ended yet."""


@dataclass
class _Child:
    index: int
    pid: int
    pidfd: int
    output: int
    tail: bytes = field(default=b"", init=False)
    lines: LineBuffer = field(default_factory=LineBuffer, init=False)
    queued_bytes: int = field(default=0, init=False)
    """Bytes of its output in the outbox."""
    dropped: int = field(default=0, init=False)
    """Dropped lines that are not reported yet."""
    kill_at: float | None = field(default=None, init=False)
    stack: bytes = field(default=b"", init=False)
    stack_until: float | None = field(default=None, init=False)
    """Until this time, its output is the requested stack."""


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, _Child] = {}  # by pidfd
        self._outputs: dict[int, _Child] = {}  # by the pipe of their output
        self._outbox: deque[tuple[bytes, _Child | None]] = deque()  # packets, and whose output they are
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._setup: ForkServerSetup | None = None
        self._makers: Any = None
        self._setup_fd = -1  # from which workers read the setup themselves; -1: they inherit it
        self._orphans = Orphans()
        self._has_orphans = False

    def serve(self) -> None:
        while True:
            wanted = select.POLLIN | (select.POLLOUT if self._outbox else 0)
            self._poller.modify(self._control, wanted)
            for fd, events in self._poller.poll(self._timeout_ms()):
                if fd == self._control.fileno():
                    if events & select.POLLOUT:
                        self._flush()
                    if events & (select.POLLIN | select.POLLHUP) and not self._command():
                        return
                elif fd in self._outputs:
                    self._read_output(self._outputs[fd])
                elif fd in self._children:
                    self._bury(self._children[fd])
            self._do_due(time.monotonic())

    def _timeout_ms(self) -> float | None:
        children = self._children.values()
        waiting = [at for child in children for at in (child.kill_at, child.stack_until) if at is not None]
        if self._has_orphans:
            waiting.append(time.monotonic() + _ORPHANS_S)
        return max(0.0, (min(waiting) - time.monotonic()) * 1000) if waiting else None

    def _do_due(self, now: float) -> None:
        """Kill workers whose time to write their stack is over; send the requested stacks."""
        for child in list(self._children.values()):
            if child.kill_at is not None and child.kill_at <= now:
                kill_group(child.pid)
                child.kill_at = None
            if child.stack_until is not None and child.stack_until <= now:
                self._send(("stack", child.index, child.stack[:_TAIL_BYTES].decode(errors="replace")))
                child.stack, child.stack_until = b"", None
        if self._has_orphans:
            self._end_orphans()

    def _command(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
        except ConnectionError:
            return False
        if not data:
            return False
        message = pickle.loads(data)
        if message[0] == "setup":
            self._set_up(fds[0])
        elif message[0] == "spawn":
            self._spawn(message[1], fds)
        elif message[0] == "stack":
            for child in self._children.values():
                if child.index == message[1]:
                    os.kill(child.pid, worker.STACK_SIGNAL)
                    child.stack_until = time.monotonic() + _STACK_S
        elif message[0] == "kill":
            for child in self._children.values():
                if child.index == message[1]:
                    # SIGABRT first: faulthandler then writes where the worker hangs, even with the GIL held.
                    os.kill(child.pid, signal.SIGABRT if message[2] else signal.SIGKILL)
                    child.kill_at = time.monotonic() + 0.3
        return True

    def _set_up(self, fd: int) -> None:
        try:
            self._setup, self._makers = _load(fd)
        except BaseException:
            self._send(("failed", traceback.format_exc()))
            return
        threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        if threads:
            # A fork would inherit the locks that these threads hold, but not the threads that release them.
            self._setup_fd = fd
            self._send(("threads", ", ".join(map(_described, threads))))
        else:
            os.close(fd)
        self._orphans.spare_present()
        gc.collect()
        gc.freeze()  # the workers' collectors would otherwise touch, and so copy, every inherited page

    def _spawn(self, index: int, fds: list[int]) -> None:
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)  # a simulator that the environment starts dies with its worker's group
                self._control.close()
                os.close(read_end)
                for fd in (*self._children, *self._outputs):
                    os.close(fd)
                os.dup2(write_end, 1)
                os.dup2(write_end, 2)
                os.close(write_end)
                if self._setup_fd >= 0:
                    _start_anew(index, [self._setup_fd, *fds])
                assert self._setup is not None
                _run_worker(index, self._makers, self._setup, fds)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(1)
        os.close(write_end)
        for fd in fds:
            os.close(fd)
        os.set_blocking(read_end, False)
        child = _Child(index, pid, os.pidfd_open(pid), read_end)
        self._children[child.pidfd] = self._outputs[read_end] = child
        self._poller.register(child.pidfd, select.POLLIN)
        self._poller.register(read_end, select.POLLIN)
        self._send(("spawned", index, pid))

    def _read_output(self, child: _Child) -> bool:
        try:
            data = os.read(child.output, 1 << 16)
        except BlockingIOError:
            return False
        if not data:  # closed by the worker itself; the pidfd reports its exit
            self._close_output(child)
            return False
        child.tail = (child.tail + data)[-_TAIL_BYTES:]
        if child.stack_until is not None:
            child.stack = (child.stack + data)[:_TAIL_BYTES]
            return True
        self._send_output(child, child.lines.feed(data))
        return True

    def _send_output(self, child: _Child, lines: list[bytes]) -> None:
        """Send lines in packets, and drop those beyond the limit. Every line fits into a packet."""
        while lines:
            size = count = 0
            while count < len(lines) and (not count or size + len(lines[count]) < _PACKET_BYTES):
                size, count = size + len(lines[count]) + 1, count + 1
            if child.queued_bytes + size > _OUTPUT_BYTES:
                child.dropped += len(lines)
                return
            text = b"\n".join(lines[:count]).decode(errors="replace")
            self._send(("output", child.index, text, child.dropped), child)
            child.dropped = 0
            del lines[:count]

    def _close_output(self, child: _Child) -> None:
        if self._outputs.pop(child.output, None) is not None:
            self._poller.unregister(child.output)
            os.close(child.output)

    def _bury(self, child: _Child) -> None:
        """Handle the end of a worker: send its last output, kill what is left of its process group, tell the head."""
        while child.output in self._outputs and self._read_output(child):
            pass
        self._close_output(child)
        self._send_output(child, child.lines.flush())
        if child.dropped:
            self._outbox.append((self._dropped(child), None))
        kill_group(child.pid)
        _, status = os.waitpid(child.pid, 0)
        self._poller.unregister(child.pidfd)
        del self._children[child.pidfd]
        os.close(child.pidfd)
        self._send(("exited", child.index, child.pid, status, child.tail.decode(errors="replace")))
        self._end_orphans()

    def _end_orphans(self) -> None:
        self._has_orphans = self._orphans.end({child.pid for child in self._children.values()})

    def _send(self, message: tuple[Any, ...], child: _Child | None = None) -> None:
        packet = pickle.dumps(message)
        if child is not None:
            child.queued_bytes += len(packet)
        self._outbox.append((packet, child))
        self._flush()

    def _dropped(self, child: _Child) -> bytes:
        dropped, child.dropped = child.dropped, 0
        return pickle.dumps(("output", child.index, "", dropped))

    def _flush(self) -> None:
        while self._outbox:
            packet, child = self._outbox[0]
            try:
                self._control.send(packet, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                self._outbox.clear()
                return
            self._outbox.popleft()
            if child is not None:
                child.queued_bytes -= len(packet)
                if not child.queued_bytes and child.dropped:
                    self._outbox.append((self._dropped(child), None))

    def stop(self) -> None:
        self._orphans.end_all(timeout_s=2.0)  # less than the head waits for this process


def _load(fd: int) -> tuple[ForkServerSetup, Any]:
    """Import what the environments need; return the setup and the functions that make them."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:  # noqa: PTH123 (needs its own file offset)
        setup: ForkServerSetup = pickle.load(file)
    sys.path[:] = setup.sys_path
    multiprocessing.current_process().authkey = setup.authkey
    if setup.delivered is not None:
        sources.install(*setup.delivered)
    for module in setup.modules:
        importlib.import_module(module)
    if setup.imports_onnx:
        preload()
    return setup, load_makers(setup.payload, setup.num_envs, setup.is_named)


def _described(thread: threading.Thread) -> str:
    """Return a thread's name and what it runs."""
    runs = getattr(thread, "_target", None) or type(thread)
    return f"{thread.name!r} ({getattr(runs, '__module__', '?')}.{getattr(runs, '__qualname__', runs)})"


def _run_worker(index: int, makers: Any, setup: ForkServerSetup, fds: list[int]) -> None:
    channel, *shared = fds
    worker.run(index, socket.socket(fileno=channel), worker.SharedMemory(*shared), makers, setup)


def _start_anew(index: int, fds: list[int]) -> None:
    """Replace this process by a worker that imports everything itself. Does not return."""
    for fd in fds:
        os.set_inheritable(fd, True)
    command = [sys.executable, "-m", "clusterenv.worker.forkserver", "worker", str(index), *map(str, fds)]
    os.execv(sys.executable, command)


def main() -> None:
    if sys.argv[1] == "worker":
        index, setup_fd, *fds = map(int, sys.argv[2:])
        setup, makers = _load(setup_fd)
        os.close(setup_fd)
        _run_worker(index, makers, setup, fds)
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(worker.STACK_SIGNAL, signal.SIG_IGN)  # inherited: may reach a worker before its handler is set
    become_subreaper()
    server = _Server(control)
    try:
        server.serve()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
