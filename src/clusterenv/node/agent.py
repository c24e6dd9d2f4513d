"""The node agent: one process per machine, between the head and this machine's workers. Runs no user code.

Started by a backend as `clusterenv node --join FILE`. It connects to the head, hosts the shards that it is assigned,
and passes messages on. When the connection ends, the session is over: the agent ends its workers, and joins again
until its lease on the head has run out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import zmq

from clusterenv import __version__
from clusterenv.code import versions
from clusterenv.code.packages import compare
from clusterenv.errors import ProtocolError, StartError
from clusterenv.events import emit
from clusterenv.memory.compression import installed_codecs
from clusterenv.node.dialling import Unreachable, resolve
from clusterenv.node.output import OutputLimit
from clusterenv.node.shard import Shard
from clusterenv.node.weight_store import WeightStore
from clusterenv.spec import Delivered
from clusterenv.system.cpus import usable_cores
from clusterenv.system.exits import NEVER
from clusterenv.system.host_load import HostMeter
from clusterenv.system.jobs import own_job
from clusterenv.transport.keys import Joining, KeyPair
from clusterenv.transport.sockets import NodeSocket
from clusterenv.wire import messages
from clusterenv.wire.frames import CHUNK, PIECE_LEAST, node_reader, to_wire

FAILED = 1
"""Exit code: the head ended by an exception, or was gone for longer than the lease."""

_TO_SEND = 1 / 3  # the share of the grace period that is kept for sending what workers have finished

_LINGER_S = 1.0  # how long sending the last messages may take, at the end of the grace period

_RETRY_S, _ANSWER_S = 0.5, 10.0
_SILENT = "the head does not answer"


class _AwaitsCode(NamedTuple):
    """A shard that cannot start before the head has sent the packages that this node lacks."""

    host: messages.AssignShard
    payload: bytes
    folders: dict[str, str]
    messages: list[tuple[Any, list[Any]]]  # for the shard, received while it waits


class Agent:
    """Host the shards that the head assigns to this machine.

    Args:
        lease_s: how long to continue without a head; replaced by the head's own value.
        dead_after_s: a connection that is silent for this long is closed.
        allow_pickle: accept pickled code.
        grace_s: how long this process has from SIGTERM until it is killed.
    """

    def __init__(
        self,
        joining: Joining,
        lease_s: float = 60.0,
        dead_after_s: float = 10.0,
        allow_pickle: bool = True,
        grace_s: float = 30.0,
    ) -> None:
        self._joining = joining
        self._allow_pickle = allow_pickle
        self._lease_s = lease_s
        self._dead_after_s = dead_after_s
        self._grace_s = grace_s
        self._beat_s, self._session = 1.0, 0
        self._welcome: messages.Welcome | None = None
        self._instance = secrets.token_hex(8)
        self._versions = versions.installed()
        self._weights = WeightStore(self._say)
        self._meter = HostMeter()
        self._shards: dict[int, Shard] = {}
        self._closing: list[threading.Thread] = []  # which end the workers of unassigned shards
        self._heard_at = 0.0
        self._awaiting: dict[int, _AwaitsCode] = {}
        self._socket: NodeSocket | None = None
        self._reader = node_reader()
        self._poller = zmq.Poller()
        self._next_beat = 0.0
        self._output = OutputLimit()
        self._leaving: float | None = None  # since when
        self._has_said_bye = False
        self._exit: int | None = None
        self._is_welcome = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Serve until the run is over; returns the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        signal.signal(signal.SIGINT, lambda *_: self._leave())
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        try:
            return self._run()
        finally:
            self._drop_shards(0.5)
            self._weights.close()
            if self._socket is not None:
                self._socket.close(_LINGER_S)
            for thread in self._closing:
                thread.join()
            signal.set_wakeup_fd(-1)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> int:
        last_there = time.monotonic()
        while self._exit is None:
            if self._socket is None:
                problem = self._dial()
                if problem is not None:
                    waited = time.monotonic() - last_there
                    if self._session and not problem.is_refusal:
                        # The head's machine is gone or unreachable: count the silence before the connection closed.
                        waited += min(self._silence_s, last_there - self._heard_at)
                    if waited > self._patience_s or self._leaving is not None:
                        emit(logging.ERROR, f"no head for {waited:.0f} s: {problem.text}")
                        return FAILED if self._session else NEVER
                    time.sleep(_RETRY_S)
                    continue
            ended = self._advance()
            if self._is_welcome:
                last_there = time.monotonic()
            if ended is None:
                continue
            if self._has_said_bye:
                return 0
            if ended == "refused":
                emit(logging.ERROR, f"{self._joining.address} does not know this node's key: it belongs to another run")
                return NEVER
            emit(logging.WARNING, f"the connection to the head ended ({ended}); joining again")
            self._hang_up()
            if not self._is_welcome:
                time.sleep(_RETRY_S)
                # A suspended head accepts connections and is silent; without a head, connections end.
                patience_s = self._lease_s if ended == _SILENT else self._patience_s
                if time.monotonic() - last_there > patience_s:
                    emit(logging.ERROR, f"{self._joining.address} is not the head that this key file names")
                    return FAILED if self._session else NEVER  # a forwarded port answers even if its head is gone
        return self._exit

    @property
    def _patience_s(self) -> float:
        """How long to try to connect: the lease if the head was there before, less if it never was."""
        return self._lease_s if self._session else min(self._lease_s, _ANSWER_S)

    @property
    def _silence_s(self) -> float:
        """A connection that is silent for this long is closed."""
        return min(self._dead_after_s, self._lease_s)

    # -- the connection ---------------------------------------------------------------------------------------

    def _dial(self) -> Unreachable | None:
        """Connect and send Hello; returns why the head cannot be reached, if so."""
        address = resolve(self._joining.address)
        if isinstance(address, Unreachable):
            return address
        keys = KeyPair(self._joining.public, self._joining.secret)
        self._socket = NodeSocket(address, self._joining.head_key, keys, dead_after_s=self._silence_s)
        self._socket.poll_on(self._poller)
        self._reader = node_reader()
        self._asked_at = time.monotonic()
        self._is_welcome = self._is_refused = False
        hello = messages.Hello(
            messages.PROTOCOL,
            __version__,
            ".".join(map(str, sys.version_info[:2])),
            gymnasium.__version__,
            self._instance,
            platform.node(),
            os.getpid(),
            usable_cores(),
            self._allow_pickle,
            self._versions,
            installed_codecs(),
            *own_job(),
        )
        self._say(hello)
        return None

    def _hang_up(self) -> None:
        self._drop_shards(0.0)
        self._weights.reset()
        if self._socket is not None:
            self._socket.poll_off(self._poller)
            self._socket.close()
            self._socket = None

    def _say(self, message: Any, payload: Sequence[Any] = ()) -> None:
        if isinstance(message, messages.Output) and not self._output.passes(message, time.monotonic()):
            return
        if isinstance(message, (messages.Beat, messages.Bye)):
            for report in self._output.unreported():
                self._say(report)
        if self._socket is not None:
            size = sum(map(len, payload))
            is_large = size > PIECE_LEAST
            if is_large:
                self._socket.sending(size)
            # On a slow link, no heartbeat gets past a large piece in time: the head would take this node for dead.
            piece = min(CHUNK, max(PIECE_LEAST, int(self._socket.bytes_per_s()))) if is_large else CHUNK
            for frames in to_wire(self._session, message, payload, piece):
                self._socket.send(frames)

    # -- the loop ---------------------------------------------------------------------------------------------

    def _advance(self) -> str | None:
        """Wait for messages and handle them; returns why the connection is gone, if it is."""
        socket = self._socket
        assert socket is not None
        now = time.monotonic()
        if self._is_welcome and now >= self._next_beat:
            self._next_beat = now + self._beat_s
            progress = tuple(entry for shard in self._shards.values() for entry in shard.progress())
            self._say(messages.Beat(progress, self._meter.read()))
        if not self._is_welcome and now - self._asked_at > _ANSWER_S:
            return _SILENT
        if self._leaving is not None and self._has_left(now):
            self._exit = 0
            return None
        timeout_s = max(0.0, min(0.5, self._next_beat - now)) if self._is_welcome else 0.2
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        try:
            for frames in socket.receive(ready):
                self._heard_at = time.monotonic()
                said = self._reader.read(frames)
                if said is not None:
                    self._handle(*said)
            for shard in list(self._shards.values()):
                if shard.fileno() in ready:
                    shard.take()
            self._note_link_rate(socket.measured())
        except ProtocolError as error:
            return f"protocol error: {error}"
        if self._is_refused and self._exit is None:
            time.sleep(_RETRY_S)
            return "it asks to try again"
        return socket.ended(ready)

    def _note_link_rate(self, bytes_per_s: float | None) -> None:
        """Tell the workers how fast the link is, which they share."""
        if bytes_per_s is not None:
            workers = sum(shard.num_workers for shard in self._shards.values())
            for shard in self._shards.values():
                shard.set_link_rate(bytes_per_s / workers)

    def _handle(self, session: int, message: Any, frames: list[Any]) -> None:
        if isinstance(message, messages.Welcome):
            self._session, self._is_welcome = message.session, True
            self._beat_s, self._lease_s = message.beat_s, message.lease_s
            self._welcome = message
            emit(logging.INFO, f"joined the run at {self._joining.address} as node {self._joining.node}")
            return
        if isinstance(message, messages.Refused):
            emit(logging.ERROR, f"the head refuses this node: {message.reason}")
            if message.final:
                self._exit = NEVER
            self._is_refused = True
            return
        if session == self._session and not isinstance(message, messages.HeadBeat):
            self._handle_in_session(message, frames)

    def _handle_in_session(self, message: Any, frames: list[Any]) -> None:
        if isinstance(message, messages.Leave):
            if message.shard < 0:
                emit(logging.ERROR if message.failed else logging.INFO, message.reason)
                self._exit = FAILED if message.failed else 0
            else:
                self._drop(message.shard, 1.0)
        elif isinstance(message, messages.AssignShard):
            self._host(message, bytes(frames[0]))
        elif isinstance(message, messages.Code):
            self._code_came(message.shard, bytes(frames[0]))
        elif isinstance(message, (messages.Offer, messages.Chunk, messages.Withdrawn)):
            self._weights.take(message, frames, time.monotonic())
            for shard in self._shards.values():
                shard.go_on()
        elif message.shard in self._awaiting:
            self._awaiting[message.shard].messages.append((message, frames))
        elif message.shard in self._shards:
            self._shards[message.shard].handle(message, frames)

    def _host(self, host: messages.AssignShard, payload: bytes) -> None:
        if not self._allow_pickle and (host.packages or not host.is_named):
            self._say(messages.Failed(host.shard, "this node takes no pickled code (--no-pickle)"))
            return
        self._drop(host.shard, 0.0)
        folders, lacking = compare(host.packages)
        if lacking:
            self._awaiting[host.shard] = _AwaitsCode(host, payload, folders, [])
            self._say(messages.Lacks(host.shard, lacking))
        else:
            self._start_shard(host, payload, Delivered(folders, b""))

    def _code_came(self, number: int, archive: bytes) -> None:
        waiting = self._awaiting.pop(number, None)
        if waiting is None:
            return
        self._start_shard(waiting.host, waiting.payload, Delivered(waiting.folders, archive))
        for message, frames in waiting.messages:
            if number in self._shards:
                self._shards[number].handle(message, frames)

    def _start_shard(self, host: messages.AssignShard, payload: bytes, delivered: Delivered) -> None:
        try:
            shard = self._shards[host.shard] = Shard(host, payload, delivered, self._say, self._weights, self._welcome)
        except StartError as error:
            self._say(messages.Failed(host.shard, str(error), is_code=False))
            return
        self._poller.register(shard.fileno(), zmq.POLLIN)
        slots = [slot for _, its in host.workers for slot in its]
        emit(logging.INFO, f"running slots {min(slots)}-{max(slots)} with {len(host.workers)} workers")

    # -- leaving ----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if self._leaving is None:
            self._leaving = time.monotonic()
            for shard in self._shards.values():
                shard.stop_early()

    def _has_left(self, now: float) -> bool:
        """Send Bye once the workers are done or the time is up. Returns whether to end without the head's answer.

        The head answers after it has received everything sent before: what is still in the connection's buffers would
        be lost when this process ends.
        """
        assert self._leaving is not None
        since = now - self._leaving
        is_busy = any(shard.is_busy for shard in self._shards.values())
        if not self._has_said_bye and (not is_busy or since > self._grace_s * (1 - _TO_SEND)):
            self._has_said_bye = True
            self._say(messages.Bye("preempted"))
        return not self._is_welcome or since > self._grace_s - _LINGER_S

    def _drop(self, number: int, timeout_s: float) -> None:
        self._awaiting.pop(number, None)
        shard = self._shards.pop(number, None)
        if shard is not None:
            self._poller.unregister(shard.fileno())
            # In a thread: workers that do not end would hold up this loop, and with it the heartbeats.
            thread = threading.Thread(target=shard.close, args=(timeout_s,), name="clusterenv-shard")
            thread.start()
            self._closing = [*(other for other in self._closing if other.is_alive()), thread]

    def _drop_shards(self, timeout_s: float) -> None:
        for number in [*self._awaiting, *self._shards]:
            self._drop(number, timeout_s)
