"""The format of a plain message: its tags, its limits, and upper bounds of the memory that reading it takes.

A message is `<version u8> <size of the tree u32> <tree> <buffers> <zeros>`. The tree is msgpack of None, bools,
numbers, texts and lists only; a list begins with the tag of the value that it encodes. Bulky data (arrays, bytes, lists
of numbers) is in the buffers, in the order in which the tree names it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

VERSION = b"\x02"
DEEPEST = 100
"""Deepest nesting of lists in a tree."""
FREE = 8 << 20
"""Bytes of memory that reading any message may take."""
PER_BYTE = 8
"""Bytes of memory that it may take in addition, for each byte of the message."""

# Upper bounds of the bytes that reading takes: for a place in a container, a value of the tree, a byte of a buffer (an
# int of 8 bytes takes 40).
PLACE_COST, _NODE_COST, BUFFER_COST = 8, 80, 5
_CHEAP_BYTES = bytes((*range(0x80), *range(0xC0, 0xC4), *range(0xE0, 0x100)))
"""Bytes of small ints, None, False, True, and ASCII texts, which cost at most a place."""

LIST, TUPLE, DICT, SET, FROZENSET, STRUCT, OBJECTS, SPACE = range(8)
INTS, FLOATS, ROWS, INT, COMPLEX, STR, BYTES, NP_STR, NP_BYTES, SCALAR, ARRAY, ENUM, TYPE = range(8, 21)

_encode = msgspec.msgpack.Encoder().encode
_u32 = struct.Struct("<I").pack


def tree_cost(tree: bytes) -> int:
    """Return an upper bound of the bytes that decoding a tree takes: any byte that may begin a value counts as one."""
    return PLACE_COST * len(tree) + _NODE_COST * len(tree.translate(None, _CHEAP_BYTES))


def table_cost(count: int) -> int:
    """Return an upper bound of the bytes that a dict takes beside its node."""
    return 0 if count < 5 else 150 * count


def set_cost(count: int) -> int:
    return 160 + table_cost(count)


def objects_cost(count: int) -> int:
    """Return the bytes that an array of objects takes: numpy makes a temporary one."""
    return 2 * PLACE_COST * count


def rows_cost(count: int, width: int) -> int:
    """Return the bytes that tuples made from columns take."""
    return count * (64 + PLACE_COST * width)


def join(node: Any, buffers: Sequence[Any], cost: int = 0) -> bytes:
    """Return the message, with zeros appended where reading it would take more memory than its length allows."""
    tree = _encode(node)
    data = b"".join((VERSION, _u32(len(tree)), tree, *buffers))
    cost += tree_cost(tree) + BUFFER_COST * (len(data) - len(tree))
    missing = cost - FREE - PER_BYTE * len(data)
    return data + bytes(missing // PER_BYTE + 1) if missing > 0 else data
