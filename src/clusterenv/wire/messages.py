"""Every message between head and node agent, by direction. Arrays and code ride beside them as raw frames.

A *shard* is a node's part of the run: its slots and its workers. Workers are counted over the whole run.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from clusterenv.code.packages import Wanted

PROTOCOL = 7


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
    """Whether it takes pickled code."""
    versions: dict[str, str] = {}
    """Of packages that have to fit where code or a policy is pickled. Has a default: protocols before 4 do not send it,
    and are to be refused by their number."""


class Failed(_ShardMessage):
    """This node cannot run the workers of a shard."""

    text: str
    is_code: bool = True
    """The code of the environments could not be loaded; False: the machine does not allow so many workers."""


class Lacks(_ShardMessage):
    """Packages that the shard's code names, and that this node cannot import as they are on the head."""

    packages: tuple[str, ...]


class Answer(_WorkerMessage):
    """What a worker answered, or a part of it; frames: its plain data (none after a quick reply), then its rows."""

    request: int
    last: bool
    slots: tuple[int, ...]


class SteppedAll(_ShardMessage):
    """All workers of the shard have done a whole step; frames: the rows of all, then plain data of `workers`."""

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
    """Where a worker is, as `TraceStack` asked."""

    text: str


class Beat(_Message):
    """Sent at regular intervals: this node is alive. Workers' progress: (worker, pid, slot, phase, step)."""

    progress: tuple[tuple[int, int, int, int, int], ...]


class Pull(_Message):
    """Ask for `size` bytes of some weights; 0: all have arrived; -1: they cannot be used, offer them whole."""

    weights: int
    at: int
    size: int


class Bye(_Message):
    """This node leaves, for this reason."""

    reason: str


# -- head → node ------------------------------------------------------------------------------------------------


class Welcome(_Message):
    session: int
    beat_s: float
    lease_s: float


class Refused(_Message):
    reason: str
    final: bool
    """False: it may try again."""


class AssignShard(_ShardMessage):
    """Take this shard; frame: the environments' code."""

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


class Rows(_ShardMessage):
    """The memory of rows; frame: its layout."""


class Fragments(_ShardMessage):
    """The memory of fragments; frame: its layout."""


class Start(_WorkerMessage):
    pass


class ToWorker(_WorkerMessage):
    """For a worker; frames: the request as the worker reads it, then the sides (and actions) of its slots."""

    request: int
    slots: tuple[int, ...]
    """Whose sides (and actions) come along."""
    actions: bool
    weights: int = 0
    """It is about these weights, and waits for them where they are still to come."""


class StepAll(_ShardMessage):
    """Every worker of the shard steps all its slots; frames: sides and actions."""

    request: int


class Kill(_WorkerMessage):
    pass


class TraceStack(_WorkerMessage):
    """Ask where a worker is that has been in one call for long; answered by `StackTrace`."""


class Offer(_Message):
    """Weights to pull into the machine's memory at `place`. Requests that need them name them."""

    weights: int
    """Their number in the head's ledger."""
    place: int
    size: int
    checksum: int
    is_packed: bool
    base: int
    """Packed as steps from this one; 0: from none."""
    keep: bool
    """Others will be packed as steps from it."""


class Chunk(_Message):
    """Bytes of some weights; frame: at most half a megabyte of them."""

    weights: int
    at: int


class Withdrawn(_Message):
    """These weights cannot be pulled (any more)."""

    weights: int


class Leave(_ShardMessage):
    """Give the shard up, or (-1) all of them, and end."""

    reason: str = ""
    failed: bool = False
    """The run ended by an exception."""


FromNode = Hello | Failed | Lacks | Answer | SteppedAll | Exited | Output | StackTrace | Beat | Pull | Bye
FromHead = (
    Welcome
    | Refused
    | AssignShard
    | Code
    | Rows
    | Fragments
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
