"""Plain data to bytes, refusing what is not plain, with where it is; or sending its repr in its place."""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np

from clusterenv.wire import dtypes
from clusterenv.wire import format as wire
from clusterenv.wire.format import DEEPEST, PLACE_COST, SEQUENCE_COST, Words, short

__all__ = ["WRITERS", "Refused", "Write", "Writer", "qualified", "write_enum", "write_other", "write_struct"]

_LONGEST_REPR = 1000
_FEWEST_ROWS = 4
"""Fewer tuples are sooner written one by one than turned into columns."""

_with_count = struct.Struct("<BI").pack
_with_counts = struct.Struct("<BII").pack
_with_size = struct.Struct("<BQ").pack
_with_int = struct.Struct("<Bq").pack
_with_float = struct.Struct("<Bd").pack
_with_complex = struct.Struct("<Bdd").pack
_SMALL_INTS = [bytes((wire.SMALL, number)) for number in range(256)]


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
    """One message in the making."""

    __slots__ = ("by_repr", "chunks", "cost", "in_space", "open", "words", "writers")

    def __init__(self, words: Words, by_repr: bool) -> None:
        self.words = words
        self.writers = words.writers
        self.by_repr = by_repr
        self.chunks: list[Any] = [wire.VERSION]
        self.cost = 0
        self.in_space = False
        self.open: set[int] = set()
        """The mutable containers around. Only `by_repr` needs it: else a cycle ends where it is too deep."""

    def write(self, value: Any, depth: int) -> None:
        """A value that lies in so many containers."""
        self.writers.get(type(value), write_other)(self, value, depth)

    def items(self, values: Iterable[Any], depth: int, names: Sequence[str] | None = None) -> None:
        get = self.writers.get
        index = 0
        try:
            for index, value in enumerate(values):  # noqa: B007  it tells where
                get(type(value), write_other)(self, value, depth)
        except Refused as refused:
            refused.path.append(f"[{index}]" if names is None else f".{names[index]}")
            raise

    def enter(self, value: Any, depth: int) -> bool:
        """Whether the container's content may follow."""
        if depth >= DEEPEST or id(value) in self.open:
            what = f"a {qualified(type(value))} more than {DEEPEST} deep, or one that contains itself,"
            write_other(self, value, depth, what)
            return False
        if self.by_repr:
            self.open.add(id(value))
        return True

    def attempt(self, value: Any, depth: int) -> bool:
        """Write it whole, or not at all."""
        mark, cost = len(self.chunks), self.cost
        self.by_repr = False
        try:
            self.write(value, depth)
        except Refused:
            del self.chunks[mark:]
            self.cost = cost
            return False
        finally:
            self.by_repr = True
        return True

    def key(self, key: Any, depth: int, others: Container[Any], named: set[str]) -> None:
        """A key, or an element of a set. Where its repr stands in for it, that stays different from the others."""
        if not self.by_repr:
            self.write(key, depth)
        elif not self.attempt(key, depth):
            text = name = _text_of(key)
            for number in itertools.count(2):
                if name not in others and name not in named:
                    break
                name = f"{text[: _LONGEST_REPR - 20]} #{number}"
            named.add(name)
            self.write(name, depth)


Write = Callable[[Writer, Any, int], None]


def write_other(w: Writer, value: Any, depth: int, what: str | None = None) -> None:
    if w.by_repr:
        return w.write(_text_of(value), depth)
    if what is None:
        what = f"the class {qualified(value)}" if isinstance(value, type) else f"a {qualified(type(value))}"
    raise Refused(what)


def _none(w: Writer, value: None, depth: int) -> None:
    w.chunks.append(b"N")


def _bool(w: Writer, value: bool, depth: int) -> None:
    w.chunks.append(b"T" if value else b"F")


def _int(w: Writer, value: int, depth: int) -> None:
    if 0 <= value < 256:
        w.chunks.append(_SMALL_INTS[value])
    elif -(2**63) <= value < 2**63:
        w.chunks.append(_with_int(wire.INT, value))
    else:
        _raw(w, wire.BIG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _float(w: Writer, value: float, depth: int) -> None:
    w.chunks.append(_with_float(wire.FLOAT, value))


def _complex(w: Writer, value: complex, depth: int) -> None:
    w.chunks.append(_with_complex(wire.COMPLEX, value.real, value.imag))


def _raw(w: Writer, tag: int, raw: bytes) -> None:
    w.cost += wire.TEXT_COST
    w.chunks += (_with_size(tag, len(raw)), raw)


def _str(w: Writer, value: str, depth: int) -> None:
    _raw(w, wire.STR, value.encode("utf-8", "surrogatepass"))


def _np_str(w: Writer, value: np.str_, depth: int) -> None:
    _raw(w, wire.NP_STR, value.encode("utf-8", "surrogatepass"))


def _bytes(w: Writer, value: bytes, depth: int) -> None:
    _raw(w, wire.BYTES, value)


def _np_bytes(w: Writer, value: np.bytes_, depth: int) -> None:
    _raw(w, wire.NP_BYTES, value)


def _list(w: Writer, value: list[Any], depth: int) -> None:
    if w.enter(value, depth):
        _elements(w, value, depth)
        w.open.discard(id(value))


def _elements(w: Writer, value: list[Any], depth: int) -> None:
    count = len(value)
    w.cost += SEQUENCE_COST + PLACE_COST * count
    kinds = set(map(type, value))
    # Many of a kind go through one call of something fast rather than one of ours each.
    many = _MANY.get(kinds.pop()) if len(kinds) == 1 else None
    if many is None or not many(w, value, depth):
        w.chunks.append(_with_count(wire.LIST, count))
        w.items(value, depth + 1)


def _ints(w: Writer, value: list[int], depth: int) -> bool:
    count = len(value)
    try:
        raw = struct.pack(f"<{count}q", *value)
    except struct.error:  # one needs more than 64 bits
        return False
    w.chunks += (_with_count(wire.INTS, count), raw)
    return True


def _floats(w: Writer, value: list[float], depth: int) -> bool:
    count = len(value)
    w.chunks += (_with_count(wire.FLOATS, count), struct.pack(f"<{count}d", *value))
    return True


def _texts(w: Writer, value: list[str], depth: int) -> bool:
    text = "\0".join(value)
    if text.count("\0") != len(value) - 1:
        return False
    raw = text.encode("utf-8", "surrogatepass")
    w.cost += wire.TEXT_COST * (1 + len(value))
    w.chunks += (_with_count(wire.TEXTS, len(value)), len(raw).to_bytes(8, "little"), raw)
    return True


def _rows(w: Writer, value: list[tuple[Any, ...]], depth: int) -> bool:
    """Tuples of one length as columns."""
    count, width = len(value), len(value[0])
    if count < _FEWEST_ROWS or not width or depth + 1 >= DEEPEST or len(set(map(len, value))) > 1:
        return False
    w.cost += count * (SEQUENCE_COST + PLACE_COST * width)
    w.chunks.append(_with_counts(wire.ROWS, count, width))
    for index, column in enumerate(zip(*value, strict=True)):
        try:
            _elements(w, list(column), depth + 1)
        except Refused as refused:
            refused.path.insert(-1, f"[{index}]")  # the row's index is the last
            raise
    return True


_MANY: dict[type, Callable[[Writer, Any, int], bool]] = {int: _ints, float: _floats, str: _texts, tuple: _rows}


# No tuple contains itself but through a list or the like, so these need not be in `open`.


def _tuple(w: Writer, value: tuple[Any, ...], depth: int) -> None:
    if depth < DEEPEST or w.enter(value, depth):
        w.cost += SEQUENCE_COST + PLACE_COST * len(value)
        w.chunks.append(_with_count(wire.TUPLE, len(value)))
        w.items(value, depth + 1)


def write_struct(w: Writer, value: Any, depth: int) -> None:
    if depth < DEEPEST or w.enter(value, depth):
        w.cost += SEQUENCE_COST + PLACE_COST * len(value)
        w.chunks.append(w.words.heads[type(value)])
        w.items(value, depth + 1, value._fields)


def _dict(w: Writer, value: dict[Any, Any], depth: int) -> None:
    if not w.enter(value, depth):
        return
    w.cost += wire.table_cost(len(value))
    w.chunks.append(_with_count(wire.DICT, len(value)))
    get = w.writers.get
    named: set[str] = set()
    key, is_key = None, False
    try:
        for key, item in value.items():
            is_key = True
            if type(key) is str:
                _str(w, key, depth)
            else:
                w.key(key, depth + 1, value, named)
            is_key = False
            get(type(item), write_other)(w, item, depth + 1)
    except Refused as refused:
        refused.path.append(".keys()" if is_key else f"[{_text_of(key):.50}]")
        raise
    w.open.discard(id(value))


def _set(w: Writer, value: set[Any] | frozenset[Any], depth: int) -> None:
    if not w.enter(value, depth):
        return
    w.cost += wire.table_cost(len(value))
    w.chunks.append(_with_count(wire.SET if type(value) is set else wire.FROZENSET, len(value)))
    named: set[str] = set()
    try:
        for item in value:
            w.key(item, depth + 1, value, named)
    except Refused as refused:
        refused.path.append("{...}")
        raise
    w.open.discard(id(value))


def write_enum(w: Writer, value: enum.Enum, depth: int) -> None:
    if type(value).__members__.get(value.name) is value:
        w.chunks += (w.words.heads[type(value)], short(value.name.encode()))
    else:
        write_other(w, value, depth, f"a combination of flags of {qualified(type(value))}")


def _type(w: Writer, value: type, depth: int) -> None:
    if value in _TYPES:
        w.chunks.append(_TYPES[value])
    else:
        write_other(w, value, depth)


def _array(w: Writer, value: np.ndarray[Any, Any], depth: int) -> None:
    dtype = value.dtype
    code = dtypes.code_of(dtype)
    if code is not None:
        ndim = value.ndim
        w.cost += wire.ARRAY_COST
        w.chunks.append(struct.pack(f"<BB{len(code)}sB{ndim}Q", wire.ARRAY, len(code), code, ndim, *value.shape))
        in_place = value.nbytes > wire.IN_PLACE and value.flags.c_contiguous and dtype.kind not in "Mm"
        w.chunks.append(value if in_place else value.tobytes())
    elif dtype.kind == "O":
        _objects(w, value, depth)
    else:
        write_other(w, value, depth, f"an array of dtype {dtype}")


def _objects(w: Writer, value: np.ndarray[Any, Any], depth: int) -> None:
    if not w.enter(value, depth):
        return
    w.cost += wire.ARRAY_COST + SEQUENCE_COST + PLACE_COST * value.size
    w.chunks.append(struct.pack(f"<BB{value.ndim}Q", wire.OBJECTS, value.ndim, *value.shape))
    index: tuple[int, ...] = ()
    try:
        for index in np.ndindex(value.shape):
            w.write(value[index], depth + 1)
    except Refused as refused:
        refused.path.append(f"[{', '.join(map(str, index)) or '()'}]")
        raise
    w.open.discard(id(value))


def _scalar(w: Writer, value: np.generic, depth: int) -> None:
    w.cost += wire.TEXT_COST
    w.chunks.append(_SCALARS[type(value)] + value.tobytes())


def _time(w: Writer, value: np.datetime64 | np.timedelta64, depth: int) -> None:
    w.cost += wire.TEXT_COST
    w.chunks.append(bytes((wire.SCALAR,)) + short(value.dtype.str.encode()) + value.tobytes())


_SCALARS = {kind: bytes((wire.SCALAR,)) + short(code) for kind, code in dtypes.SCALARS.items()}
_TYPES = {kind: bytes((wire.TYPE,)) + short(name.encode()) for name, kind in dtypes.TYPES.items()}

WRITERS: dict[type, Write] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytes,
    list: _list,
    tuple: _tuple,
    dict: _dict,
    set: _set,
    frozenset: _set,
    type: _type,
    np.ndarray: _array,
    np.str_: _np_str,
    np.bytes_: _np_bytes,
    np.datetime64: _time,
    np.timedelta64: _time,
    **dict.fromkeys(_SCALARS, _scalar),
}
