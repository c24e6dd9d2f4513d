"""A head and several machines on one Linux box: network namespaces, breakable links and a breakable TCP proxy.

Each host has a namespace of its own with one interface, ``eth0``, whose other end is a port of a bridge in one
further namespace, the switch. Nothing is ever created in the namespace of the caller.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import ipaddress
import itertools
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Way = Literal["to_target", "to_client"]
Direction = Literal["out", "in", "both"]

CLONE_NEWNET = 0x40000000
SUBNET = ipaddress.ip_network("10.77.0.0/16")
PORT_GROUP = 7  # lets one command delete every link
CHUNK = 64 * 1024
BUFFER = 256 * 1024  # the proxy's socket buffers: small, so that a stall soon blocks the sender
DELAY_LINE_CHUNKS = 512
REPLY_TIMEOUT = 10.0
KILL_TIMEOUT = 5.0
_counter = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def namespaces_problem() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root (set CLUSTERENV_NO_NETNS=1 to skip these tests)"
    missing = [tool for tool in ("ip", "bridge", "tc") if shutil.which(tool) is None]
    return f"not on PATH: {', '.join(missing)} (iproute2)" if missing else None


class _SkipCondition:
    """Truth: skip. Raises where namespaces are missing and nobody asked to skip; pytest reports that as a failure."""

    def __bool__(self) -> bool:
        if os.environ.get("CLUSTERENV_NO_NETNS") == "1":
            return True
        if problem := namespaces_problem():
            raise RuntimeError(problem)
        return False


def __getattr__(name: str) -> Any:
    """The mark requires_namespaces, made on demand: the rest of this file does without pytest."""
    if name != "requires_namespaces":
        raise AttributeError(name)
    import pytest

    return pytest.mark.skipif(_SkipCondition(), reason="CLUSTERENV_NO_NETNS=1")  # type: ignore[arg-type]


def _batch(tool: str, namespace: str | None, lines: Iterable[str], force: bool = False) -> None:
    """Run many commands in one process; with force, go on after errors and raise none."""
    command = [tool, *(["-n", namespace] if namespace else []), *(["-force"] if force else []), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode and not force:
        raise RuntimeError(f"{tool} in {namespace}: {done.stderr.strip()}")


def _path(namespace: str) -> Path:
    return Path("/run/netns", namespace)


def _enter(namespace: str) -> None:
    """Move the calling thread, and only it, into a new namespace; later links there get no IPv6."""
    with _path(namespace).open() as file:
        if _libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        # Without IPv6 an idle link is silent, and its counters stand still.
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _program(*args: object) -> list[str]:
    """The command line that runs this file as a helper."""
    return [sys.executable, "-I", "-S", __file__, *map(str, args)]


def _kill_inside(namespaces: Iterable[str]) -> None:
    """SIGKILL every process whose network namespace is one of these: started by us, or by what we started."""

    def identity(path: str | Path) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = Path(path).stat()
            return found.st_dev, found.st_ino
        return None

    ours = {identity(_path(namespace)) for namespace in namespaces} - {None}
    deadline = time.monotonic() + KILL_TIMEOUT
    while True:
        pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {os.getpid()}
        inside = [pid for pid in pids if identity(f"/proc/{pid}/ns/net") in ours]
        if not inside:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {inside} outlive SIGKILL")
        for pid in inside:
            with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as process:
                if identity(f"/proc/{pid}/ns/net") in ours:  # again: the number may have changed hands before the open
                    signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
        time.sleep(0.005)


def _remove(namespaces: Sequence[str]) -> None:
    """Kill what runs in the namespaces and delete those that exist."""
    existing = [namespace for namespace in namespaces if _path(namespace).exists()]
    try:
        _kill_inside(existing)
    finally:
        # A socket that a test still holds keeps a nameless namespace alive; its link goes here nevertheless.
        for switch in (namespace for namespace in existing if namespace.endswith("-switch")):
            _batch("ip", switch, [f"link del group {PORT_GROUP}"], force=True)
        _batch("ip", None, [f"netns del {namespace}" for namespace in existing], force=True)
    if left := [namespace for namespace in existing if _path(namespace).exists()]:
        raise RuntimeError(f"cannot delete {left}")


def _guard(owner: int, namespaces: Sequence[str]) -> None:
    """Wait for the owner's death and clean up after it."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner)
        if os.getppid() == owner:  # otherwise it died before the open, and the number may be another's
            select.select([descriptor], [], [])
    _remove(namespaces)
    time.sleep(0.2)
    _remove(namespaces)  # an ip command that outlived the owner may have made more


class Host:
    """One machine: a network namespace with loopback and ``eth0``."""

    def __init__(self, name: str, namespace: str, switch: str, index: int) -> None:
        self.name = name
        self.namespace = namespace
        self.address = str(SUBNET[index + 1])
        self._mac = f"02:00:00:00:{index >> 8:02x}:{index & 255:02x}"
        self._switch = switch
        self._processes: list[subprocess.Popen[Any]] = []
        # One thread lives in the namespace until the network closes. Should it end sooner, a child that asked for
        # PR_SET_PDEATHSIG would be signalled: the kernel takes the thread that forked for the parent.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=namespace)

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address} {self.namespace}>"

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a short function in a thread inside the namespace; sockets made there stay in the namespace."""
        return self._thread.submit(function, *args, **kwargs).result()

    def popen(self, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Start a process inside the namespace. There is no wrapper: the pid is the program's own."""

        def start() -> subprocess.Popen[Any]:
            process = subprocess.Popen(argv, **kwargs)
            self._processes.append(process)  # here, where no Ctrl-C can come between
            return process

        return self.call(start)

    def run(self, argv: Sequence[str], timeout: float, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run a process to its end and return its output as text; kill it on timeout."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(argv, **pipes | kwargs) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def link_down(self) -> None:
        """Silently lose every frame from and to this host; carrier, addresses and connections stay."""
        self._set_port(forwarding=False)

    def link_up(self) -> None:
        """Undo link_down; TCP goes on with its next retransmission."""
        self._set_port(forwarding=True)

    def _set_port(self, forwarding: bool) -> None:
        # ip's own "bridge_slave state" is useless: iproute2 6.1 reports success and sets another state.
        state = "forwarding" if forwarding else "disabled"
        _batch("bridge", self._switch, [f"link set dev {self.name} state {state}"])

    def unplug(self) -> None:
        """Take eth0 down: the host has loopback and nothing else."""
        _batch("ip", self.namespace, ["link set eth0 down"])

    def ipv6_only(self, address: str) -> None:
        """Replace the address of eth0 by this one, of a network of 64 bits."""
        self.call(Path("/proc/sys/net/ipv6/conf/eth0/disable_ipv6").write_text, "0")
        _batch("ip", self.namespace, ["addr flush dev eth0", f"addr add {address}/64 dev eth0 nodad"])

    def limit(self, bytes_per_s: float, direction: Direction = "both") -> None:
        """Limit the rate of what this host sends ("out"), of what it receives ("in"), or of each."""
        rate = round(bytes_per_s)
        burst = max(rate // 100, 2 * 1514)  # tbf drops what exceeds its burst, and splits big frames to the MTU only
        queue = burst + max(rate // 10, CHUNK)
        self._qdisc(f"tbf rate {rate}bps burst {burst} limit {queue}", direction)

    def unlimit(self, direction: Direction = "both") -> None:
        """Remove the limits; without one this does nothing."""
        self._qdisc("noqueue", direction)

    def _qdisc(self, kind: str, direction: Direction) -> None:
        ends = {"out": (self.namespace, "eth0"), "in": (self._switch, self.name)}
        for end, (namespace, device) in ends.items():
            if direction in (end, "both"):
                _batch("tc", namespace, [f"qdisc replace dev {device} root {kind}"])

    def counters(self) -> tuple[int, int]:
        """Bytes received and sent by this host's eth0, headers included, as its own kernel counts them."""
        return self._count(0)

    def packets(self) -> tuple[int, int]:
        """Packets received and sent, likewise."""
        return self._count(1)

    def _count(self, field: int) -> tuple[int, int]:
        lines = self.call(Path("/proc/thread-self/net/dev").read_text).splitlines()
        fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
        return int(fields[field]), int(fields[field + 8])


class Network:
    """Context manager: ``head`` and ``nodes``, joined by a switch; all is removed on exit."""

    def __init__(self, nodes: int = 2) -> None:
        self.name = f"cenv-{os.getpid()}-{next(_counter)}"
        self._switch = f"{self.name}-switch"
        names = ["head", *(f"node{index}" for index in range(nodes))]
        self._hosts = [Host(name, f"{self.name}-{name}", self._switch, index) for index, name in enumerate(names)]
        self.head, self.nodes = self._hosts[0], self._hosts[1:]
        self.namespaces = [self._switch, *(host.namespace for host in self._hosts)]
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Network":
        if problem := namespaces_problem():
            raise RuntimeError(problem)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        # The guard outlives SIGKILL and os._exit of this process (pytest-timeout's thread method), and Ctrl-C.
        self._guard = subprocess.Popen(
            _program("guard", os.getpid(), *self.namespaces),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        _batch("ip", None, (f"netns add {namespace}" for namespace in self.namespaces))
        for host in self._hosts:
            host.call(_enter, host.namespace)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_enter, self._switch).result()
        bridge = ["link add br0 type bridge mcast_snooping 0", "link set br0 up", "link set lo up"]
        for host in self._hosts:
            peer = f"peer name eth0 netns {host.namespace} address {host._mac}"
            bridge.append(f"link add {host.name} group {PORT_GROUP} type veth {peer}")
            bridge.append(f"link set {host.name} master br0 up")
        _batch("ip", self._switch, bridge)
        for host in self._hosts:
            # Neighbours are fixed: with ARP, a long partition would show as EHOSTUNREACH rather than as silence.
            others = (
                f"neigh add {o.address} lladdr {o._mac} dev eth0 nud permanent" for o in self._hosts if o is not host
            )
            own = ["link set lo up", "link set eth0 up", f"addr add {host.address}/{SUBNET.prefixlen} dev eth0"]
            _batch("ip", host.namespace, [*own, *others])
        # The bridge hears of a link some milliseconds later; a SYN lost until then would cost a second.
        show = ["ip", "-n", self._switch, "-d", "link", "show", "master", "br0"]
        while subprocess.check_output(show, text=True).count("state forwarding") < len(self._hosts):
            time.sleep(0.002)

    def close(self) -> None:
        """Kill what still runs in the namespaces and remove them."""
        for host in self._hosts:
            host._thread.shutdown()
        _remove(self.namespaces)
        for host in self._hosts:
            for process in host._processes:
                if process.poll() is None:
                    process.kill()  # it left the namespace
                process.wait(KILL_TIMEOUT)
        if self._guard:
            self._guard.kill()  # last, so that it covers a close() that was interrupted
            self._guard.wait()


class Counts(NamedTuple):
    """What a proxy has seen since its start."""

    to_target: int
    to_client: int
    accepted: int
    open: int
    cuts: int


class Proxy:
    """A TCP proxy (IPv4), a process inside a host's namespace. Every command has taken effect when it returns."""

    def __init__(self, host: Host, target: tuple[str, int], listen: tuple[str, int] | None = None) -> None:
        ip, port = listen or (host.address, 0)
        self._lock = threading.Lock()
        self._process = host.popen(
            _program("proxy", ip, port, *target), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            self.address: tuple[str, int] = (ip, self._reply())
        except BaseException:
            self.close()
            raise

    def _reply(self) -> Any:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], REPLY_TIMEOUT)
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
        """Reset (RST) every connection on both sides, whatever is on its way; disarm cut_after."""
        self._ask("cut")

    def cut_after(self, n_bytes: int, direction: Way) -> None:
        """Cut once, when exactly so many bytes from now on, over all connections, have reached the receiving kernel."""
        self._ask("cut_after", n_bytes, direction)

    def stall(self) -> None:
        """Forward nothing more, in either direction, and keep all connections; new ones are held too."""
        self._ask("stall")

    def go_on(self) -> None:
        """Undo stall; nothing was lost."""
        self._ask("go_on")

    def refuse(self, refused: bool) -> None:
        """Refuse new connections (ECONNREFUSED), or accept them again on the same port; open ones stay."""
        self._ask("refuse", refused)

    def delay(self, seconds: float) -> None:
        """Deliver what comes from now on so much later, in each direction; the rate stays (up to 32 MiB on the way)."""
        self._ask("delay", seconds)

    def counts(self) -> Counts:
        """Bytes forwarded in each direction, connections and cuts."""
        return Counts(*self._ask("counts"))

    def close(self) -> None:
        """End the proxy; its connections are reset."""
        with self._process:  # reaps it and closes the pipes
            self._process.kill()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Relay:
    """The proxy's inside: one asyncio loop, so that a command falls between two sends and never into one."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._running = asyncio.Event()
        self._running.set()
        self._delay = 0.0
        self._passed: dict[Way, int] = {"to_target": 0, "to_client": 0}
        self._left: dict[Way, int | None] = {"to_target": None, "to_client": None}  # bytes until the cut
        self._accepted = self._cuts = 0
        self._connections: dict[asyncio.Task[None], dict[Way, socket.socket]] = {}  # each way's receiving socket
        self._cutting: dict[Way, asyncio.Task[None]] = {}  # the loop itself keeps only weak references
        self._address = listen
        self._open()

    def _socket(self) -> socket.socket:
        """A socket; those accepted from it inherit its options."""
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER // 2)  # the kernel doubles it
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER // 2)
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
            task.result()  # shows an error of the proxy itself

    async def _serve(self, client: socket.socket, server: socket.socket) -> None:
        steps: list[asyncio.Task[None]] = []
        try:
            await self._running.wait()
            await self._loop.sock_connect(server, self._target)
            steps += self._pump(client, server, "to_target") + self._pump(server, client, "to_client")
            await asyncio.gather(*steps)
            for end in (client, server):  # both directions have ended in order: no reset
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        except OSError:
            pass  # a side broke, or the target refused: both are reset
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> list[asyncio.Task[None]]:
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(DELAY_LINE_CHUNKS)
        return [self._loop.create_task(step) for step in (self._read(source, line), self._deliver(line, sink, way))]

    async def _read(self, source: socket.socket, line: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            await self._running.wait()
            data = await self._loop.sock_recv(source, CHUNK)
            await line.put((self._loop.time() + self._delay, data))
            if not self._delay:
                await line.join()  # hold one chunk at most, so that a slow receiver slows the sender

    async def _deliver(self, line: asyncio.Queue[tuple[float, bytes]], sink: socket.socket, way: Way) -> None:
        while True:
            due, data = await line.get()
            await asyncio.sleep(due - self._loop.time())
            rest = memoryview(data)
            while rest:
                rest = rest[await self._send(sink, rest, way) :]
            await self._running.wait()
            line.task_done()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return

    async def _send(self, sink: socket.socket, data: memoryview, way: Way) -> int:
        """Hand over some bytes: as many as the kernel takes and cut_after leaves."""
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
        # A reset throws away what the sending kernel still holds, so first let the receiver acknowledge everything.
        cuts = self._cuts
        while self._left[way] == 0 and self._cuts == cuts:
            sinks = [connection[way] for connection in self._connections.values()]
            if not any(struct.unpack("i", fcntl.ioctl(sink, termios.TIOCOUTQ, b"\0" * 4))[0] for sink in sinks):
                await self._cut()
                return
            await asyncio.sleep(0.001)

    async def _cut(self) -> None:
        self._left = {"to_target": 0, "to_client": 0}  # no byte more, although the tasks end some steps later
        self._cuts += 1
        with contextlib.suppress(OSError):  # also what the kernel has accepted and this loop has not
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
        """Obey one JSON line after the other until the owner's end of the pipe closes."""
        commands = asyncio.StreamReader()
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        print(self._address[1], flush=True)
        while line := await commands.readline():
            print(json.dumps(await self.obey(*json.loads(line))), flush=True)


async def _proxy(ip: str, port: str, target_ip: str, target_port: str) -> None:
    await _Relay((ip, int(port)), (target_ip, int(target_port))).control()


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        _guard(int(sys.argv[2]), sys.argv[3:])
    else:
        asyncio.run(_proxy(*sys.argv[2:]))
