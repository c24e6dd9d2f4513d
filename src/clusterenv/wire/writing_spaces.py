"""Gymnasium's spaces to bytes: their parts, read back at once to see whether the other end can make them again."""

from __future__ import annotations

import struct
from typing import Any

from clusterenv.wire import format as wire
from clusterenv.wire import spaces
from clusterenv.wire.format import short
from clusterenv.wire.reading import Reader, why
from clusterenv.wire.writing import Refused, Write, Writer, qualified, write_other

__all__ = ["SPACE_WRITERS"]


def _space(w: Writer, value: Any, depth: int) -> None:
    if w.by_repr:  # no part of a space can be replaced by a text
        if not w.attempt(value, depth):
            write_other(w, value, depth)
    elif w.in_space:
        _parts(w, value, depth)
    else:
        mark, cost = len(w.chunks), w.cost
        w.in_space = True
        try:
            _parts(w, value, depth)
        finally:
            w.in_space = False
        w.cost = cost + _read_back(w, value, depth, mark)


def _parts(w: Writer, value: Any, depth: int) -> None:
    if w.enter(value, depth):
        try:
            parts = spaces.KINDS[type(value)].parts(value)
        except Exception as error:  # attributes that somebody set to anything
            raise Refused(f"a {qualified(type(value))} whose parts are odd ({why(error)})") from None
        w.chunks.append(bytes((wire.SPACE,)) + short(type(value).__name__.encode()) + struct.pack("<I", len(parts)))
        index = 0
        try:
            for index, (_, part) in enumerate(parts):  # noqa: B007  it tells where
                w.write(part, depth + 1)
        except Refused as refused:
            refused.path.append(parts[index][0])
            raise


def _read_back(w: Writer, value: Any, depth: int, mark: int) -> int:
    """What reading it costs. A space can hold what its constructor refuses; better found here than at the other end."""
    reader = Reader(b"".join(w.chunks[mark:]), 0, w.words)
    reader.left *= 8  # the message will be padded
    free = reader.left
    try:
        reason = "" if reader.read(depth) == value else "it differs from one made from its parts"
    except Exception as error:  # Gymnasium's constructors refuse in whatever way they like
        reason = why(error)
    if reason:
        raise Refused(f"a {qualified(type(value))} that cannot be made again ({reason})")
    return free - reader.left


SPACE_WRITERS: dict[type, Write] = dict.fromkeys(spaces.KINDS, _space)
