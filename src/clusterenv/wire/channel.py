"""Frame the messages between head and worker on their socket pair.

A frame is `<u32 length><u8 kind><body>`. The two messages of the hot loop (`step all your slots`, `done`) carry only a
request number. `RunFragment` and `LoadWeights` are msgpack: they cross the network for every fragment. Other bodies are
pickled, because both ends run on one machine as one user, over an inherited descriptor; except for plain data: the
answers of a node's workers, which are passed on to the head (`Raw`), and requests to workers that unpickle nothing.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import cloudpickle
import msgspec

from clusterenv.errors import NotPlainError, ProtocolError
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.rows import Layout
from clusterenv.policy.acting.named import Named
from clusterenv.policy.onnx.actor import OnnxRecipe, OnnxWeight
from clusterenv.wire.requests import (
    Act,
    Acted,
    Attach,
    Build,
    Built,
    Call,
    Close,
    DriftSamples,
    Evaluate,
    Fault,
    Finals,
    FragmentResult,
    LoadWeights,
    MapArena,
    MissingKeys,
    PlayedEpisode,
    Rebuild,
    Reply,
    Reset,
    RunFragment,
    SetAttr,
    SetPolicy,
    Step,
    Sticky,
)
from clusterenv.wire.spaces import DescribedSpace, portable

__all__ = [
    "Brings",
    "FrameReader",
    "Raw",
    "brings_of",
    "encode",
    "encode_answer",
    "encode_named",
    "encode_plain",
    "encode_quick",
    "join_reasons",
    "open_request",
    "plain",
    "with_plain_ends",
    "with_plain_infos",
    "with_portable_spaces",
]

_HEAD = struct.Struct("<IB")
_QUICK = struct.Struct("<IBI")
_PICKLED, _NUMBER, _PLAIN, _FRAGMENT, _WEIGHTS = range(5)
_RAW = struct.Struct("<IBBIIIH")
_PACKED = struct.Struct("<HQ")
_NOTHING: Mapping[int, bytes] = {}
_LONGEST_REASONS = 900


class Brings(enum.IntEnum):
    """What an answer brings in shared memory, which is sent along with it."""

    NOTHING = 0
    ROWS = 1
    FRAGMENT = 2


class Raw(NamedTuple):
    """An answer that is passed on without being decoded."""

    request: int
    last: bool
    slots: tuple[int, ...]
    body: bytes
    brings: Brings = Brings.ROWS
    side: int = 0
    num_steps: int = 0
    packed: dict[int, Any] = {}  # noqa: RUF012  never mutated: NamedTuple default
    """Arrays of the fragment that the worker has packed, by their position."""


def brings_of(message: Any, reply: Any) -> tuple[Brings, int, int]:
    """Return what this answer to a request brings, on which side, and of how many steps."""
    if isinstance(message, RunFragment):
        return Brings.FRAGMENT, message.side, reply.result.num_steps
    return (Brings.ROWS if isinstance(message, (int, Step, Reset, Rebuild)) else Brings.NOTHING), 0, 0


def encode_plain(
    message: Any,
    other: Literal["refuse", "repr"] = "refuse",
    brings: tuple[Brings, int, int] = (Brings.ROWS, 0, 0),
    packed: Mapping[int, bytes] = _NOTHING,
) -> bytes:
    """Encode an answer for the network, without pickle; raise NotPlainError if it is not plain data.

    `packed`: arrays of a fragment by their position, which are sent in place of those in shared memory.
    """
    body: bytes = plain().pack(message, other)
    slots = getattr(message, "slots", ())
    head = _RAW.pack(message.request, getattr(message, "last", True), *brings, len(slots), len(packed))
    table = b"".join(_PACKED.pack(i, len(data)) for i, data in packed.items())
    body = b"".join([head, struct.pack(f"<{len(slots)}I", *slots), table, *packed.values(), body])
    return _HEAD.pack(len(body) + 1, _PLAIN) + body


def with_plain_infos(result: FragmentResult) -> FragmentResult:
    """Leave out the infos that are not plain data, and name the first of them."""
    not_sent: list[str] = []

    def is_plain(key: str, value: Any) -> bool:
        reason = _why_not_plain(key, value)
        not_sent.extend([reason] if reason else [])
        return not reason

    infos = {key: [entry for entry in entries if is_plain(key, entry[2])] for key, entries in result.infos.items()}
    infos = {key: entries for key, entries in infos.items() if entries}
    episodes = [
        (*episode[:4], {key: value for key, value in episode[4].items() if is_plain(key, value)})
        for episode in result.episodes
    ]
    return result._replace(infos=infos, episodes=episodes, not_sent=not_sent[0] if not_sent else "")


def _why_not_plain(key: Any, value: Any, other: Literal["refuse", "repr"] = "refuse") -> str:
    """Return why this entry of an info cannot be sent; "" if it can."""
    try:
        plain().pack({key: value}, other)
    except NotPlainError as error:
        return f"info{error}"
    return ""


def join_reasons(reasons: Iterable[str]) -> str:
    """Join reasons why infos were not sent, each a line; the head accepts a limited length."""
    lines = (" ".join(reason.split())[:300] for reason in reasons if reason)
    return "\n".join(lines)[:_LONGEST_REASONS]


def with_plain_ends(
    episodes: list[PlayedEpisode], other: Literal["refuse", "repr"], most_bytes: int
) -> list[PlayedEpisode]:
    """Leave out of the final infos what is not plain data, and whole infos once all together take `most_bytes`."""
    sent: list[PlayedEpisode] = []
    for episode in episodes:
        reasons = {key: _why_not_plain(key, value, other) for key, value in episode.info.items()}
        info = {key: value for key, value in episode.info.items() if not reasons[key]}
        not_sent = [*episode.not_sent.splitlines(), *reasons.values()]
        size = len(plain().pack(info, other))
        if size > most_bytes:
            info, not_sent = {}, [f"the info of episode {episode.number} takes {size} bytes, {most_bytes} can be sent"]
        else:
            most_bytes -= size
        sent.append(episode._replace(info=info, not_sent=join_reasons(not_sent)))
    return sent


def with_portable_spaces(built: Built) -> Built:
    """Replace the spaces that cannot be sent by their descriptions."""
    others = [(slot, portable(observation), portable(action)) for slot, observation, action in built.others]
    return built._replace(
        observation_space=portable(built.observation_space), action_space=portable(built.action_space), others=others
    )


@cache
def plain() -> Any:
    """Return the codec of workers' answers."""
    from gymnasium.spaces import GraphInstance
    from gymnasium.vector import AutoresetMode

    from clusterenv.wire.infos import Column
    from clusterenv.wire.plain import PlainCodec

    structs = [Reply, Fault, Built, DescribedSpace, FragmentResult, Finals, DriftSamples, MissingKeys, Acted]
    return PlainCodec([*structs, PlayedEpisode, Column, GraphInstance], [AutoresetMode])


def encode(message: NamedTuple) -> bytes:
    compact = _encode_compact(message)
    if compact is not None:
        return compact
    body = _pickled(message)
    return _HEAD.pack(len(body) + 1, _PICKLED) + body


def encode_answer(answer: Reply | Built) -> bytes:
    """Encode an answer to this machine; infos of evaluated episodes that cannot be pickled are left out, and named."""
    try:
        return encode(answer)
    except Exception:  # pickling runs the code of users' classes
        if not isinstance(answer, Reply) or not isinstance(answer.result, list):
            raise
        return encode(answer._replace(result=[_with_pickled_end(item) for item in answer.result]))


def _with_pickled_end(item: Any) -> Any:
    if not isinstance(item, PlayedEpisode):
        return item
    reasons = {key: _why_not_pickled(key, value) for key, value in item.info.items()}
    info = {key: value for key, value in item.info.items() if not reasons[key]}
    return item._replace(info=info, not_sent=join_reasons([*item.not_sent.splitlines(), *reasons.values()]))


def _why_not_pickled(key: Any, value: Any) -> str:
    try:
        _pickled({key: value})
    except Exception as error:  # as above
        return f"info[{key!r}] cannot be pickled: {error}"
    return ""


def _pickled(value: Any) -> bytes:
    try:
        body = pickle.dumps(value, 5)
        # Pickled by name, a class of the user's script is not found in a worker, whose __main__ is another module.
        if b"__main__" not in body:
            return body
    except Exception:  # lambdas, and such classes in an answer
        pass
    by_value: bytes = cloudpickle.dumps(value, 5)
    return by_value


def _encode_compact(message: Any) -> bytes | None:
    """Encode requests that are sent for every fragment, in a quarter of the bytes; return None for others."""
    if type(message) is RunFragment:
        if any(type(value) not in (int, float) for value in message.knobs.values()):
            return None  # a knob with a value for each slot
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
    """Return the codec of requests to workers that unpickle nothing."""
    from gymnasium.spaces import GraphInstance

    from clusterenv.wire.plain import PlainCodec

    structs = [Sticky, Build, Attach, Act, Step, Reset, Rebuild, Call, SetAttr, SetPolicy, Named]
    structs += [OnnxRecipe, OnnxWeight]
    return PlainCodec([*structs, LoadWeights, MapArena, RunFragment, Evaluate, Close, GraphInstance])


def encode_named(message: Any) -> bytes:
    """Encode a request as plain data; raise NotPlainError if it is not."""
    compact = _encode_compact(message)
    if compact is not None:
        return compact
    if isinstance(message, (Attach, MapArena)):
        message = message._replace(layout=msgspec.msgpack.encode(message.layout))
    body: bytes = _requests().pack(message)
    return _HEAD.pack(len(body) + 1, _PLAIN) + body


def open_request(body: bytes) -> Any:
    """Decode the body of a request that `encode_named` made."""
    message = _requests().unpack(body)
    if isinstance(message, (Attach, MapArena)):
        kind = Layout if isinstance(message, Attach) else ArenaLayout
        message = message._replace(layout=msgspec.msgpack.decode(message.layout, type=kind))
    return message


encode_quick = partial(_QUICK.pack, 5, _NUMBER)
"""Encode a request number: a step of all slots, or its usual answer."""


def _raw(body: bytes) -> Raw:
    request, last, brings, side, num_steps, count, num_packed = _RAW.unpack_from(body)
    end = _RAW.size + 4 * count
    slots = struct.unpack_from(f"<{count}I", body, _RAW.size)
    packed, table, view = {}, end, memoryview(body)
    end += _PACKED.size * num_packed
    for at in range(table, end, _PACKED.size):
        i, size = _PACKED.unpack_from(body, at)
        packed[i] = view[end : end + size]
        end += size
    return Raw(request, bool(last), slots, body[end:], Brings(brings), side, num_steps, packed)


class FrameReader:
    """Turn bytes into messages: an int for a quick frame, else the message."""

    def __init__(self, open_plain: Callable[[bytes], Any] | None = None, allow_pickle: bool = True) -> None:
        self.buffer = bytearray()
        """The beginning of a frame that is not complete yet."""
        self._open_plain = open_plain or _raw
        self._allow_pickle = allow_pickle

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """Return the messages that are complete now.

        A message that cannot be decoded raises its error once. The next call returns those before it; what follows is
        discarded, because its sender has to be ended.
        """
        if len(data) == 9 and not self.buffer and data[4] == _NUMBER:
            return [_QUICK.unpack(data)[2]]
        self.buffer += data
        messages: list[Any] = []
        start = 0
        while len(self.buffer) - start >= 5:
            length, kind = _HEAD.unpack_from(self.buffer, start)
            if len(self.buffer) - start < 4 + length:
                break
            body = bytes(memoryview(self.buffer)[start + 5 : start + 4 + length])
            try:
                if kind == _NUMBER:
                    messages.append(struct.unpack("<I", body)[0])
                elif kind == _PLAIN:
                    messages.append(self._open_plain(body))
                elif kind in (_FRAGMENT, _WEIGHTS):
                    messages.append(_compact()[kind](body))
                elif self._allow_pickle:
                    messages.append(pickle.loads(body))
                else:
                    raise ProtocolError("a pickled request, where pickle is not allowed")
            except Exception:
                del self.buffer[start:]
                raise
            start += 4 + length
        if start:
            del self.buffer[:start]
        return messages
