"""Turn bytes into plain data. The bytes may be anything: sizes and memory cost are checked first. Used by `Codec`."""

from __future__ import annotations

import enum
import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from clusterenv.wire import dtypes, spaces
from clusterenv.wire import format as wire

__all__ = ["Damaged", "Reader", "why"]

_HEAD = struct.Struct("<cI")


class Damaged(Exception):
    """The bytes are not a message of this format."""


def why(error: Exception) -> str:
    if isinstance(error, Damaged):
        return str(error)
    if isinstance(error, (IndexError, struct.error)):
        return "it ends too early"
    text = f"{type(error).__name__}: {error!s:.200}"
    return text.encode("ascii", "backslashreplace").decode()


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of trees. Its type is spelled out: for `Any`, msgspec would also make dicts and others."""
    node: Any = None | bool | int | float | str
    for _ in range(wire.DEEPEST + 2):  # a dict or an array beyond the deepest container
        node = None | bool | int | float | str | list[node]
    return msgspec.msgpack.Decoder(node)


class Reader:
    """Read one message; `at` is where its next buffer begins, `left` how many bytes of memory it may still take."""

    __slots__ = ("at", "classes", "data", "left")

    def __init__(self, data: bytes | memoryview, classes: dict[str, Any]) -> None:
        self.data = memoryview(data).cast("B")
        self.classes = classes
        self.at = _HEAD.size
        self.left = wire.FREE + wire.PER_BYTE * len(self.data)

    def read(self) -> Any:
        """Return the value of the message."""
        version, size = _HEAD.unpack_from(self.data)
        if version != wire.VERSION:
            raise Damaged("it has another version, or is not a message")
        tree = bytes(self.take(size, 0))
        self.spend(wire.tree_cost(tree))
        node = _decoder().decode(tree)
        value = _READERS[node[0]](self, node) if node.__class__ is list else node
        if self.at < len(self.data) and bytes(self.data[self.at :]).strip(b"\0"):
            raise Damaged("data follows its value")
        return value

    def values(self, node: list[Any], skip: int = 1) -> list[Any]:
        """Return the values of a node's entries after the first `skip`. In place: a copy would double the memory."""
        del node[:skip]
        if list in map(type, node):
            for index, entry in enumerate(node):
                if entry.__class__ is list:
                    node[index] = _READERS[entry[0]](self, entry)
        return node

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise Damaged("it would take too much memory for its length")

    def take(self, size: int, cost: int = wire.BUFFER_COST) -> memoryview:
        """Return the next buffer."""
        at = self.at
        if not 0 <= size <= len(self.data) - at:
            raise Damaged("it ends too early")
        self.at = at + size
        self.spend(cost * size)
        return self.data[at : at + size]


def _numbers(r: Reader, node: list[Any], code: str) -> list[Any]:
    (_, count) = node
    return list(struct.unpack(f"<{count}{code}", r.take(8 * count)))


def _text(r: Reader, node: list[Any]) -> str:
    return str(_raw(r, node), "utf-8", "surrogatepass")


def _raw(r: Reader, node: list[Any]) -> memoryview:
    (_, size) = node
    return r.take(size)


def _complex(r: Reader, node: list[Any]) -> complex:
    (_, real, imaginary) = node
    return complex(real, imaginary)


def _rows(r: Reader, node: list[Any]) -> list[Any]:
    columns = r.values(node)
    r.spend(wire.rows_cost(len(columns[0]), len(columns)))
    if any(type(column) is not list for column in columns):
        raise Damaged("a column of its rows is not a list")
    return list(zip(*columns, strict=True))


def _struct(r: Reader, node: list[Any]) -> Any:
    kind = r.classes[node[1]]
    if len(node) - 2 != len(kind._fields):
        raise Damaged(f"{kind.__name__} does not have {len(node) - 2} fields")
    return kind._make(r.values(node, 2))


def _tuple(r: Reader, node: list[Any]) -> tuple[Any, ...]:
    r.spend(wire.PLACE_COST * len(node))
    return tuple(r.values(node))


def _dict(r: Reader, node: list[Any]) -> dict[Any, Any]:
    (_, keys, values) = node
    if keys == values == []:  # the infos of most episodes
        return {}
    r.spend(wire.table_cost(len(keys)))
    keys = r.values(keys, 0)
    found = dict(zip(keys, r.values(values, 0), strict=True))
    if len(found) != len(keys):
        raise Damaged("a key occurs twice")
    return found


def _set(r: Reader, node: list[Any]) -> set[Any]:
    r.spend(wire.set_cost(len(node)))
    values = r.values(node)
    found = set(values)
    if len(found) != len(values):
        raise Damaged("an element occurs twice")
    return found


def _enum(r: Reader, node: list[Any]) -> enum.Enum:
    (_, name, member) = node
    value: enum.Enum = r.classes[name].__members__[member]
    return value


def _size(shape: list[Any]) -> int:
    if any(type(length) is not int for length in shape):  # a str times an int is a str
        raise Damaged("a shape is not made of numbers")
    return math.prod(shape)


def _array(r: Reader, node: list[Any]) -> np.ndarray[Any, Any]:
    (_, code, *shape) = node
    dtype = dtypes.dtype_of(code)
    data = r.take(_size(shape) * dtype.itemsize)
    if dtype.kind == "b":  # numpy trusts a bool to be 0 or 1
        flags: np.ndarray[Any, Any] = np.empty(shape, np.bool_)
        np.not_equal(np.ndarray(shape, np.uint8, data), 0, out=flags)
        return flags
    if dtype.kind == "U" and np.any(np.frombuffer(data, f"{dtype.str[0]}u4") > 0x10FFFF):
        raise Damaged("a text has characters that do not exist")  # numpy would fail only when it reads them
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data).copy()
    return array


def _objects(r: Reader, node: list[Any]) -> np.ndarray[Any, Any]:
    shape = node[1]
    if _size(shape) != len(node) - 2:
        raise Damaged("an array has fewer or more elements than its shape")
    r.spend(wire.objects_cost(len(node)))
    array = np.empty(len(node) - 2, object)
    array[:] = r.values(node, 2)
    return array.reshape(shape)


def _space(r: Reader, node: list[Any]) -> Any:
    kind = _SPACES[node[1]]
    values = r.values(node, 2)
    r.spend(spaces.cost(kind, values))
    return spaces.KINDS[kind].build(*values)


_SPACES = {kind.__name__: kind for kind in spaces.KINDS}
_READERS: dict[int, Callable[[Reader, list[Any]], Any]] = {
    wire.LIST: Reader.values,
    wire.TUPLE: _tuple,
    wire.DICT: _dict,
    wire.SET: _set,
    wire.FROZENSET: lambda r, node: frozenset(_set(r, node)),
    wire.STRUCT: _struct,
    wire.OBJECTS: _objects,
    wire.SPACE: _space,
    wire.INTS: lambda r, node: _numbers(r, node, "q"),
    wire.FLOATS: lambda r, node: _numbers(r, node, "d"),
    wire.ROWS: _rows,
    wire.INT: lambda r, node: int.from_bytes(_raw(r, node), "little", signed=True),
    wire.COMPLEX: _complex,
    wire.STR: _text,
    wire.BYTES: lambda r, node: bytes(_raw(r, node)),
    wire.NP_STR: lambda r, node: np.str_(_text(r, node)),
    wire.NP_BYTES: lambda r, node: np.bytes_(bytes(_raw(r, node))),
    wire.SCALAR: lambda r, node: _array(r, node)[()],
    wire.ARRAY: _array,
    wire.ENUM: _enum,
    wire.TYPE: lambda r, node: dtypes.TYPES[node[1]],
}
