"""Simulate a head and several machines on one Linux machine: network namespaces and breakable links.

Each host has its own namespace with one interface, ``eth0``, whose other end is a port of a bridge in a further
namespace, the switch. Nothing is ever created in the caller's namespace.
"""

import contextlib
import ctypes
import ipaddress
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Direction = Literal["out", "in", "both"]

CLONE_NEWNET = 0x40000000
SUBNET = ipaddress.ip_network("10.77.0.0/16")
PORT_GROUP = 7  # lets one command delete every link
CHUNK = 64 * 1024
KILL_TIMEOUT = 5.0
_counter = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def namespaces_problem() -> str | None:
    """Return why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root (set CLUSTERENV_NO_NETNS=1 to skip these tests)"
    missing = [tool for tool in ("ip", "bridge", "tc") if shutil.which(tool) is None]
    return f"not on PATH: {', '.join(missing)} (iproute2)" if missing else None


class _SkipCondition:
    """True: skip. Raises if namespaces are unavailable and skipping was not requested, which pytest reports."""

    def __bool__(self) -> bool:
        if os.environ.get("CLUSTERENV_NO_NETNS") == "1":
            return True
        if problem := namespaces_problem():
            raise RuntimeError(problem)
        return False


def __getattr__(name: str) -> Any:
    """Make the mark requires_namespaces on demand: the rest of this file does not need pytest."""
    if name != "requires_namespaces":
        raise AttributeError(name)
    import pytest

    return pytest.mark.skipif(_SkipCondition(), reason="CLUSTERENV_NO_NETNS=1")  # type: ignore[arg-type]


def _batch(tool: str, namespace: str | None, lines: Iterable[str], force: bool = False) -> None:
    """Run many commands in one process; with force, continue after errors and raise none."""
    command = [tool, *(["-n", namespace] if namespace else []), *(["-force"] if force else []), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode and not force:
        raise RuntimeError(f"{tool} in {namespace}: {done.stderr.strip()}")


def _path(namespace: str) -> Path:
    return Path("/run/netns", namespace)


def _enter(namespace: str) -> None:
    """Move only the calling thread into a new namespace; links made there later get no IPv6."""
    with _path(namespace).open() as file:
        if _libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        # Without IPv6 an idle link is silent, and its counters do not change.
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _program(*args: object) -> list[str]:
    """Return the command line that runs this file as a helper."""
    return [sys.executable, "-I", "-S", __file__, *map(str, args)]


def _kill_inside(namespaces: Iterable[str]) -> None:
    """Send SIGKILL to every process in these network namespaces: our children and their descendants."""

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
                if identity(f"/proc/{pid}/ns/net") in ours:  # again: the number may have been reused before the open
                    signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
        time.sleep(0.005)


def _remove(namespaces: Sequence[str]) -> None:
    """Kill all processes in the namespaces and delete those that exist."""
    existing = [namespace for namespace in namespaces if _path(namespace).exists()]
    try:
        _kill_inside(existing)
    finally:
        # A socket that a test still holds keeps a nameless namespace alive; its link is deleted here nevertheless.
        for switch in (namespace for namespace in existing if namespace.endswith("-switch")):
            _batch("ip", switch, [f"link del group {PORT_GROUP}"], force=True)
        _batch("ip", None, [f"netns del {namespace}" for namespace in existing], force=True)
    if left := [namespace for namespace in existing if _path(namespace).exists()]:
        raise RuntimeError(f"cannot delete {left}")


def _guard(owner: int, namespaces: Sequence[str]) -> None:
    """Wait for the owner's death and clean up after it."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner)
        if os.getppid() == owner:  # otherwise it died before the open, and its number may have been reused
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
        # One thread stays in the namespace until the network closes. If it ended sooner, a child that set
        # PR_SET_PDEATHSIG would be signalled: to the kernel, the thread that forked is the parent.
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
            self._processes.append(process)  # in this thread, where Ctrl-C cannot interrupt
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
        """Undo link_down; TCP continues with its next retransmission."""
        self._set_port(forwarding=True)

    def _set_port(self, forwarding: bool) -> None:
        # ip's own "bridge_slave state" is useless: iproute2 6.1 reports success and sets another state.
        state = "forwarding" if forwarding else "disabled"
        _batch("bridge", self._switch, [f"link set dev {self.name} state {state}"])

    def unplug(self) -> None:
        """Take eth0 down: the host has only loopback."""
        _batch("ip", self.namespace, ["link set eth0 down"])

    def ipv6_only(self, address: str) -> None:
        """Replace the address of eth0 by this IPv6 address with a /64 prefix."""
        self.call(Path("/proc/sys/net/ipv6/conf/eth0/disable_ipv6").write_text, "0")
        _batch("ip", self.namespace, ["addr flush dev eth0", f"addr add {address}/64 dev eth0 nodad"])

    def limit(self, bytes_per_s: float, direction: Direction = "both") -> None:
        """Limit the rate at which this host sends ("out"), receives ("in"), or each of them ("both")."""
        rate = round(bytes_per_s)
        burst = max(rate // 100, 2 * 1514)  # tbf drops what exceeds its burst, and splits big frames to the MTU only
        queue = burst + max(rate // 10, CHUNK)
        self._qdisc(f"tbf rate {rate}bps burst {burst} limit {queue}", direction)

    def unlimit(self, direction: Direction = "both") -> None:
        """Remove the limits, if any."""
        self._qdisc("noqueue", direction)

    def _qdisc(self, kind: str, direction: Direction) -> None:
        ends = {"out": (self.namespace, "eth0"), "in": (self._switch, self.name)}
        for end, (namespace, device) in ends.items():
            if direction in (end, "both"):
                _batch("tc", namespace, [f"qdisc replace dev {device} root {kind}"])

    def counters(self) -> tuple[int, int]:
        """Return bytes received and sent by this host's eth0, headers included, as counted by the kernel."""
        return self._count(0)

    def packets(self) -> tuple[int, int]:
        """Return packets received and sent by this host's eth0."""
        return self._count(1)

    def _count(self, field: int) -> tuple[int, int]:
        lines = self.call(Path("/proc/thread-self/net/dev").read_text).splitlines()
        fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
        return int(fields[field]), int(fields[field + 8])


class Network:
    """Context manager: ``head`` and ``nodes``, connected by a switch; everything is removed on exit."""

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
        # The guard survives SIGKILL and os._exit of this process (pytest-timeout's thread method), and Ctrl-C.
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
            # Neighbours are fixed: with ARP, a long partition would cause EHOSTUNREACH instead of silence.
            others = (
                f"neigh add {o.address} lladdr {o._mac} dev eth0 nud permanent" for o in self._hosts if o is not host
            )
            own = ["link set lo up", "link set eth0 up", f"addr add {host.address}/{SUBNET.prefixlen} dev eth0"]
            _batch("ip", host.namespace, [*own, *others])
        # The bridge notices a link some milliseconds later; a SYN lost until then would cost a second.
        show = ["ip", "-n", self._switch, "-d", "link", "show", "master", "br0"]
        while subprocess.check_output(show, text=True).count("state forwarding") < len(self._hosts):
            time.sleep(0.002)

    def close(self) -> None:
        """Kill the processes that still run in the namespaces, and remove them."""
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


if __name__ == "__main__":
    _guard(int(sys.argv[2]), sys.argv[3:])
