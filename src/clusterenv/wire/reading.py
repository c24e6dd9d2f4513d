"""Bytes to plain data. The bytes may be anything: sizes are held against what is there, and cost is counted, first."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from clusterenv.wire import dtypes, spaces
from clusterenv.wire import format as wire
from clusterenv.wire.format import DEEPEST, PLACE_COST, SEQUENCE_COST, Words

__all__ = ["Damaged", "Reader", "why"]

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_i64 = struct.Struct("<q").unpack_from
_f64 = struct.Struct("<d").unpack_from
_c128 = struct.Struct("<dd").unpack_from
_shape_of = [struct.Struct(f"<{ndim}Q").unpack_from for ndim in range(256)]


class Damaged(Exception):
    """The bytes are none of ours."""


def why(error: Exception) -> str:
    if isinstance(error, Damaged):
        return str(error)
    if isinstance(error, (IndexError, struct.error)):
        return "it ends too early"
    text = f"{type(error).__name__}: {error!s:.200}"
    return text.encode("ascii", "backslashreplace").decode()


class Reader:
    """One message; `at` is how far it is read, `left` how many bytes of memory it may still take."""

    __slots__ = ("at", "data", "left", "words")

    def __init__(self, data: bytes | memoryview, at: int, words: Words) -> None:
        self.data = data
        self.at = at
        self.left = wire.FREE + wire.PER_BYTE * len(data)
        self.words = words

    def read(self, depth: int) -> Any:
        """The value that comes next and lies in so many containers."""
        at = self.at
        self.at = at + 1
        return _READERS[self.data[at]](self, depth)

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise Damaged("it would take too much memory for its length")

    def skip(self, size: int) -> int:
        """Where the next `size` bytes begin; they are there."""
        at = self.at
        if size > len(self.data) - at:
            raise Damaged("it ends too early")
        self.at = at + size
        return at

    def count(self) -> int:
        """How many values come next; each takes a byte at least."""
        at = self.at
        count: int = _u32(self.data, at)[0]
        self.at = at + 4
        if count > len(self.data) - at - 4:
            raise Damaged("it ends too early")
        return count

    def short(self) -> bytes:
        size = self.data[self.at]
        self.at += 1
        at = self.skip(size)
        return bytes(self.data[at : at + size])

    def raw(self) -> bytes | memoryview:
        size = _u64(self.data, self.at)[0]
        self.at += 8
        self.spend(wire.TEXT_COST)
        at = self.skip(size)
        return self.data[at : at + size]

    def shape(self) -> tuple[int, ...]:
        ndim = self.data[self.at]
        shape = _shape_of[ndim](self.data, self.at + 1)
        self.at += 1 + 8 * ndim
        return shape

    def enter(self, depth: int, cost: int) -> None:
        if depth >= DEEPEST:
            raise Damaged(f"it is more than {DEEPEST} deep")
        self.spend(cost)

    def items(self, count: int, depth: int) -> list[Any]:
        self.enter(depth, SEQUENCE_COST + PLACE_COST * count)
        depth += 1
        data = self.data
        values: list[Any] = []
        for _ in range(count):
            at = self.at
            self.at = at + 1
            values.append(_READERS[data[at]](self, depth))
        return values


def _unknown(r: Reader, depth: int) -> NoReturn:
    raise Damaged(f"no value begins with byte {r.data[r.at - 1]}")


def _small(r: Reader, depth: int) -> int:
    at = r.at
    r.at = at + 1
    return r.data[at]


def _int(r: Reader, depth: int) -> Any:
    at = r.at
    r.at = at + 8
    return _i64(r.data, at)[0]


def _big(r: Reader, depth: int) -> int:
    return int.from_bytes(r.raw(), "little", signed=True)


def _float(r: Reader, depth: int) -> Any:
    at = r.at
    r.at = at + 8
    return _f64(r.data, at)[0]


def _complex(r: Reader, depth: int) -> complex:
    at = r.at
    r.at = at + 16
    return complex(*_c128(r.data, at))


def _str(r: Reader, depth: int) -> str:
    return str(r.raw(), "utf-8", "surrogatepass")


def _list(r: Reader, depth: int) -> list[Any]:
    return r.items(r.count(), depth)


def _numbers(r: Reader, depth: int, code: str) -> list[Any]:
    count = r.count()
    r.enter(depth, SEQUENCE_COST + PLACE_COST * count)
    return list(struct.unpack_from(f"<{count}{code}", r.data, r.skip(8 * count)))


def _texts(r: Reader, depth: int) -> list[str]:
    count = r.count()
    r.enter(depth, SEQUENCE_COST + count * (PLACE_COST + wire.TEXT_COST))
    text = str(r.raw(), "utf-8", "surrogatepass")
    if text.count("\0") != count - 1:
        raise Damaged("its texts are fewer or more")
    return text.split("\0")


def _rows(r: Reader, depth: int) -> list[Any]:
    count, width = r.count(), r.count()
    r.enter(depth, SEQUENCE_COST + count * (PLACE_COST + SEQUENCE_COST + PLACE_COST * width))
    columns = [r.read(depth + 1) for _ in range(width)]
    if not columns or any(type(column) is not list or len(column) != count for column in columns):
        raise Damaged("its rows differ in length")
    return list(zip(*columns, strict=True))


def _struct(r: Reader, depth: int) -> Any:
    name = r.short()
    kind = r.words.structs.get(name)
    count = _small(r, depth)
    if kind is None or count != len(kind._fields):
        raise Damaged(f"there is no {name!r} of {count} fields")
    return kind._make(r.items(count, depth))


def _dict(r: Reader, depth: int) -> dict[Any, Any]:
    count = r.count()
    r.enter(depth, wire.table_cost(count))
    depth += 1
    found = {}
    for _ in range(count):
        key = r.read(depth)
        found[key] = r.read(depth)
    if len(found) != count:
        raise Damaged("a key is there twice")
    return found


def _set(r: Reader, depth: int) -> set[Any]:
    count = r.count()
    r.enter(depth, wire.table_cost(count))
    found = {r.read(depth + 1) for _ in range(count)}
    if len(found) != count:
        raise Damaged("an element is there twice")
    return found


def _enum(r: Reader, depth: int) -> enum.Enum:
    name, member = r.short(), r.short().decode()
    value: enum.Enum | None = getattr(r.words.enums.get(name), "__members__", {}).get(member)
    if value is None:
        raise Damaged(f"there is no {name!r}.{member!r}")
    return value


def _type(r: Reader, depth: int) -> type:
    name = r.short().decode()
    if name not in dtypes.TYPES:
        raise Damaged(f"no type {name!r} travels")
    return dtypes.TYPES[name]


def _array(r: Reader, depth: int) -> np.ndarray[Any, Any]:
    r.spend(wire.ARRAY_COST)
    dtype = dtypes.dtype_of(r.short())
    return _array_of(r, dtype, r.shape())


def _scalar(r: Reader, depth: int) -> Any:
    r.spend(wire.TEXT_COST)
    return _array_of(r, dtypes.dtype_of(r.short()), ())[()]


def _array_of(r: Reader, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    size = math.prod(shape) * dtype.itemsize
    at = r.skip(size)
    array: np.ndarray[Any, Any]
    if dtype.kind == "b":  # numpy trusts a bool to be 0 or 1
        array = np.empty(shape, np.bool_)
        np.not_equal(np.ndarray(shape, np.uint8, r.data, at), 0, out=array)
        return array
    if dtype.kind == "U" and np.any(np.ndarray(size // 4, f"{dtype.str[0]}u4", r.data, at) > 0x10FFFF):
        raise Damaged("a text has characters that do not exist")  # numpy only fails when it looks at them
    array = np.ndarray(shape, dtype, r.data, at).copy()
    return array


def _objects(r: Reader, depth: int) -> np.ndarray[Any, Any]:
    shape = r.shape()
    count = math.prod(shape)
    if count > len(r.data) - r.at:
        raise Damaged("it ends too early")
    r.spend(wire.ARRAY_COST)
    values = r.items(count, depth)
    array = np.empty(count, object)
    array[:] = values
    return array.reshape(shape)


def _space(r: Reader, depth: int) -> Any:
    name = r.short()
    kind = _SPACES.get(name)
    if kind is None:
        raise Damaged(f"there is no space {name!r}")
    values = r.items(r.count(), depth)
    r.spend(spaces.cost(kind, values))
    return spaces.KINDS[kind].build(*values)


_SPACES = {kind.__name__.encode(): kind for kind in spaces.KINDS}
_BY_TAG: dict[int, Callable[[Reader, int], Any]] = {
    wire.NONE: lambda r, depth: None,
    wire.FALSE: lambda r, depth: False,
    wire.TRUE: lambda r, depth: True,
    wire.SMALL: _small,
    wire.INT: _int,
    wire.BIG: _big,
    wire.FLOAT: _float,
    wire.COMPLEX: _complex,
    wire.STR: _str,
    wire.BYTES: lambda r, depth: bytes(r.raw()),
    wire.LIST: _list,
    wire.INTS: lambda r, depth: _numbers(r, depth, "q"),
    wire.FLOATS: lambda r, depth: _numbers(r, depth, "d"),
    wire.TEXTS: _texts,
    wire.ROWS: _rows,
    wire.TUPLE: lambda r, depth: tuple(r.items(r.count(), depth)),
    wire.DICT: _dict,
    wire.SET: _set,
    wire.FROZENSET: lambda r, depth: frozenset(_set(r, depth)),
    wire.STRUCT: _struct,
    wire.ENUM: _enum,
    wire.TYPE: _type,
    wire.ARRAY: _array,
    wire.OBJECTS: _objects,
    wire.SCALAR: _scalar,
    wire.NP_STR: lambda r, depth: np.str_(_str(r, depth)),
    wire.NP_BYTES: lambda r, depth: np.bytes_(bytes(r.raw())),
    wire.SPACE: _space,
}
_READERS = [_BY_TAG.get(tag, _unknown) for tag in range(256)]
