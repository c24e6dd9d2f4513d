"""Run the head's side of the network: one socket, and a thread that keeps answering while the learner computes.

The caller's thread uses the socket itself while it waits for something; when it has been away for a while, another
thread listens instead: nodes join, beat and pull weights, and messages for the caller are kept. Instructions of
`Roster` are carried out here; answers of workers are decoded by `RemoteExecutor`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from clusterenv.cluster.contract import Supervisor, Timing
from clusterenv.cluster.ending import Ending
from clusterenv.cluster.flow import Flow
from clusterenv.cluster.inbox import Inbox, size_of
from clusterenv.cluster.listener import Listener
from clusterenv.cluster.output_queue import OutputQueue
from clusterenv.cluster.peers import Admission, Peer, Traffic, short
from clusterenv.cluster.progress import WorkerProgress
from clusterenv.cluster.roster import (
    Admit,
    Dismiss,
    Instruction,
    Refuse,
    Replace,
    Roster,
    ShardAssigned,
    ShardUnassigned,
)
from clusterenv.cluster.weight_server import WeightServer
from clusterenv.errors import ProtocolError
from clusterenv.events import Event, EventLog
from clusterenv.transport.keys import KeyPair
from clusterenv.transport.sockets import Arrived, HeadSocket, Link
from clusterenv.wire.frames import CONTROL_LIMIT, FRAME_LIMIT, to_wire
from clusterenv.wire.messages import (
    Answer,
    Beat,
    Bye,
    FromNode,
    HeadBeat,
    Hello,
    Leave,
    Offer,
    Output,
    Pull,
    Refused,
    SteppedAll,
    Withdrawn,
)

_MOST = 64  # messages to read before anything else is checked, for example the caller's deadline
_TICK_S = 0.02  # interval between the roster's ticks
_LATE_BYTES = 1 << 14  # least size to count for an answer without an open request: few are normal, after a move


class Head:
    """Connect the head to its nodes.

    Args:
        host, ports: where to listen: on the first of these ports that is free (0: on any).
        admission: which nodes may join.
        invited: number of nodes that take part at first.
    """

    def __init__(
        self,
        keys: KeyPair,
        host: str,
        ports: Sequence[int],
        admission: Admission,
        timing: Timing,
        events: EventLog,
        supervisor: Supervisor,
        invited: int | None = None,
    ) -> None:
        self._socket = HeadSocket(host, ports, keys, frame_limit=FRAME_LIMIT, dead_after_s=timing.dead_after_s)
        self.address = self._socket.address
        for key in admission.node_of:
            self._socket.allow(key)
        nodes = len(admission.node_of)
        self.timing = timing
        self._ending = Ending()
        self.admission = admission
        self._events = events
        self._supervisor = supervisor
        self.roster = Roster(nodes, timing.dead_after_s, timing.move_after_s, invited)
        self._peers: dict[bytes, Peer] = {}  # by route
        self._active: dict[int, Peer] = {}  # by node
        self.inbox = Inbox(nodes)
        self.shard_events: deque[ShardAssigned | ShardUnassigned] = deque()
        self.output: dict[int, OutputQueue] = {}  # by shard
        self.progress = WorkerProgress()
        self._weights = WeightServer()
        self.pulls: deque[tuple[Pull, int, float]] = deque()  # those answered: bytes of weights sent, and when
        self.leaving: frozenset[int] = frozenset()
        """Shards that are to move; the executor decides when (`release`)."""
        self.refusals: dict[int, str] = {}
        # The scheduler's state of a node's job, and the end of its log; set by the backend.
        self.job_state: Callable[[int], str] = lambda node: ""
        self.job_log: Callable[[int], str] = lambda node: ""
        self.needed_nodes = 1
        """The run ends with an error if fewer nodes can run its environments."""
        self.traffic = Traffic(nodes)
        self.dropped = 0
        """Messages of sessions that are over, that match no open request, or that break the protocol."""
        self._unchecked = 0  # messages read since nodes were checked for silence
        self._next_tick = self._next_beat = self._read_all_at = 0.0  # the last: when nothing was left to read
        self._listening_since = self._listened_at = time.monotonic()
        self._mine = Listener(self._advance)
        self._poller = zmq.Poller()
        self._socket.poll_on(self._poller)
        self._poller.register(self._mine.wake, zmq.POLLIN)
        self._is_closed = False
        self._mine.start()

    # -- the caller's thread ----------------------------------------------------------------------------------

    def send(self, shard: int, message: Any, payload: Sequence[Any] = ()) -> bool:
        """Send a message to the node that has this shard; return False if none has."""
        with self._mine:
            node = self.roster.holder(shard)
            return node is not None and self._send(node, message, payload)

    def offer(self, node: int, session: int, offer: Offer, data: bytes) -> None:
        """Let this node pull these weights while this session lasts."""
        with self._mine:
            if node in self._active and self.roster.session(node) == session:
                self._weights.keep({self.roster.session(other) for other in self._active})
                self._weights.put(offer.weights, session, data, offer.is_packed)
                self._send(node, offer)

    def scale(self, nodes: int) -> None:
        with self._mine:
            self._do(self.roster.scale(nodes, time.monotonic()))
            self.leaving = self.roster.leaving

    def release(self, shard: int) -> None:
        """Let a leaving shard move now."""
        with self._mine:
            self._do(self.roster.release(shard))

    def share_out(self) -> None:
        """Begin with the nodes that have joined: they take the others' shards until those join."""
        with self._mine:
            self._do(self.roster.share_out(time.monotonic()))

    def need_packages(self, names: Sequence[str]) -> str | None:
        """Require these packages of nodes from now on; return which node that has joined does not match, and why.

        A node that joins later and does not match is refused.
        """
        with self._mine:
            return self.admission.need(names, sorted(self._active))

    def answered_nothing(self, shard: int, size: int) -> None:
        """Count an answer that matches no open request: late, or a flood."""
        with self._mine:
            self.dropped += 1
            peer = self._peer_of(shard)
            if peer is not None:
                self._spend(peer, min(max(size, _LATE_BYTES), CONTROL_LIMIT), time.monotonic())

    def pop_output(self) -> list[Output]:
        """Return what workers printed since the last call."""
        with self._mine:
            queues, self.output = self.output, {}
        return [message for queue in queues.values() for message in queue.messages]

    def pump(self, timeout_s: float) -> None:
        """Wait for messages, at most this long, and handle them."""
        with self._mine:
            self._advance(0.0 if self.inbox or self.shard_events or self.pulls else timeout_s)

    # -- both threads, one at a time --------------------------------------------------------------------------

    def _advance(self, timeout_s: float) -> None:
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._mine.wake in ready:
            self._mine.was_woken()
        # Silence counts up to here: what comes while this thread is held up below is read before the next tick.
        began = now = time.monotonic()
        if now - self._listened_at > max(1.0, timeout_s + 0.5):  # the head itself was held up
            self._listening_since = now
        arrived = self._socket.receive(ready, _MOST)
        for message in arrived:
            self._hear(message, now)
        self._listened_at = now = time.monotonic()
        self._unchecked += len(arrived)
        if len(arrived) < _MOST:
            self._read_all_at = began
        elif self._unchecked < len(self._peers):
            return  # peers are read in turn: one that seems silent may have unread messages
        self._unchecked = 0
        for link in self._socket.gone(ready):
            self._link_gone(link)
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            for node, reason in self._supervisor.over.items():
                # An agent in a container may outlive its job; it must not come back in place of the next one.
                self._send(node, Leave(-1, f"its job is over: {reason}"))
                self._do(self.roster.gone(node, reason, now))
            self._do(self.roster.tick(began, self._listening_since))
        if now >= self._next_beat:
            self._next_beat = now + self.timing.beat_s
            for node, peer in self._active.items():
                self._send(node, HeadBeat())
                if peer.is_sending(self._socket.segments(peer.link), now):
                    self.roster.heard(node, self.roster.session(node), now)

    def _hear(self, arrived: Arrived, now: float) -> None:
        node = self.admission.node_of.get(arrived.key)
        if node is None:
            return
        peer = self._peers.get(arrived.route)
        if peer is None:
            peer = self._peers[arrived.route] = Peer(arrived.route, arrived.link)
        peer.node = node
        if len(arrived.frames) > 1:
            is_active = self._active.get(node) is peer
            peer.reader.limit = self.inbox.limit(node, self.roster.shards(node) if is_active else ())
        self.traffic.received(node, arrived.frames)
        try:
            said = peer.reader.read(arrived.frames)
            if said is None:
                self.roster.heard(node, self.roster.session(node), now)
            else:
                self._sort(peer, *said, now)
        except Exception as error:  # an error caused by a message ends its sender, never the head
            self._broke(peer, error, now)

    def _sort(self, peer: Peer, session: int, message: FromNode, frames: list[Any], now: float) -> None:
        node = peer.node
        is_answer = isinstance(message, (Answer, SteppedAll))
        is_current = self._active.get(node) is peer and self.roster.heard(node, session, now)
        if not (is_answer and is_current) and not self._spend(peer, size_of(message, frames), now):
            return
        if isinstance(message, Hello):
            self._hello(peer, message, now)
        elif not is_current:
            self.dropped += 1
            if not peer.was_told:
                peer.was_told = True
                self._say(peer, 0, Refused("its session is over", False))
        elif isinstance(message, Beat):
            self.progress.heard(node, message, self.roster.holder)
        elif isinstance(message, Bye):
            self._send(node, Leave(-1, "goodbye"))  # everything that it sent before has been received
            self._do(self.roster.gone(node, short(message.reason), now))
        elif isinstance(message, Pull):
            self._give(message, peer)
        elif self.roster.holder(message.shard) != node:
            self.dropped += 1
        elif isinstance(message, Output):
            self.output.setdefault(message.shard, OutputQueue()).put(message)
        else:
            self.inbox.put(message, frames)

    def _spend(self, peer: Peer, size: int, now: float) -> bool:
        """Return whether a message that answers no request is within the rate; otherwise drop its sender."""
        if peer.flow.spend(size, now, self._read_all_at):
            return True
        self.dropped += 1
        if self._active.get(peer.node) is peer:
            peer.flow = Flow()
            self._broke(peer, ProtocolError("too many messages that answer no request"), now)
        else:
            self._socket.cut(peer.link)
        return False

    def _broke(self, peer: Peer, error: Exception, now: float) -> None:
        """Drop a node whose message broke the protocol, and tell it why."""
        self.dropped += 1
        if self._active.get(peer.node) is peer:
            text = short(str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}")
            self._do(self.roster.gone(peer.node, f"it broke the protocol: {text}", now))
            self._say(peer, 0, Refused(text, True))

    def _hello(self, peer: Peer, hello: Hello, now: float) -> None:
        before = self._active.get(peer.node)
        done = self.roster.hello(peer.node, hello.instance, self.admission.check(hello), now)
        if any(isinstance(item, Admit) for item in done):
            self._active[peer.node] = peer
            self.admission.admitted(peer.node, hello)
            self.refusals.pop(peer.node, None)
            where = f"{hello.host} (process {hello.pid}, {hello.cores} cores)"
            kind = "node_joined" if before is None else "node_back"
            self._events.add(Event(kind, f"node {peer.node} is here: {where}"), level=logging.INFO)
        for item in done:
            if isinstance(item, Refuse):
                self.refusals[item.node] = item.reason
                if item.final:
                    self._events.add(Event("node_refused", f"node {item.node} was refused: {item.reason}"))
                self._say(peer, 0, Refused(item.reason, item.final))
        self._do([item for item in done if not isinstance(item, Refuse)])

    def _link_gone(self, link: Link) -> None:
        for route, peer in list(self._peers.items()):
            if peer.link == link:
                del self._peers[route]
                if self._active.get(peer.node) is peer:
                    self._do(self.roster.gone(peer.node, "its connection ended", time.monotonic()))

    def shard_broke(self, shard: int, error: Exception) -> None:
        """Drop the node that has this shard: one of its messages broke the protocol."""
        with self._mine:
            peer = self._peer_of(shard)
            if peer is not None:
                self._broke(peer, error, time.monotonic())

    def node_unfit(self, node: int, reason: str, detail: str) -> bool:
        """Stop using a node that cannot run the environments; return whether enough others are left."""
        with self._mine:
            self._events.add(Event("node_unfit", f"node {node} is no longer used: {reason}", detail=detail))
            self._do(self.roster.unfit(node, reason, time.monotonic()))
            return self.roster.num_usable >= self.needed_nodes

    def _peer_of(self, shard: int) -> Peer | None:
        node = self.roster.holder(shard)
        return None if node is None else self._active.get(node)

    def _do(self, instructions: Sequence[Instruction]) -> None:
        if instructions:
            self.leaving = self.roster.leaving
        for item in instructions:
            if isinstance(item, Admit):
                self.inbox.joined(item.node)
                self._send(item.node, self.admission.welcome(item.node, item.session, self.timing))
            elif isinstance(item, ShardUnassigned):
                if item.is_there:
                    self.inbox.left(item.node, item.shard)
                    self._send(item.node, Leave(item.shard))
                self.shard_events.append(item)
            elif isinstance(item, ShardAssigned):
                self.shard_events.append(item)
            elif isinstance(item, Dismiss):
                why = "it cannot run the environments" if item.is_unfit else "the run needs fewer nodes"
                self._send(item.node, Leave(-1, why, failed=item.is_unfit))
                if self._active.pop(item.node, None) is not None and not item.is_unfit:
                    self._events.add(Event("node_left", f"node {item.node}: scaled down"), level=logging.INFO)
                self._supervisor.let_go(item.node)
            elif isinstance(item, Replace):
                self._active.pop(item.node, None)
                level = logging.INFO if item.event == "node_invited" else logging.WARNING
                self._events.add(Event(item.event, f"node {item.node}: {item.reason}"), level=level)
                self._supervisor.want(item.node)

    def _send(self, node: int, message: Any, payload: Sequence[Any] = ()) -> bool:
        peer = self._active.get(node)
        return peer is not None and self._say(peer, self.roster.session(node), message, payload)

    def _say(self, peer: Peer, session: int, message: Any, payload: Sequence[Any] = ()) -> bool:
        for frames in to_wire(session, message, payload):
            self.traffic.sent(peer.node, frames)
            if not self._socket.send(peer.route, frames):
                return False
        return True

    def _give(self, pull: Pull, peer: Peer) -> None:
        sent, session = 0, self.roster.session(peer.node)
        if self._weights.is_repeated(pull, session):
            self._events.add(Event("weights_damaged", f"node {peer.node}: weights had a wrong checksum; pulled again"))
        for message, payload in self._weights.answer(pull, session):
            self._send(peer.node, message, payload)
            if isinstance(message, Withdrawn):
                return
            sent += sum(map(len, payload))
        self.pulls.append((pull, sent, time.monotonic()))

    def stats(self) -> dict[str, Any]:
        return {
            **self.traffic.stats(),
            "refused_keys": self._socket.refused,
            "dropped_messages": self.dropped,
            "missing_nodes": self.roster.missing,
        }

    def close(self, is_over: bool = True) -> None:
        """Tell all nodes that the run is over, unless another head continues it. Idempotent, even if interrupted."""
        if self._is_closed:
            return
        error = self._ending.error()
        self._mine.stop()
        for node in list(self._active) if is_over else ():
            self._send(node, Leave(-1, f"the run failed: {error}" if error else "the run is over", bool(error)))
        deadline = time.monotonic() + (1.0 if is_over else 0.0)
        while self._active and time.monotonic() < deadline:  # the messages must be sent before the socket closes
            self._poller.poll(50)
            self._socket.receive()
            links = set(self._socket.gone())
            self._active = {node: peer for node, peer in self._active.items() if peer.link not in links}
        self._socket.close()
        self._mine.close()
        self._is_closed = True
