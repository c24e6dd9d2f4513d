"""Track the connections of nodes: what a node must have to join, and how much was sent and received."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import gymnasium

from clusterenv import __version__
from clusterenv.cluster.contract import Timing
from clusterenv.cluster.flow import Flow
from clusterenv.code import versions
from clusterenv.memory.compression import installed_codecs
from clusterenv.transport.sockets import Link
from clusterenv.wire.frames import Reader, head_reader
from clusterenv.wire.messages import PROTOCOL, FromNode, Hello, Welcome

_LONGEST_REASON = 2000  # the most characters of a node's text that are shown

_SENDING, _WITHIN_S = 8, 2.0
"""As many TCP segments within this time show that a message is on its way. libzmq's own pings are fewer: those come
from agents that hang, too."""


class Peer:
    """One node's connection."""

    def __init__(self, route: bytes, link: Link) -> None:
        self.route = route
        self.link = link
        self.reader: Reader[FromNode] = head_reader()
        self.node = -1
        self.was_told = False  # that its session is over
        self.flow = Flow()  # of messages that answer no request
        self._segments, self._counted_at = 0, 0.0

    def is_sending(self, segments: int, now: float) -> bool:
        """Return whether a message is on its way, from the number of TCP segments received so far.

        On a slow link that loses packets, a single piece of a message can take longer than the silence that is taken
        for death.
        """
        is_sending = segments - self._segments >= _SENDING
        if is_sending or now - self._counted_at >= _WITHIN_S:
            self._segments, self._counted_at = segments, now
        return is_sending


class Admission:
    """Check what a node must have to join: a key of the run, enough cores, and packages in matching versions.

    Args:
        node_keys: public keys of the nodes, in the order of their numbers.
        compress: whether nodes pack the observations of fragments.
    """

    def __init__(
        self,
        node_keys: Sequence[str],
        cores: int,
        sends_pickle: bool,
        compress: Literal["auto", "always", "never"] = "auto",
    ) -> None:
        self.node_of = {key: number for number, key in enumerate(node_keys)}
        self._cores = cores
        self._sends_pickle = sends_pickle
        self._compress: Literal["auto", "always", "never"] = compress
        self._packages = set(versions.FOR_PICKLES if sends_pickle else ())
        self._hellos: dict[int, Hello] = {}  # of the nodes that have joined

    def check(self, hello: Hello) -> str | None:
        """Return why this node is refused."""
        return _mismatch(hello, self._cores, self._sends_pickle, self._packages)

    def admitted(self, node: int, hello: Hello) -> None:
        self._hellos[node] = hello

    def hello(self, node: int) -> Hello | None:
        """Return what this node said when it last joined."""
        return self._hellos.get(node)

    def welcome(self, node: int, session: int, timing: Timing) -> Welcome:
        """Return the message that begins a session of this node: it uses the compressors that both sides have."""
        codecs = tuple(name for name in installed_codecs() if name in self._hellos[node].codecs)
        return Welcome(session, timing.beat_s, timing.lease_s, self._compress, codecs)

    def need(self, names: Sequence[str], nodes: Sequence[int]) -> str | None:
        """Require these packages from now on; returns which of these nodes does not have them, and why."""
        for node in nodes:
            wrong = _mismatch(self._hellos[node], self._cores, self._sends_pickle, names)
            if wrong is not None:
                return f"node {node} ({self._hellos[node].host}): {wrong}"
        self._packages.update(names)
        return None


def _mismatch(hello: Hello, cores: int, sends_pickle: bool, packages: Iterable[str]) -> str | None:
    """Return why a node cannot join a run that needs this many cores of it, and these packages in matching versions."""
    pairs = [
        ("protocol", str(hello.protocol), str(PROTOCOL)),
        ("clusterenv", hello.clusterenv, __version__),
        ("Python", hello.python, ".".join(map(str, sys.version_info[:2]))),
        ("Gymnasium", hello.gymnasium, gymnasium.__version__),
    ]
    wrong = [f"{name} {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours]
    if hello.protocol == PROTOCOL:
        wrong += versions.differences(hello.versions, versions.installed(), packages, sends_pickle)
    if wrong:
        return f"versions differ: {'; '.join(wrong)}. Install the same on both sides"
    if sends_pickle and not hello.allow_pickle:
        return f"{hello.host} takes no pickled code: set allow_pickle=False here, or start it without --no-pickle"
    if hello.cores < cores:
        return (
            f"{hello.host} may use {hello.cores} CPUs (by affinity and control group quotas) for {cores} workers: "
            "ask for fewer workers_per_node or more CPUs, or set oversubscribe=True"
        )
    return None


class Traffic:
    """Bytes and frames by node. Encryption adds at most 42 bytes to a frame; Ethernet, IP and TCP 66 to a packet."""

    def __init__(self, nodes: int) -> None:
        self.sent_bytes, self.received_bytes = [0] * nodes, [0] * nodes
        self.sent_frames, self.received_frames = [0] * nodes, [0] * nodes

    def sent(self, node: int, frames: Sequence[Any]) -> None:
        self.sent_bytes[node] += sum(map(len, frames))
        self.sent_frames[node] += len(frames)

    def received(self, node: int, frames: Sequence[Any]) -> None:
        self.received_bytes[node] += sum(map(len, frames))
        self.received_frames[node] += len(frames)

    def stats(self) -> dict[str, list[int]]:
        """Return a copy of all counters, by name."""
        return {name: list(counts) for name, counts in vars(self).items()}


def short(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
