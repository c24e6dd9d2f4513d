"""Every message between a pool and a worker, and their framing on a socket pair.

A frame is `<u32 length><u8 kind><body>`. The two messages of the hot loop (`step all your slots`, `done`) carry
just a request number, those that ask for fragments are msgpack: they cross the network for every fragment. Other bodies
are pickled, because both ends run on one machine under one user, over an inherited descriptor; but for the answers of a
node's workers, which go on to the head as plain data (`Raw`).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import cloudpickle
import msgspec

from clusterenv.errors import NotPlainError, ProtocolError
from clusterenv.policy.named import Named
from clusterenv.pool.arena import ArenaLayout
from clusterenv.pool.layout import Layout

__all__ = [
    "Attach",
    "Build",
    "Built",
    "Call",
    "Close",
    "Episode",
    "Evaluate",
    "Fault",
    "FragmentResult",
    "FrameReader",
    "LoadWeights",
    "MapArena",
    "MissingKeys",
    "Raw",
    "Reply",
    "Reset",
    "RunFragment",
    "Rebuild",
    "SetAttr",
    "SetPolicy",
    "Step",
    "encode",
    "encode_named",
    "encode_plain",
    "encode_quick",
    "open_request",
    "plain",
    "with_plain_infos",
]

_HEAD = struct.Struct("<IB")
_QUICK = struct.Struct("<IBI")
_PICKLED, _NUMBER, _PLAIN, _FRAGMENT, _WEIGHTS = range(5)
_RAW = struct.Struct("<IBH")


class Sticky(NamedTuple):
    """A `set_attr` or `call` to repeat on every later incarnation of a slot."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_call: bool


class Build(NamedTuple):
    """Make the environments of these slots; answered by `Built`."""

    request: int
    slots: list[int]
    seeds: list[int]
    """For vector factories, which are seeded when they are made."""
    make: bool = True
    """False for a replacement, whose environments are made by `Rebuild`."""


class Attach(NamedTuple):
    """The layout of the shared memory; not answered."""

    layout: Any
    observation_space: Any
    action_space: Any


class Act(NamedTuple):
    knobs: dict[str, Any]
    incarnations: list[int]


class Acted(NamedTuple):
    """What the policy did in one step; one entry per slot."""

    slots: list[int]
    actions: Any
    logprobs: Any
    version: int


class Step(NamedTuple):
    """Step these slots. `actions` holds them where they cannot lie in shared memory."""

    request: int
    slots: list[int]
    actions: list[Any] | None
    act: Act | None = None
    """Where the worker's policy chooses the actions."""


class Reset(NamedTuple):
    request: int
    slots: list[int]
    seeds: list[int | None]
    options: dict[str, Any] | None


class Rebuild(NamedTuple):
    """Make the environments of these slots anew (incarnation, sticky attributes, seed), then reset them."""

    request: int
    slots: list[int]
    incarnations: list[int]
    seeds: list[int | None]
    options: dict[str, Any] | None
    stickies: list[list[Sticky]]


class Call(NamedTuple):
    request: int
    slots: list[int]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SetAttr(NamedTuple):
    request: int
    slots: list[int]
    name: str
    values: list[Any]


class SetPolicy(NamedTuple):
    """From now on this policy acts; its weights follow."""

    request: int
    recipe: bytes | Named
    """A cloudpickled `Recipe`, or how the worker makes the policy itself."""
    family: Any
    """None with a `Named`: the worker finds out."""
    mask: str | None
    seed: int
    info_keys: tuple[str, ...]


class LoadWeights(NamedTuple):
    """Weights lie in the shared memory for them."""

    request: int
    version: int
    offset: int
    size: int


class MapArena(NamedTuple):
    """The layout of the shared memory for fragments; not answered."""

    layout: Any


class RunFragment(NamedTuple):
    """Act and step for so many steps; answered by a `Reply` whose result is a `FragmentResult`."""

    request: int
    num_steps: int
    side: int
    knobs: dict[str, Any]
    incarnations: list[int]
    sample_every: int = 0
    """One state in so many of each slot's is sampled for drift; 0: none."""
    sample_within: int | None = None
    """Only of the first so many steps: a recurrent policy is replayed from its state at row 0."""


class DriftSamples(NamedTuple):
    """What the acting policy gave for some of the fragment's states."""

    t: Any  # [m]
    columns: Any  # [m]
    params: Any  # [m, P] float32


class Finals(NamedTuple):
    """The true last observations of episodes that ended."""

    t: Any  # [F]
    columns: Any  # [F]
    leaves: list[Any]  # [F, ...] each, in the order of the space's leaves


class FragmentResult(NamedTuple):
    """What a fragment holds beside its arrays. Columns are counted within the worker."""

    num_steps: int
    """Fewer than asked for only where the policy failed."""
    version: int
    finals: Finals
    episodes: list[tuple[int, int, float, int, dict[str, Any]]]
    """(t, column, return, length, final info) of those that were collected from their start."""
    infos: dict[str, list[tuple[int, int, Any]]]
    initial_state: Any
    policy_error: tuple[str, str] | None
    """(what, traceback)"""
    samples: DriftSamples | None
    env_s: float
    policy_s: float
    step_s: Any = None
    """[K] seconds of a step of each environment, float32; None where none was timed."""
    not_sent: str = ""
    """Which info was left out because it is not plain data, and why; "" where none was."""


class MissingKeys(NamedTuple):
    """Keys that no info had by the end of an episode; instead of infos in the answer to a fragment, and once only."""

    mask: str | None
    """Of the action masks."""
    info_keys: list[str]
    seen: list[str]


class Evaluate(NamedTuple):
    """Play these episodes; answered by a `Reply` whose result is a list of `Episode`."""

    request: int
    episodes: list[int]
    seed: int
    deterministic: bool
    record: int
    """Episodes below this number bring their frames back."""
    knobs: dict[str, Any]
    stickies: list[list[Sticky]]
    """For each slot of the worker: attributes and calls that its environments have."""
    stickies_epoch: int
    """Changes with `stickies`: environments of an earlier one are made anew."""


class Episode(NamedTuple):
    number: int
    total: float
    length: int
    frames: list[Any] | None


class Close(NamedTuple):
    request: int


class Fault(NamedTuple):
    """An environment raised, or returned what its spaces do not allow; its slot has none now."""

    slot: int
    phase: str
    error: str
    traceback: str
    seed: int | None
    incarnation: int
    step: int


class Built(NamedTuple):
    request: int
    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    odd_slot: int | None
    """First slot whose spaces differ from those of this worker's first slot."""
    odd_spaces: Any
    faults: list[Fault]


class Reply(NamedTuple):
    """Rows of these slots lie in shared memory, or the results of a call."""

    request: int
    slots: list[int]
    infos: Any = None
    objects: list[tuple[int, list[Any]]] | None = None
    faults: list[Fault] = []  # noqa: RUF012  never mutated: NamedTuple default
    result: Any = None
    last: bool = True
    """False while more rows of the same request will follow."""


class Raw(NamedTuple):
    """An answer that is passed on unopened."""

    request: int
    last: bool
    slots: tuple[int, ...]
    body: bytes


def encode_plain(message: Any, other: Literal["refuse", "repr"] = "refuse") -> bytes:
    """An answer for the network: no pickle. NotPlainError where it holds what is not plain data."""
    body: bytes = plain().pack(message, other)
    slots = getattr(message, "slots", ())
    head = _RAW.pack(message.request, getattr(message, "last", True), len(slots))
    body = head + struct.pack(f"<{len(slots)}I", *slots) + body
    return _HEAD.pack(len(body) + 1, _PLAIN) + body


def with_plain_infos(result: FragmentResult) -> FragmentResult:
    """Leave out the infos that are not plain data, and name the first of them."""
    not_sent: list[str] = []

    def is_plain(key: str, value: Any) -> bool:
        try:
            plain().pack({key: value})
        except NotPlainError as error:
            not_sent.append(f"info{error}")
            return False
        return True

    infos = {key: [entry for entry in entries if is_plain(key, entry[2])] for key, entries in result.infos.items()}
    infos = {key: entries for key, entries in infos.items() if entries}
    episodes = [
        (*episode[:4], {key: value for key, value in episode[4].items() if is_plain(key, value)})
        for episode in result.episodes
    ]
    return result._replace(infos=infos, episodes=episodes, not_sent=not_sent[0] if not_sent else "")


@cache
def plain() -> Any:
    """The codec of what workers answer."""
    from gymnasium.spaces import GraphInstance
    from gymnasium.vector import AutoresetMode

    from clusterenv.infos import Column
    from clusterenv.protocol.plain import Codec

    structs = [Reply, Fault, Built, FragmentResult, Finals, DriftSamples, MissingKeys, Acted, Episode]
    return Codec([*structs, Column, GraphInstance], [AutoresetMode])


def encode(message: NamedTuple) -> bytes:
    compact = _encode_compact(message)
    if compact is not None:
        return compact
    try:
        body = pickle.dumps(message, 5)
    except Exception:  # classes of the user's __main__, lambdas: cloudpickle takes them by value
        body = cloudpickle.dumps(message, 5)
    return _HEAD.pack(len(body) + 1, _PICKLED) + body


def _encode_compact(message: Any) -> bytes | None:
    """Requests that come with every fragment, in a quarter of the bytes; None for others."""
    if type(message) is RunFragment:
        if any(type(value) not in (int, float) for value in message.knobs.values()):
            return None  # one for each slot
        kind = _FRAGMENT
    elif type(message) is LoadWeights:
        kind = _WEIGHTS
    else:
        return None
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body) + 1, kind) + body


@cache
def _compact() -> dict[int, Any]:
    kinds = {_FRAGMENT: RunFragment, _WEIGHTS: LoadWeights}
    return {kind: msgspec.msgpack.Decoder(message).decode for kind, message in kinds.items()}


@cache
def _requests() -> Any:
    """The codec of requests to workers that unpickle nothing."""
    from gymnasium.spaces import GraphInstance

    from clusterenv.protocol.plain import Codec

    structs = [Sticky, Build, Attach, Act, Step, Reset, Rebuild, Call, SetAttr, SetPolicy, Named]
    return Codec([*structs, LoadWeights, MapArena, RunFragment, Evaluate, Close, GraphInstance])


def encode_named(message: Any) -> bytes:
    """A request as plain data. NotPlainError where it holds what is not."""
    compact = _encode_compact(message)
    if compact is not None:
        return compact
    if isinstance(message, (Attach, MapArena)):
        message = message._replace(layout=msgspec.msgpack.encode(message.layout))
    body: bytes = _requests().pack(message)
    return _HEAD.pack(len(body) + 1, _PLAIN) + body


def open_request(body: bytes) -> Any:
    """The other side of `encode_named`."""
    message = _requests().unpack(body)
    if isinstance(message, (Attach, MapArena)):
        kind = Layout if isinstance(message, Attach) else ArenaLayout
        message = message._replace(layout=msgspec.msgpack.decode(message.layout, type=kind))
    return message


def encode_quick(request: int) -> bytes:
    return _QUICK.pack(5, _NUMBER, request)


def _raw(body: bytes) -> Raw:
    request, last, count = _RAW.unpack_from(body)
    end = _RAW.size + 4 * count
    return Raw(request, bool(last), struct.unpack_from(f"<{count}I", body, _RAW.size), body[end:])


class FrameReader:
    """Bytes in, messages out: an int for a quick frame, else the message."""

    def __init__(self, open_plain: Callable[[bytes], Any] | None = None, allow_pickle: bool = True) -> None:
        self._buffer = bytearray()
        self._open_plain = open_plain or _raw
        self._allow_pickle = allow_pickle

    def feed(self, data: bytes | memoryview) -> list[Any]:
        if len(data) == 9 and not self._buffer and data[4] == _NUMBER:
            return [_QUICK.unpack(data)[2]]
        self._buffer += data
        messages: list[Any] = []
        start = 0
        while len(self._buffer) - start >= 5:
            length, kind = _HEAD.unpack_from(self._buffer, start)
            if len(self._buffer) - start < 4 + length:
                break
            body = bytes(memoryview(self._buffer)[start + 5 : start + 4 + length])
            if kind == _NUMBER:
                messages.append(struct.unpack("<I", body)[0])
            elif kind == _PLAIN:
                messages.append(self._open_plain(body))
            elif kind in (_FRAGMENT, _WEIGHTS):
                messages.append(_compact()[kind](body))
            elif self._allow_pickle:
                messages.append(pickle.loads(body))
            else:
                raise ProtocolError("a pickled request, where none is taken")
            start += 4 + length
        if start:
            del self._buffer[:start]
        return messages
