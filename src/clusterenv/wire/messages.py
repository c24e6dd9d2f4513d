"""Every message between head and node agent, by direction. Arrays and code ride beside them as raw frames.

A *shard* is a node's part of the run: its slots and its workers. Workers are counted over the whole run.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from clusterenv.code.packages import Wanted

__all__ = [
    "PROTOCOL",
    "Answer",
    "Beat",
    "Bye",
    "Chunk",
    "Code",
    "Exited",
    "Failed",
    "Fragments",
    "FromHead",
    "FromNode",
    "Hello",
    "AssignShard",
    "Kill",
    "Lacks",
    "Leave",
    "Offer",
    "Output",
    "Pull",
    "Refused",
    "StepAll",
    "Rows",
    "SteppedAll",
    "StackTrace",
    "Start",
    "ToWorker",
    "TraceStack",
    "Welcome",
    "Withdrawn",
]

PROTOCOL = 7


class _Message(msgspec.Struct, tag=True, array_like=True):
    """Sent as an array that begins with the message's name."""


# -- node → head ------------------------------------------------------------------------------------------------


class Hello(_Message):
    """The first thing that a node says."""

    protocol: int
    clusterenv: str
    python: str
    gymnasium: str
    instance: str
    """Made up when the agent started: tells a node that comes back from another with the same key."""
    host: str
    pid: int
    cores: int
    allow_pickle: bool
    """Whether it takes pickled code."""
    versions: dict[str, str] = {}
    """Of packages that have to fit where code or a policy is pickled. Has a default: protocols before 4 do not send it,
    and are to be refused by their number."""


class Failed(_Message):
    """This node cannot run the workers of a shard."""

    shard: int
    text: str
    is_code: bool = True
    """The code of the environments could not be loaded; False: the machine does not allow so many workers."""


class Lacks(_Message):
    """Packages that the shard's code names, and that this node cannot import as they are on the head."""

    shard: int
    packages: tuple[str, ...]


class Answer(_Message):
    """What a worker answered, or a part of it; frames: its plain data (none after a quick reply), then its rows."""

    shard: int
    worker: int
    request: int
    last: bool
    slots: tuple[int, ...]


class SteppedAll(_Message):
    """All workers of the shard have done a whole step; frames: the rows of all, then plain data of `workers`."""

    shard: int
    request: int
    workers: tuple[int, ...]


class Exited(_Message):
    shard: int
    worker: int
    reason: str
    tail: str


class Output(_Message):
    """Lines that a worker printed."""

    shard: int
    worker: int
    text: str
    dropped: int = 0
    """Lines before these that the node dropped."""

    @property
    def num_lines(self) -> int:
        return self.text.count("\n") + 1 if self.text else 0


class StackTrace(_Message):
    """Where a worker is, as `TraceStack` asked."""

    shard: int
    worker: int
    text: str


class Beat(_Message):
    """Once in a while, whatever happens: this node is there. Workers' progress: (worker, pid, slot, phase, step)."""

    progress: tuple[tuple[int, int, int, int, int], ...]


class Pull(_Message):
    """So many bytes of some weights, please; none: they are all here; -1: offer them whole, these cannot be used."""

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
    """False: it may come again."""


class AssignShard(_Message):
    """Take this shard; frame: the environments' code."""

    shard: int
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


class Code(_Message):
    """The answer to `Lacks`; frame: the files that can be sent."""

    shard: int


class Rows(_Message):
    """The memory of rows; frame: its layout."""

    shard: int


class Fragments(_Message):
    """The memory of fragments; frame: its layout."""

    shard: int


class Start(_Message):
    shard: int
    worker: int


class ToWorker(_Message):
    """For a worker; frames: the request as the worker reads it, then the sides (and actions) of its slots."""

    shard: int
    worker: int
    request: int
    slots: tuple[int, ...]
    """Whose sides (and actions) come along."""
    actions: bool
    weights: int = 0
    """It is about these weights, and waits for them where they are still to come."""


class StepAll(_Message):
    """Every worker of the shard steps all its slots; frames: sides and actions."""

    shard: int
    request: int


class Kill(_Message):
    shard: int
    worker: int


class TraceStack(_Message):
    """Ask where a worker is that has been in one call for long; answered by `StackTrace`."""

    shard: int
    worker: int


class Offer(_Message):
    """Weights to be pulled; `place` is where in the machine's memory they go. What has to wait for them names them."""

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


class Leave(_Message):
    """Give the shard up, or (-1) all of them, and end."""

    shard: int
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
