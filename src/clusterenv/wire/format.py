"""The format of a message: its tags, its limits, and what its values are taken to cost."""

from __future__ import annotations

from typing import Any

VERSION = b"\x01"
DEEPEST = 100
"""So many containers may lie in each other."""
FREE = 8 << 20
"""Bytes of memory that any message may take to read."""
PER_BYTE = 4
"""And so many more for each byte of its own. Numbers and the content of texts and arrays are not counted: the bytes
that they take on the wire are about those that they take in memory."""
IN_PLACE = 1 << 16
"""Smaller buffers are copied sooner than looked at in place."""

NONE, FALSE, TRUE, SMALL, INT, BIG, FLOAT, COMPLEX, STR, BYTES = b"NFT1iIfcsb"
LIST, INTS, FLOATS, TEXTS, ROWS, TUPLE, DICT, SET, FROZENSET = b"lqdwzt{(<"
STRUCT, ENUM, TYPE, ARRAY, OBJECTS, SCALAR, NP_STR, NP_BYTES, SPACE = b"reyaonuvp"

# Bytes that reading takes at its worst for a text or scalar, an array, a sequence and each of its places.
TEXT_COST, ARRAY_COST, SEQUENCE_COST, PLACE_COST = 80, 240, 64, 16


def table_cost(count: int) -> int:
    """The same for a dict or set."""
    return 240 if count < 5 else 100 + 150 * count


def short(text: bytes) -> bytes:
    """A name: its length and itself."""
    return bytes((len(text),)) + text


class Words:
    """The classes that a codec was told of."""

    def __init__(self) -> None:
        self.structs: dict[bytes, Any] = {}
        self.enums: dict[bytes, Any] = {}
        self.heads: dict[type, bytes] = {}
        """How a member of the class begins."""
        self.writers: dict[type, Any] = {}
        """For every type that may travel, what writes it."""
