"""Write ONNX models: nodes in, the bytes of a `ModelProto` out.

Written by hand, because a model is a few nested lists: the `onnx` package would be needed only for this, and takes
longer to import than an export takes. Field numbers are those of `onnx.proto`. Used on the head, which makes graphs,
and by workers, which add the weights.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["Graph", "Shape", "element_type", "model_bytes", "tensor_field", "value_field"]

OPSET = 18
_IR = 8

Shape = Sequence[int | str]
"""Sizes; a text is the name of a size that is known only when the model runs."""

_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
}

_INITIALIZER, _INPUT, _OUTPUT = 5, 11, 12


def element_type(dtype: Any) -> int:
    """Return ONNX's number of a numpy dtype; raise TypeError if it has none."""
    name = np.dtype(dtype).name
    if name not in _TYPES:
        raise TypeError(f"ONNX has no arrays of {name}")
    return _TYPES[name]


class Graph:
    """A graph under construction. Values are known by their names."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def body(self) -> bytes:
        """Return the fields of the graph written so far."""
        return b"".join(self._parts)

    def node(self, op: str, inputs: Sequence[str], outputs: int = 1, /, **attributes: Any) -> list[str]:
        """Add a node; return the names of its outputs."""
        names = [self._name() for _ in range(outputs)]
        fields = [_text(1, name) for name in inputs] + [_text(2, name) for name in names] + [_text(4, op)]
        fields += [_bytes(5, _attribute(name, value)) for name, value in attributes.items()]
        self._parts.append(_bytes(1, b"".join(fields)))
        return names

    def constant(self, value: Any) -> str:
        """Add a constant array, or find it if there is an equal one; return its name."""
        array = np.asarray(value)
        key = (array.dtype.str, array.shape, array.tobytes())
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = self._name()
            self._parts.append(tensor_field(name, array))
        return name

    def input(self, name: str, dtype: Any, shape: Shape) -> None:
        self._parts.append(value_field(name, dtype, shape))

    def output(self, name: str, dtype: Any, shape: Shape) -> None:
        self._parts.append(_bytes(_OUTPUT, _value(name, dtype, shape)))

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"


def model_bytes(graph: bytes, more: Iterable[bytes] = ()) -> bytes:
    """Return the model with this graph, and further fields of it: weights as inputs or as constants."""
    body = b"".join([_text(2, "clusterenv"), graph, *more])
    return b"".join([_number(1, _IR), _bytes(7, body), _bytes(8, _text(1, "") + _number(2, OPSET))])


def value_field(name: str, dtype: Any, shape: Shape) -> bytes:
    """Return the field that declares an input of a graph."""
    return _bytes(_INPUT, _value(name, dtype, shape))


def tensor_field(name: str, array: Any) -> bytes:
    """Return the field that declares a constant of a graph."""
    return _bytes(_INITIALIZER, _tensor(array) + _text(8, name))


def _tensor(array: Any) -> bytes:
    array = np.asarray(array)
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, element_type(array.dtype)) + _bytes(9, array.tobytes())


def _value(name: str, dtype: Any, shape: Shape) -> bytes:
    dims = (_text(2, size) if isinstance(size, str) else _number(1, size) for size in shape)
    sizes = b"".join(_bytes(1, dim) for dim in dims)
    kind = _bytes(1, _number(1, element_type(dtype)) + _bytes(2, sizes))
    return _text(1, name) + _bytes(2, kind)


def _attribute(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return _text(1, name) + _bytes(4, value.encode()) + _number(20, 3)
    if isinstance(value, float):
        return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)
    if isinstance(value, int):
        return _text(1, name) + _number(3, value) + _number(20, 2)
    if isinstance(value, np.ndarray):
        return _text(1, name) + _bytes(5, _tensor(value)) + _number(20, 4)
    return _text(1, name) + b"".join(_number(8, int(item)) for item in value) + _number(20, 7)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
