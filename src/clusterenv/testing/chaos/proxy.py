"""A TCP proxy that breaks links: it stalls, delays, slows, refuses and resets connections, if wanted at an exact byte.

`Proxy` is the handle; run as a script, this file is the proxy's process. It needs the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

__all__ = ["Counts", "Proxy", "Way"]

Way = Literal["to_target", "to_client"]

_CHUNK = 64 * 1024
_BUFFER = 256 * 1024  # of its sockets: small, so that a stall soon blocks the sender
_DELAY_LINE_CHUNKS = 512
_SLICE_S = 0.05  # time between two sends on a limited link
_REPLY_TIMEOUT_S = 10.0


class Counts(NamedTuple):
    """Counts of a proxy since its start: bytes in each direction, connections and cuts."""

    to_target: int
    to_client: int
    accepted: int
    open: int
    cuts: int


class Proxy:
    """A TCP proxy (IPv4) in a separate process. Every command has taken effect when it returns.

    Args:
        target: address that it connects its clients to.
        listen: address to accept connections on; port 0: any free one. `address` has the actual one.
        popen: starts its process, like `subprocess.Popen`, but possibly on another machine.
    """

    def __init__(
        self,
        target: tuple[str, int],
        listen: tuple[str, int] = ("127.0.0.1", 0),
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        ip, port = listen
        self._lock = threading.Lock()
        command = [sys.executable, "-I", "-S", __file__, ip, str(port), target[0], str(target[1])]
        self._process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            self.address: tuple[str, int] = (ip, self._reply())
        except BaseException:
            self.close()
            raise

    def _reply(self) -> Any:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], _REPLY_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"the proxy {'ended' if ready else 'does not answer'} (status {self._process.poll()})")
        return json.loads(line)

    def _ask(self, command: str, *args: object) -> Any:
        with self._lock:
            assert self._process.stdin
            self._process.stdin.write(json.dumps([command, *args]).encode() + b"\n")
            self._process.stdin.flush()
            return self._reply()

    def cut(self) -> None:
        """Reset (RST) every connection on both sides, whatever is in transit; disarm cut_after."""
        self._ask("cut")

    def cut_after(self, n_bytes: int, direction: Way) -> None:
        """Cut once, when exactly `n_bytes` more, over all connections, have reached the receiving kernel."""
        self._ask("cut_after", n_bytes, direction)

    def stall(self) -> None:
        """Stop forwarding in both directions, and keep all connections; new ones are held too."""
        self._ask("stall")

    def go_on(self) -> None:
        """Undo stall; no byte is lost."""
        self._ask("go_on")

    def refuse(self, refused: bool) -> None:
        """Refuse new connections (ECONNREFUSED), or accept them again on the same port; open ones stay."""
        self._ask("refuse", refused)

    def delay(self, seconds: float) -> None:
        """Delay data in each direction from now on; the rate is unchanged (up to 32 MiB in transit)."""
        self._ask("delay", seconds)

    def limit(self, bytes_per_s: float | None, direction: Way) -> None:
        """Limit the rate of each connection in this direction, with small and steady sends; None: no limit."""
        self._ask("limit", bytes_per_s, direction)

    def counts(self) -> Counts:
        """Return bytes forwarded in each direction, connections and cuts."""
        return Counts(*self._ask("counts"))

    def close(self) -> None:
        """End the proxy; its connections are reset."""
        with self._process:  # reaps it and closes the pipes
            self._process.kill()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Relay:
    """The proxy's relay: one asyncio loop, so that a command takes effect between two sends, never during one."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._running = asyncio.Event()
        self._running.set()
        self._delay = 0.0
        self._rate: dict[Way, float | None] = {"to_target": None, "to_client": None}  # bytes per second
        self._passed: dict[Way, int] = {"to_target": 0, "to_client": 0}
        self._left: dict[Way, int | None] = {"to_target": None, "to_client": None}  # bytes until the cut
        self._accepted = self._cuts = 0
        self._connections: dict[asyncio.Task[None], dict[Way, socket.socket]] = {}  # each way's receiving socket
        self._cutting: dict[Way, asyncio.Task[None]] = {}  # the loop itself keeps only weak references
        self._address = listen
        self._open()

    def _socket(self) -> socket.socket:
        """Return a socket; those accepted from it inherit its options."""
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER // 2)  # the kernel doubles it
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER // 2)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close means RST
        return made

    def _open(self) -> None:
        self._listener = self._socket()
        self._listener.bind(self._address)
        self._listener.listen(128)
        self._address = self._listener.getsockname()
        self._accepting = self._loop.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            self._admit((await self._loop.sock_accept(self._listener))[0])

    def _admit(self, client: socket.socket) -> None:
        ends: dict[Way, socket.socket] = {"to_target": self._socket(), "to_client": client}
        task = self._loop.create_task(self._serve(client, ends["to_target"]))
        task.add_done_callback(self._dismiss)  # unlike a finally, it also runs when the task is cancelled unstarted
        self._accepted += 1
        self._connections[task] = ends

    def _dismiss(self, task: asyncio.Task[None]) -> None:
        for end in self._connections.pop(task).values():
            end.close()
        if not task.cancelled():
            task.result()  # raises errors of the proxy itself

    async def _serve(self, client: socket.socket, server: socket.socket) -> None:
        steps: list[asyncio.Task[None]] = []
        try:
            await self._running.wait()
            await self._loop.sock_connect(server, self._target)
            steps += self._pump(client, server, "to_target") + self._pump(server, client, "to_client")
            await asyncio.gather(*steps)
            for end in (client, server):  # both directions were shut down normally: no reset
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        except OSError:
            pass  # a side broke, or the target refused: both sides are reset
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> list[asyncio.Task[None]]:
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_DELAY_LINE_CHUNKS)
        return [self._loop.create_task(step) for step in (self._read(source, line), self._deliver(line, sink, way))]

    async def _read(self, source: socket.socket, line: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            await self._running.wait()
            data = await self._loop.sock_recv(source, _CHUNK)
            await line.put((self._loop.time() + self._delay, data))
            if not self._delay:
                await line.join()  # hold one chunk at most, so that a slow receiver slows the sender

    async def _deliver(self, line: asyncio.Queue[tuple[float, bytes]], sink: socket.socket, way: Way) -> None:
        while True:
            due, data = await line.get()
            await asyncio.sleep(due - self._loop.time())
            rest = memoryview(data)
            while rest:
                rate = self._rate[way]
                sent = await self._send(sink, rest if rate is None else rest[: max(1, int(rate * _SLICE_S))], way)
                rest = rest[sent:]
                if rate is not None:
                    await asyncio.sleep(sent / rate)
            await self._running.wait()
            line.task_done()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return

    async def _send(self, sink: socket.socket, data: memoryview, way: Way) -> int:
        """Send as many bytes as the kernel takes and cut_after allows; return their number."""
        while True:
            await self._running.wait()
            left = self._left[way]
            if left == 0:
                await asyncio.sleep(0.001)  # the cut is coming
                continue
            try:
                sent = sink.send(data[:left])
            except BlockingIOError:
                await self._writable(sink)
                continue
            self._passed[way] += sent
            if left is not None:
                self._arm(left - sent, way)
            return sent

    async def _writable(self, sink: socket.socket) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(sink, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            self._loop.remove_writer(sink)

    def _arm(self, left: int, way: Way) -> None:
        self._left[way] = left
        if left == 0:
            self._cutting[way] = self._loop.create_task(self._cut_delivered(way))

    async def _cut_delivered(self, way: Way) -> None:
        # A reset discards what the sending kernel still holds, so first wait until everything is acknowledged.
        cuts = self._cuts
        while self._left[way] == 0 and self._cuts == cuts:
            sinks = [connection[way] for connection in self._connections.values()]
            if not any(struct.unpack("i", fcntl.ioctl(sink, termios.TIOCOUTQ, b"\0" * 4))[0] for sink in sinks):
                await self._cut()
                return
            await asyncio.sleep(0.001)

    async def _cut(self) -> None:
        self._left = {"to_target": 0, "to_client": 0}  # sends no more bytes, although the tasks end a little later
        self._cuts += 1
        with contextlib.suppress(OSError):  # also cut connections that the kernel has accepted and this loop has not
            while True:
                self._admit(self._listener.accept()[0])
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._left = {way: left or None for way, left in self._left.items()}

    async def obey(self, command: str, *args: Any) -> object:
        match command:
            case "cut":
                await self._cut()
            case "cut_after":
                self._arm(*args)
            case "stall":
                self._running.clear()
            case "go_on":
                self._running.set()
            case "delay":
                (self._delay,) = args
            case "limit":
                rate, way = args
                self._rate[way] = rate
            case "refuse" if args[0]:
                self._accepting.cancel()
                await asyncio.gather(self._accepting, return_exceptions=True)
                self._listener.close()
            case "refuse" if self._accepting.done():
                self._open()
            case "counts":
                return [*self._passed.values(), self._accepted, len(self._connections), self._cuts]
        return None

    async def control(self) -> None:
        """Execute commands, one JSON line each, until the owner's end of the pipe closes."""
        commands = asyncio.StreamReader()
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        print(self._address[1], flush=True)
        while line := await commands.readline():
            print(json.dumps(await self.obey(*json.loads(line))), flush=True)


async def _proxy(ip: str, port: str, target_ip: str, target_port: str) -> None:
    await _Relay((ip, int(port)), (target_ip, int(target_port))).control()


if __name__ == "__main__":
    asyncio.run(_proxy(*sys.argv[1:]))
