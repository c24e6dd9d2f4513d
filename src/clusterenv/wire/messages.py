"""Every message between head and node agent, by direction. Arrays and code are sent beside them as raw frames.

A *shard* is a node's part of the run: its slots and its workers. Workers are numbered over the whole run.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from clusterenv.code.packages import Wanted
from clusterenv.system.host_load import HostSample

PROTOCOL = 13


class _Message(msgspec.Struct, tag=True, array_like=True):
    """Sent as an array that begins with the message's name."""


class _ShardMessage(_Message):
    shard: int


class _WorkerMessage(_ShardMessage):
    worker: int


# -- node → head ------------------------------------------------------------------------------------------------


class Hello(_Message):
    """The first message of a node."""

    protocol: int
    clusterenv: str
    python: str
    gymnasium: str
    instance: str
    """Random, chosen when the agent starts: distinguishes a node that reconnects from another with the same key."""
    host: str
    pid: int
    cores: int
    allow_pickle: bool
    """Whether it accepts pickled code."""
    versions: dict[str, str] = {}
    """Of packages that must match where code or a policy is pickled. Has a default: protocols before 4 do not send it,
    and must be refused by their number."""
    codecs: tuple[str, ...] = ()
    """Compressors that it can use (`memory/compression.py`)."""
    job: str = ""
    """The scheduler's number of its job."""
    ends_at: float | None = None
    """When the scheduler ends that job (Unix time), if it says so."""


class Failed(_ShardMessage):
    """This node cannot run the workers of a shard."""

    text: str
    is_code: bool = True
    """The code of the environments could not be loaded; False: the machine does not allow that many workers."""


class Lacks(_ShardMessage):
    """Request packages that the shard's code names and that this node cannot import as they are on the head."""

    packages: tuple[str, ...]


class Answer(_WorkerMessage):
    """A worker's answer, or a part of it; frames: its plain data (empty for a quick reply), then its rows."""

    request: int
    last: bool
    slots: tuple[int, ...]
    packed: tuple[int, ...] = ()
    """Positions of the arrays of a fragment that are packed."""


class SteppedAll(_ShardMessage):
    """All workers of the shard have stepped all slots; frames: the rows of all, then the plain data of `workers`."""

    request: int
    workers: tuple[int, ...]


class Exited(_WorkerMessage):
    reason: str
    tail: str


class Output(_WorkerMessage):
    """Lines that a worker printed."""

    text: str
    dropped: int = 0
    """Lines before these that the node dropped."""

    @property
    def num_lines(self) -> int:
        return self.text.count("\n") + 1 if self.text else 0


class StackTrace(_WorkerMessage):
    """The stack of a worker, requested by `TraceStack`."""

    text: str


class Beat(_Message):
    """Sent at regular intervals: this node is alive. Workers' progress: (worker, pid, slot, phase, step)."""

    progress: tuple[tuple[int, int, int, int, int], ...]
    host: HostSample | None = None


class Pull(_Message):
    """Request `size` bytes of some weights; 0: all have arrived; -1: they cannot be used, offer them whole."""

    weights: int
    at: int
    size: int


class Bye(_Message):
    """This node is leaving, for this reason."""

    reason: str


# -- head → node ------------------------------------------------------------------------------------------------


class Welcome(_Message):
    session: int
    beat_s: float
    lease_s: float
    compress: Literal["auto", "always", "never"] = "auto"
    """Whether to pack the observations of fragments."""
    codecs: tuple[str, ...] = ()
    """Compressors that both sides have."""


class HeadBeat(_Message):
    """Sent at regular intervals: the head is alive.

    A node whose own heartbeats wait behind a large answer on a slow link hears nothing else from the head.
    """


class Refused(_Message):
    reason: str
    final: bool
    """False: the node may try again."""


class AssignShard(_ShardMessage):
    """Host this shard; frame: the environments' code."""

    workers: tuple[tuple[int, tuple[int, ...]], ...]
    """(worker, its slots)"""
    num_envs: int
    entry_point: str | None
    mode: str | None
    check: bool
    threads: int | None
    preload: tuple[str, ...]
    other: Literal["refuse", "repr"]
    is_named: bool
    """The code is a name, and no request is pickled."""
    packages: tuple[Wanted, ...]
    """The user's own packages that the code names: the node asks for those that it lacks (`Lacks`)."""


class Code(_ShardMessage):
    """The answer to `Lacks`; frame: the files that can be sent."""


class MapRows(_ShardMessage):
    """Allocate the memory of rows; frame: its layout."""


class MapFragments(_ShardMessage):
    """Allocate the memory of fragments; frame: its layout."""


class Start(_WorkerMessage):
    pass


class ToWorker(_WorkerMessage):
    """Forward a request to a worker; frames: the request as it reads it, then the sides (and actions) of its slots."""

    request: int
    slots: tuple[int, ...]
    """Slots whose sides (and actions) are sent along."""
    actions: bool
    weights: int = 0
    """The request needs these weights, and waits until they have arrived; 0: none."""


class StepAll(_ShardMessage):
    """Step all slots of every worker of the shard; frames: sides and actions."""

    request: int


class Kill(_WorkerMessage):
    pass


class TraceStack(_WorkerMessage):
    """Request the stack of a worker whose call takes long; answered by `StackTrace`."""


class Offer(_Message):
    """Offer weights to be pulled into the machine's memory at `place`. Requests that need them name their number."""

    weights: int
    """Their number in the head's ledger."""
    place: int
    size: int
    checksum: int
    is_packed: bool
    base: int
    """Number of the weights that they are packed as a delta from; 0: none."""
    keep: bool
    """Later weights will be packed as deltas from these."""


class Chunk(_Message):
    """Bytes of some weights; frame: at most half a megabyte of them."""

    weights: int
    at: int


class Withdrawn(_Message):
    """These weights cannot be pulled (any more)."""

    weights: int


class Leave(_ShardMessage):
    """Give up this shard; -1: give up all shards and exit."""

    reason: str = ""
    failed: bool = False
    """Exit with an error: the run ended with an exception, or this node cannot run the environments."""


FromNode = Hello | Failed | Lacks | Answer | SteppedAll | Exited | Output | StackTrace | Beat | Pull | Bye
FromHead = (
    Welcome
    | HeadBeat
    | Refused
    | AssignShard
    | Code
    | MapRows
    | MapFragments
    | Start
    | ToWorker
    | StepAll
    | Kill
    | TraceStack
    | Offer
    | Chunk
    | Withdrawn
    | Leave
)
