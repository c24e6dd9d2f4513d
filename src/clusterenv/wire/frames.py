"""Turn messages into frames and back, checking every limit before anything is kept.

A message is a sequence of bytes: the sizes of its parts, its header, its payload. A small one is sent as one frame
after a prefix, because every frame is encrypted and passed on separately; the payload of a larger one follows in
separate frames, which saves a copy. One of more than half a megabyte is sent as pieces `[prefix, bytes]`, because a
single huge frame would hold up the heartbeats of its connection. The pieces of a message come in order; whole messages
may come between them, but no pieces of another one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from clusterenv.errors import ProtocolError
from clusterenv.wire.messages import FromHead, FromNode

__all__ = ["CHUNK", "CONTROL_LIMIT", "FRAME_LIMIT", "PIECE_LEAST", "Reader", "head_reader", "node_reader", "to_wire"]

CHUNK = 1 << 19
PIECE_LEAST = 1 << 16
"""Least size of a piece, except the last, on any link."""

FRAME_LIMIT = CHUNK + (1 << 16)
"""The socket refuses larger frames."""

CONTROL_LIMIT = 1 << 20
"""Bytes of the largest message that answers no request."""

_PREFIX = struct.Struct("<BQ")  # whole or piece, session
_PIECE = struct.Struct("<BQIIQ")  # .., index, count, total
_PART, _WHOLE = 1, 2  # not 0: whole in protocols 1 and 2, whose sizes are wider
_INLINE = 1 << 16
_HEADER_LIMIT = 4 << 20
"""Bytes of the largest header that a head reads: decoded, it may take many times as much memory."""
_HEADER = 1024
_MAX_PARTS = 4096

_encode = msgspec.msgpack.Encoder().encode
M = TypeVar("M")
Buffer = bytes | bytearray | memoryview


def to_wire(session: int, message: Any, payload: Sequence[Buffer] = (), piece: int = CHUNK) -> list[list[Buffer]]:
    """Return the wire messages, each a list of frames; a large message in pieces of `piece` bytes."""
    header = _encode(message)
    sizes = [len(header), *map(len, payload)]
    total = sum(sizes)
    table = struct.pack(f"<H{len(sizes)}{'I' if total <= piece + _HEADER else 'Q'}", len(sizes), *sizes)
    if total <= _INLINE:
        return [[b"".join([_PREFIX.pack(_WHOLE, session), table, header, *payload])]]
    if total <= piece + _HEADER:  # a chunk with its header is not divided
        return [[b"".join([_PREFIX.pack(_WHOLE, session), table, header]), *payload]]
    body = b"".join([table, header, *payload])
    view, count = memoryview(body), -(-len(body) // piece)
    return [[_PIECE.pack(_PART, session, i, count, len(body)), view[i * piece : (i + 1) * piece]] for i in range(count)]


class Reader(Generic[M]):
    """Read the wire messages of one sender. Raises ProtocolError, and nothing else."""

    def __init__(self, types: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(types).decode
        self.limit = CONTROL_LIMIT
        """Bytes of the largest message to accept now, in pieces or whole."""
        self.header_limit = _HEADER_LIMIT
        self._pieces: list[Any] = []

    def read(self, frames: Sequence[Any]) -> tuple[int, M, list[Any]] | None:
        """Return (session, message, payload), or None while pieces are missing."""
        first = frames[0] if frames else b""
        if len(first) >= _PREFIX.size and first[0] == _WHOLE and len(frames) <= _MAX_PARTS:
            if len(frames) > 1:
                self._check_total(sum(map(len, frames)))
            parts = _cut(memoryview(first)[_PREFIX.size :], "I", frames[1:])
            return _PREFIX.unpack_from(first)[1], self._header(parts[0]), parts[1:]
        if len(frames) == 2 and len(first) == _PIECE.size and first[0] == _PART:
            return self._join(bytes(first), frames[1])
        raise ProtocolError(f"a message of {len(frames)} frames without a known prefix")

    def _join(self, prefix: bytes, piece: Any) -> tuple[int, M, list[Any]] | None:
        _, session, index, count, total = _PIECE.unpack(prefix)
        self._check_total(total)
        size = len(self._pieces[0]) if self._pieces else len(piece)
        fits = min(total, PIECE_LEAST) <= size <= CHUNK and count == -(-total // size) if size else False
        if index != len(self._pieces) or not fits or len(piece) != min(size, total - index * size):
            self._pieces = []
            raise ProtocolError("a piece that does not follow the one before it")
        self._pieces.append(piece)
        if len(self._pieces) < count:
            return None
        body, self._pieces = memoryview(b"".join(self._pieces)), []
        parts = _cut(body, "Q")
        return session, self._header(parts[0]), parts[1:]

    def _check_total(self, total: int) -> None:
        if total > self.limit:
            self._pieces = []
            raise ProtocolError(f"a message of {total} bytes, where {self.limit} is the most that makes sense")

    def _header(self, data: Any) -> M:
        if len(data) > self.header_limit:
            raise ProtocolError(f"a header of {len(data)} bytes")
        try:
            message: M = self._decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a header that cannot be read: {error}") from None
        return message


def _cut(body: memoryview, unit: Literal["I", "Q"], others: Sequence[Any] = ()) -> list[Any]:
    """Return the parts of a message, whose sizes have the struct code `unit`; all but the first may be in `others`."""
    if len(body) < 2:
        raise ProtocolError("a message cut short")
    (count,) = struct.unpack_from("<H", body)
    at = 2 + struct.calcsize(f"<{unit}") * count
    if not 1 <= count <= _MAX_PARTS or at > len(body):
        raise ProtocolError(f"a message of {count} parts in {len(body)} bytes")
    sizes = struct.unpack_from(f"<{count}{unit}", body, 2)
    if others:
        if at + sizes[0] != len(body) or sizes[1:] != tuple(map(len, others)):
            raise ProtocolError("parts that do not have the sizes announced")
        return [body[at:], *others]
    if at + sum(sizes) != len(body):
        raise ProtocolError("parts that do not fill their message")
    parts = []
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    return parts


def head_reader() -> Reader[FromNode]:
    """Return a reader for the head."""
    return Reader(FromNode)


def node_reader() -> Reader[FromHead]:
    """Return a reader for a node; its head may send any amount."""
    reader: Reader[FromHead] = Reader(FromHead)
    reader.limit = reader.header_limit = 1 << 62
    return reader
