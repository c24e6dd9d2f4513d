"""Plain data to bytes, refusing what is not plain, with where it is; or sending its repr in its place."""

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
"""Fewer tuples are sooner written one by one than turned into columns."""

_ATOMS = {type(None), bool, int, float, str}
_SAFE_ATOMS = {type(None), bool, float}


class Refused(Exception):
    """Something is not plain; `path` grows from the inside out."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []


def qualified(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text_of(value: Any) -> str:
    try:
        return str.__str__(repr(value))[:_LONGEST_REPR]
    except Exception:  # the user's own __repr__
        return f"<{type(value).__name__}>"


class Writer:
    """Turns one value into a node of the tree, and buffers.

    Args:
        writers: what turns each type that may travel into a node.
        classes: the named tuples and enums that may travel, by name.
        by_repr: send the repr of what is not plain in its place.
        is_careful: look at every int and text: the tree cannot hold some of them.
    """

    __slots__ = ("around", "atoms", "buffers", "by_repr", "classes", "cost", "in_space", "writers")

    def __init__(self, writers: dict[type, Write], classes: dict[str, Any], by_repr: bool, is_careful: bool) -> None:
        self.writers = writers
        self.classes = classes
        self.by_repr = by_repr
        self.atoms = _SAFE_ATOMS if is_careful else _ATOMS
        self.buffers: list[Any] = []
        self.cost = 0
        """Of reading it, beside the tree."""
        self.in_space = False
        self.around: set[int] = set()
        """The containers around. Only `by_repr` needs it: else a cycle ends where it is too deep."""

    def node(self, value: Any, depth: int) -> Any:
        """Return the node of a value that lies in so many lists."""
        if type(value) in self.atoms:
            return value
        return self.writers.get(type(value), _other)(self, value, depth)

    def nodes(self, values: Collection[Any], depth: int, place: Callable[[int], str] = "[{}]".format) -> list[Any]:
        """Return a node for each value; `place` names the place of one that is refused."""
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
        """Return a node for each key or element of a set. A repr that stands in for one differs from the others."""
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
        """Return the node of a value of which nothing may be replaced by its repr; raise Refused, and keep nothing."""
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
    """Write a container unless it lies too deep, or in itself."""

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
    # Many of a kind go through one call of something fast rather than one of ours each.
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
    """Tuples of one length as columns."""
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
    except Exception as error:  # attributes that somebody set to anything
        raise Refused(f"a {qualified(type(value))} whose parts are odd ({why(error)})") from None
    nodes = w.nodes([part for _, part in parts], depth + 1, lambda index: parts[index][0])
    return [wire.SPACE, type(value).__name__, *nodes]


def _cost_of_space(w: Writer, value: Any, message: bytes) -> int:
    """Read the space back. It can hold what its constructor refuses; better found here than at the other end."""
    reader = Reader(message, w.classes)
    reader.left *= 8  # the message will be padded
    free = reader.left
    try:
        reason = "" if reader.read() == value else "it differs from one made from its parts"
    except Exception as error:  # Gymnasium's constructors refuse in whatever way they like
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
