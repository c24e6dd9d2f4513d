"""Turn plain data into bytes; refuse what is not plain, with its path, or replace it by its repr. Used by `Codec`."""

from __future__ import annotations

import enum
import functools
import itertools
import struct
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from clusterenv.wire import dtypes, spaces
from clusterenv.wire import format as wire
from clusterenv.wire.format import DEEPEST
from clusterenv.wire.reading import Reader, why

__all__ = ["WRITERS", "Refused", "Writer", "qualified", "write_enum", "write_struct"]

_LONGEST_REPR = 1000
_FEWEST_NUMBERS = 16
"""Shorter lists of numbers stay in the tree."""
_FEWEST_ROWS = 4
"""Fewer tuples are faster to write one by one than as columns."""

_ATOMS = {type(None), bool, int, float, str}
_SAFE_ATOMS = {type(None), bool, float}


class Refused(Exception):
    """A value is not plain; `path` grows from the inside out."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []


def qualified(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text_of(value: Any) -> str:
    try:
        return str.__str__(repr(value))[:_LONGEST_REPR]
    except Exception:  # of the user's __repr__
        return f"<{type(value).__name__}>"


class Writer:
    """Turn one value into a node of the tree, and buffers.

    Args:
        writers: the function that turns each supported type into a node.
        classes: the supported named tuples and enums, by name.
        by_repr: replace what is not plain by its repr.
        is_careful: check every int and str: the tree cannot hold some of them.
    """

    __slots__ = ("around", "atoms", "buffers", "by_repr", "classes", "cost", "in_space", "writers")

    def __init__(self, writers: dict[type, Write], classes: dict[str, Any], by_repr: bool, is_careful: bool) -> None:
        self.writers = writers
        self.classes = classes
        self.by_repr = by_repr
        self.atoms = _SAFE_ATOMS if is_careful else _ATOMS
        self.buffers: list[Any] = []
        self.cost = 0
        """Bytes of memory that reading takes, beside the tree."""
        self.in_space = False
        self.around: set[int] = set()
        """Ids of the enclosing containers. Only `by_repr` needs them: else a cycle is refused where it is too deep."""

    def node(self, value: Any, depth: int) -> Any:
        """Return the node of a value; `depth`: number of lists around it."""
        if type(value) in self.atoms:
            return value
        return self.writers.get(type(value), _other)(self, value, depth)

    def nodes(self, values: Collection[Any], depth: int, place: Callable[[int], str] = "[{}]".format) -> list[Any]:
        """Return a node for each value; `place` names the position of one that is refused."""
        atoms = self.atoms
        if atoms.issuperset(map(type, values)):
            return list(values)
        get = self.writers.get
        nodes: list[Any] = []
        try:
            for value in values:
                kind = type(value)
                nodes.append(value if kind in atoms else get(kind, _other)(self, value, depth))
        except Refused as refused:
            refused.path.append(place(len(nodes)))
            raise
        return nodes

    def keys(self, keys: Collection[Any], depth: int, place: str) -> list[Any]:
        """Return a node for each key or element of a set. Reprs that replace some of them are made unique."""
        if self.atoms.issuperset(map(type, keys)):
            return list(keys)
        nodes: list[Any] = []
        texts: set[str] = set()
        for key in keys:
            try:
                nodes.append(self.whole(key, depth))
            except Refused as refused:
                if not self.by_repr:
                    refused.path.append(place)
                    raise
                text = _text_of(key)
                others = (f"{text[: _LONGEST_REPR - 20]} #{number}" for number in itertools.count(2))
                name = next(name for name in itertools.chain((text,), others) if name not in keys and name not in texts)
                texts.add(name)
                nodes.append(self.node(name, depth))
        return nodes

    def whole(self, value: Any, depth: int) -> Any:
        """Return the node of a value without replacing any part by its repr. If that raises Refused, keep nothing."""
        mark, cost, by_repr = len(self.buffers), self.cost, self.by_repr
        self.by_repr = False
        try:
            return self.node(value, depth)
        except Refused:
            del self.buffers[mark:]
            self.cost = cost
            raise
        finally:
            self.by_repr = by_repr


Write = Callable[[Writer, Any, int], Any]


def _other(w: Writer, value: Any, depth: int, what: str | None = None) -> Any:
    if w.by_repr:
        return w.node(_text_of(value), depth)
    if what is None:
        what = f"the class {qualified(value)}" if isinstance(value, type) else f"a {qualified(type(value))}"
    raise Refused(what)


def _container(write: Write) -> Write:
    """Decorate the writer of a container, to refuse one that is nested too deep or contains itself."""

    @functools.wraps(write)
    def checked(w: Writer, value: Any, depth: int) -> Any:
        if depth >= DEEPEST or id(value) in w.around:
            what = f"a {qualified(type(value))} more than {DEEPEST} deep, or one that contains itself,"
            return _other(w, value, depth, what)
        if not w.by_repr:
            return write(w, value, depth)
        w.around.add(id(value))
        node = write(w, value, depth)
        w.around.discard(id(value))
        return node

    return checked


@_container
def _list(w: Writer, value: list[Any], depth: int) -> Any:
    kinds = set(map(type, value))
    # One fast call for all values of a type, instead of one Python call for each.
    many = _MANY.get(kinds.pop()) if len(kinds) == 1 else None
    node = None if many is None else many(w, value, depth)
    return [wire.LIST, *w.nodes(value, depth + 1)] if node is None else node


def _numbers(w: Writer, value: list[Any], tag: int, code: str) -> Any:
    count = len(value)
    if count < _FEWEST_NUMBERS:
        return None
    try:
        w.buffers.append(struct.pack(f"<{count}{code}", *value))
    except struct.error:  # one needs more than 64 bits
        return None
    return [tag, count]


def _rows(w: Writer, value: list[tuple[Any, ...]], depth: int) -> Any:
    """Write tuples of one length as columns; return None where that does not apply."""
    count, width = len(value), len(value[0])
    if count < _FEWEST_ROWS or not width or depth + 1 >= DEEPEST or len(set(map(len, value))) > 1:
        return None
    w.cost += wire.rows_cost(count, width)
    columns: list[Any] = [wire.ROWS]
    for index, column in enumerate(zip(*value, strict=True)):
        try:
            columns.append(_list(w, list(column), depth + 1))
        except Refused as refused:
            refused.path.insert(-1, f"[{index}]")  # the row's index is the last
            raise
    return columns


_MANY: dict[type, Write] = {
    int: lambda w, value, depth: _numbers(w, value, wire.INTS, "q"),
    float: lambda w, value, depth: _numbers(w, value, wire.FLOATS, "d"),
    tuple: _rows,
}


@_container
def _tuple(w: Writer, value: tuple[Any, ...], depth: int) -> Any:
    w.cost += wire.PLACE_COST * (1 + len(value))
    return [wire.TUPLE, *w.nodes(value, depth + 1)]


@_container
def write_struct(w: Writer, value: Any, depth: int) -> Any:
    nodes = w.nodes(value, depth + 1, lambda index: f".{value._fields[index]}")
    return [wire.STRUCT, type(value).__name__, *nodes]


@_container
def _dict(w: Writer, value: dict[Any, Any], depth: int) -> Any:
    w.cost += wire.table_cost(len(value))
    keys = w.keys(value, depth + 2, ".keys()")
    values = w.nodes(value.values(), depth + 2, lambda index: f"[{_text_of(list(value)[index]):.50}]")
    return [wire.DICT, keys, values]


@_container
def _set(w: Writer, value: set[Any] | frozenset[Any], depth: int) -> Any:
    w.cost += wire.set_cost(1 + len(value))
    return [wire.SET if type(value) is set else wire.FROZENSET, *w.keys(value, depth + 1, "{...}")]


def _int(w: Writer, value: int, depth: int) -> Any:
    if -(2**63) <= value < 2**63:
        return value
    return _raw(w, wire.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _str(w: Writer, value: str, depth: int) -> Any:
    return value if value.isascii() else _raw(w, wire.STR, value.encode("utf-8", "surrogatepass"))


def _raw(w: Writer, tag: int, raw: bytes) -> Any:
    w.buffers.append(raw)
    return [tag, len(raw)]


def write_enum(w: Writer, value: enum.Enum, depth: int) -> Any:
    if type(value).__members__.get(value.name) is value:
        return [wire.ENUM, type(value).__name__, value.name]
    return _other(w, value, depth, f"a combination of flags of {qualified(type(value))}")


def _type(w: Writer, value: type, depth: int) -> Any:
    name = dtypes.TYPE_NAMES.get(value)
    return _other(w, value, depth) if name is None else [wire.TYPE, name]


def _scalar(w: Writer, value: np.generic, depth: int) -> Any:
    w.buffers.append(value.tobytes())
    return [wire.SCALAR, dtypes.code_of(value.dtype)]


def _array(w: Writer, value: np.ndarray[Any, Any], depth: int) -> Any:
    dtype = value.dtype
    code = dtypes.code_of(dtype)
    if code is not None:
        is_buffer = value.flags.c_contiguous and dtype.kind not in "Mm"
        w.buffers.append(value if is_buffer else value.tobytes())
        return [wire.ARRAY, code, *value.shape]
    if dtype.kind == "O":
        return _objects(w, value, depth)
    return _other(w, value, depth, f"an array of dtype {dtype}")


@_container
def _objects(w: Writer, value: np.ndarray[Any, Any], depth: int) -> Any:
    def place(index: int) -> str:
        return f"[{', '.join(map(str, np.unravel_index(index, value.shape))) or '()'}]"

    w.cost += wire.objects_cost(2 + value.size)
    return [wire.OBJECTS, list(value.shape), *w.nodes(list(value.flat), depth + 1, place)]


def _space(w: Writer, value: Any, depth: int) -> Any:
    if w.by_repr:  # no part of a space can be replaced by a text
        try:
            return w.whole(value, depth)
        except Refused:
            return _other(w, value, depth)
    if w.in_space:
        return _parts(w, value, depth)
    mark = len(w.buffers)
    w.in_space = True
    try:
        node = _parts(w, value, depth)
    finally:
        w.in_space = False
    w.cost += _cost_of_space(w, value, wire.join(node, w.buffers[mark:]))
    return node


@_container
def _parts(w: Writer, value: Any, depth: int) -> Any:
    try:
        parts = spaces.KINDS[type(value)].parts(value)
    except Exception as error:  # its attributes may have been set to anything
        raise Refused(f"a {qualified(type(value))} whose parts are odd ({why(error)})") from None
    nodes = w.nodes([part for _, part in parts], depth + 1, lambda index: parts[index][0])
    return [wire.SPACE, type(value).__name__, *nodes]


def _cost_of_space(w: Writer, value: Any, message: bytes) -> int:
    """Return the cost of reading the space back; refuse one with parts that its constructor does not accept."""
    reader = Reader(message, w.classes)
    reader.left *= 8  # the message will be padded
    free = reader.left
    try:
        reason = "" if reader.read() == value else "it differs from one made from its parts"
    except Exception as error:  # Gymnasium's constructors raise various exceptions
        reason = why(error)
    if reason:
        raise Refused(f"a {qualified(type(value))} that cannot be made again ({reason})")
    return free - reader.left


WRITERS: dict[type, Write] = {
    int: _int,
    str: _str,
    complex: lambda w, value, depth: [wire.COMPLEX, value.real, value.imag],
    bytes: lambda w, value, depth: _raw(w, wire.BYTES, value),
    bytearray: lambda w, value, depth: _raw(w, wire.BYTES, bytes(value)),
    list: _list,
    tuple: _tuple,
    dict: _dict,
    set: _set,
    frozenset: _set,
    type: _type,
    np.ndarray: _array,
    np.str_: lambda w, value, depth: _raw(w, wire.NP_STR, value.encode("utf-8", "surrogatepass")),
    np.bytes_: lambda w, value, depth: _raw(w, wire.NP_BYTES, value),
    **dict.fromkeys(dtypes.SCALARS, _scalar),
    **dict.fromkeys(spaces.KINDS, _space),
}
