"""Send and receive frames by the sockets of head and node, with CURVE always on.

Only keys that the head allows pass the handshake; messages of other senders are never parsed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket as tcp
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from clusterenv.errors import StartError
from clusterenv.system.interrupts import uninterrupted
from clusterenv.transport.keys import KeyPair
from clusterenv.transport.link_rate import LinkRate

_ZAP = "inproc://zeromq.zap.01"

_NOBLOCK, _NOBLOCK_MORE, _POLLIN = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)

_ACKED, _DATA_SEGMENTS, _BUSY_US, _TCP_INFO = 120, 152, 168, 176
"""Offsets in Linux's `struct tcp_info`: acknowledged bytes, segments with data that were received, time with
unacknowledged bytes; and its size."""

_ENOUGH = 1 << 16  # acknowledged bytes from which the speed of a link is measured

LOCAL_BYTES_PER_S = 5e8
"""Rate of a connection within one machine: what encrypting, copying and decrypting allow, with CPUs that are idle. What
the kernel's counters show there is how busy the machine is."""

_WAITING = 4096
"""Unread messages of one connection at which its sender has to wait, and seems dead: far more than a node sends while
the head is held up for minutes."""

Link = tuple[int, int]
"""A connection: its descriptor, and how many connections had the same one before."""


class Arrived(NamedTuple):
    """One wire message, with the key and the connection that it came from."""

    key: str
    link: Link
    route: bytes
    frames: list[Any]


def listening_on(host: str, port: int) -> str:
    """Return the address of a head that listens there."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _messages(socket: zmq.Socket[bytes], most: int | None = None) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have come, at most `most`.

    In pyzmq, `recv_multipart` queries libzmq after every frame, and an empty queue raises an exception: with small
    messages, both cost more than receiving them.
    """
    is_readable, count = True, 0
    while is_readable and count != most:
        try:
            frames = [socket.recv(_NOBLOCK, copy=False)]
        except zmq.Again:
            return
        while frames[-1].more:
            frames.append(socket.recv(_NOBLOCK, copy=False))
        yield frames
        count += 1
        is_readable = bool(int(socket.get(zmq.EVENTS)) & _POLLIN)


def _send(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> None:
    """Send a message. `send_multipart` checks the type of every frame first."""
    for frame in frames[:-1]:
        socket.send(frame, _NOBLOCK_MORE)
    socket.send(frames[-1], _NOBLOCK)


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[tcp.socket]:
    """Yield a copy of a connection that libzmq owns. If it has ended meanwhile, calls raise OSError."""
    copy = os.dup(descriptor)
    try:
        connection = tcp.socket(fileno=copy)
    except OSError:  # its number belongs to another file by now
        os.close(copy)
        raise
    with connection:
        yield connection


def _tcp_info(descriptor: int) -> bytes | None:
    """Return the kernel's counters of a TCP connection, if it has any."""
    with contextlib.suppress(OSError), _connection(descriptor) as connection:
        info = connection.getsockopt(tcp.IPPROTO_TCP, tcp.TCP_INFO, _TCP_INFO)
        return info if len(info) == _TCP_INFO else None
    return None


class HeadSocket:
    """Listen on one address, on the first of `ports` that is free; 0: any port."""

    def __init__(
        self, host: str, ports: Sequence[int], keys: KeyPair, *, frame_limit: int, dead_after_s: float
    ) -> None:
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP)
        self._allowed: set[bytes] = set()
        self.refused = 0  # handshakes with a key that is not of this run
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.curve_server = 1
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, frame_limit)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, _WAITING)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
        # The kernel ends connections to machines that are gone, not libzmq's heartbeats: these abort this process when
        # a connection breaks while more than RCVHWM of its messages are unread (`!_io_error`, libzmq 4.3.5).
        socket.setsockopt(zmq.TCP_MAXRT, int(dead_after_s * 1000))
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, math.ceil(dead_after_s / 2)))
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, math.ceil(dead_after_s / 4)))
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
        socket.setsockopt(zmq.IPV6, ":" in host)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._accepted: dict[int, int] = {}
        self._ended: list[Link] = []
        self._links: dict[bytes, Link] = {}  # by route
        self._socket = socket
        shown = f"[{host}]" if ":" in host else host
        try:
            self.address = listening_on(host, self._bind(shown, ports))
        except BaseException:
            self.close()
            raise

    def _bind(self, host: str, ports: Sequence[int]) -> int:
        """Bind to the first free port, and return it."""
        for port in ports:
            try:
                if not port:
                    return self._socket.bind_to_random_port(f"tcp://{host}", max_tries=1000)
                self._socket.bind(f"tcp://{host}:{port}")
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and len(ports) > 1:
                    continue
                text = f"cannot listen on {host}:{port or '(any)'}: {error.strerror or error}"
                if error.errno == errno.EADDRNOTAVAIL:
                    text += ". bind= names an address of this machine; advertise= is for one that is forwarded to it"
                raise StartError(text) from None
            return port
        raise StartError(f"cannot listen on {host}: all ports from {ports[0]} to {ports[-1]} are in use: widen port=")

    def allow(self, key: str) -> None:
        self._allowed.add(z85.decode(key))

    def poll_on(self, poller: zmq.Poller) -> None:
        for socket in (self._socket, self._zap, self._monitor):
            poller.register(socket, zmq.POLLIN)

    def receive(self, ready: Any = None, most: int = 64) -> list[Arrived]:
        """Answer handshakes, and return at most `most` messages. `ready`: the result of a poller, if one was used."""
        if ready is None or self._zap in ready:
            self._answer_handshakes()
        arrived: list[Arrived] = []
        if ready is not None and self._socket not in ready:
            return arrived
        for route, *frames in _messages(self._socket, most):
            last, name = frames[-1] if frames else route, route.bytes
            link = self._links.get(name) or self._new_link(name, int(last.get(zmq.SRCFD)))
            arrived.append(Arrived(str(last.get("User-Id")), link, name, [frame.buffer for frame in frames]))
        return arrived

    def _new_link(self, route: bytes, descriptor: int) -> Link:
        self._watch()  # a connection is accepted before it sends anything: its number is known after this
        self._links[route] = (descriptor, self._accepted.get(descriptor, 0))
        return self._links[route]

    def gone(self, ready: Any = None) -> list[Link]:
        """Return the connections that ended since the last call."""
        if ready is None or self._monitor in ready:
            self._watch()
        ended, self._ended = self._ended, []
        if ended:
            self._links = {route: link for route, link in self._links.items() if link not in ended}
        return ended

    def _watch(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted[descriptor] = self._accepted.get(descriptor, 0) + 1
            else:
                self._ended.append((descriptor, self._accepted.get(descriptor, 0)))

    @uninterrupted  # the frames of an interrupted message would become part of the next one
    def send(self, route: bytes, frames: Sequence[Any]) -> bool:
        """Send a message; return False if its receiver is no longer connected."""
        try:
            _send(self._socket, [route, *frames])
        except zmq.ZMQError:
            return False
        return True

    def _is_open(self, link: Link) -> bool:
        """Return whether this connection has not ended: otherwise its descriptor may belong to another file by now."""
        self._watch()
        descriptor, number = link
        return link not in self._ended and self._accepted.get(descriptor, 0) == number

    def cut(self, link: Link) -> None:
        """End this connection, which ROUTER sockets cannot do: a node that floods the head does not stop by itself."""
        if not self._is_open(link):
            return
        with contextlib.suppress(OSError), _connection(link[0]) as connection:
            if connection.family in (tcp.AF_INET, tcp.AF_INET6):
                connection.shutdown(tcp.SHUT_RDWR)

    def segments(self, link: Link) -> int:
        """Return how many TCP segments with data have come by this connection, those of unfinished messages too."""
        info = _tcp_info(link[0]) if self._is_open(link) else None
        return 0 if info is None else int(struct.unpack_from("=I", info, _DATA_SEGMENTS)[0])

    def _answer_handshakes(self) -> None:
        while True:
            try:
                version, number, _domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            except ValueError:
                continue
            key = credentials[0] if credentials else b""
            if mechanism == b"CURVE" and key in self._allowed:
                reply = [version, number, b"200", b"", z85.encode(key), b""]
            else:
                self.refused += 1
                reply = [version, number, b"400", b"not a key of this run", b"", b""]
            self._zap.send_multipart(reply)

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._context.destroy(linger=0)


class NodeSocket:
    """Connect to the head once: the session ends with the connection."""

    def __init__(self, address: str, head_key: str, keys: KeyPair, *, dead_after_s: float) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 1000
        socket.curve_serverkey = head_key.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(50, int(min(dead_after_s * 250, 5000))))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(dead_after_s * 1000))
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._socket = socket
        self._descriptor = -1  # of the connection
        self._acked = self._busy_us = 0
        self._bytes_per_s = 0.0
        self._link_rate = LinkRate()
        socket.connect(address)

    def poll_on(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def poll_off(self, poller: zmq.Poller) -> None:
        poller.unregister(self._socket)
        poller.unregister(self._monitor)

    def receive(self, ready: Any) -> list[list[Any]]:
        """Return the messages that have arrived; `ready` is from a poller."""
        if self._socket not in ready:
            return []
        return [[frame.buffer for frame in frames] for frames in _messages(self._socket)]

    def ended(self, ready: Any) -> str | None:
        """Return why the connection is gone, if it is."""
        if self._monitor not in ready:
            return None
        try:
            said = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None
        if said["event"] == zmq.EVENT_CONNECTED:
            self._descriptor = int(said["value"])
            return None
        return "lost" if said["event"] == zmq.EVENT_DISCONNECTED else "refused"

    def bytes_per_s(self) -> float:
        """Return how fast the head has lately acknowledged bytes; 0.0 while there are too few to tell."""
        counters = self._counters()
        if counters is not None:
            acked, busy_us = counters
            if acked - self._acked >= _ENOUGH:  # less goes through a shaped link in one burst
                self._bytes_per_s = 1e6 * (acked - self._acked) / max(1, busy_us - self._busy_us)
                self._acked, self._busy_us = acked, busy_us
        return self._bytes_per_s

    def _counters(self) -> tuple[int, int] | None:
        """Return how many bytes were acknowledged, and for how many microseconds any were not."""
        info = _tcp_info(self._descriptor) if self._descriptor >= 0 else None
        if info is None:
            return None
        acked, busy_us = (struct.unpack_from("=Q", info, at)[0] for at in (_ACKED, _BUSY_US))
        return acked, busy_us

    def sending(self, size: int) -> None:
        """Measure the link with a message of this size, which is sent next, if it is large."""
        counters = self._counters()
        if counters is not None:
            self._link_rate.sending(size, *counters)

    def measured(self) -> float | None:
        """Return the link's rate in bytes per second if a measurement is complete."""
        counters = self._counters() if self._link_rate.is_measuring else None
        if counters is None or not self._link_rate.read(*counters):
            return None
        return LOCAL_BYTES_PER_S if self._is_local() else self._link_rate.bytes_per_s

    def _is_local(self) -> bool:
        """Return whether the other end is on this machine: the head, or a tunnel to it."""
        with contextlib.suppress(OSError), _connection(self._descriptor) as connection:
            return bool(connection.getpeername()[0] == connection.getsockname()[0])
        return False

    def send(self, frames: Sequence[Any]) -> None:
        with contextlib.suppress(zmq.Again):  # nobody is connected any more: `ended` says why
            _send(self._socket, frames)

    def close(self, linger_s: float = 0.0) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._context.destroy(linger=int(linger_s * 1000))
