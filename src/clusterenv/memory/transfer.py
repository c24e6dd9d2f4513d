"""Parts of the shared memory as bytes, for a copy of it on another machine. Pure, except for writing into that copy.

Both sides know the layout, so only the values are sent; a length that does not match the layout is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clusterenv.errors import ProtocolError
from clusterenv.memory.fragments import ArenaLayout, ArraySpec, FragmentArrays, Side, specs_of
from clusterenv.memory.rows import Buffers, Layout

__all__ = [
    "Block",
    "check_rows",
    "fragment_sizes",
    "read_fragment",
    "read_inputs",
    "read_rows",
    "row_bytes",
    "view_fragment",
    "write_fragment",
    "write_inputs",
    "write_rows",
]

_NONE: Mapping[int, Any] = {}


def read_inputs(buffers: Buffers, slots: Sequence[int], actions: bool) -> bytes:
    """Return what a request needs of the rows: the side of each last observation and, if wanted, the actions."""
    rows = _index(slots)
    parts = [buffers.side[rows], *([array[rows] for array in buffers.actions] if actions else [])]
    return b"".join(part.tobytes() for part in parts)


def write_inputs(buffers: Buffers, slots: Sequence[int], actions: bool, data: Any) -> None:
    _scatter([buffers.side, *(buffers.actions if actions else [])], _index(slots), len(slots), data)


def read_rows(buffers: Buffers, slots: Sequence[int]) -> bytes:
    """Return what workers wrote for these slots."""
    rows = _index(slots)
    parts = [buffers.reward[rows], buffers.terminated[rows], buffers.truncated[rows], buffers.pace_s[rows]]
    free, at = 1 - buffers.side[rows], _numbers(slots)
    parts += [array[free, at] for array in buffers.obs if array is not None]
    return b"".join(part.tobytes() for part in parts)


def write_rows(buffers: Buffers, slots: Sequence[int], data: Any) -> None:
    rows = _index(slots)
    plain = [buffers.reward, buffers.terminated, buffers.truncated, buffers.pace_s]
    end = _scatter(plain, rows, len(slots), data, exact=False)
    free, at = 1 - buffers.side[rows], _numbers(slots)
    for array in buffers.obs:
        if array is not None:
            values, end = _take(data, end, array.dtype, (len(slots), *array.shape[2:]))
            array[free, at] = values
    if end != len(data):
        raise ProtocolError(f"rows of {len(slots)} slots are {end} bytes, not {len(data)}")


def row_bytes(layout: Layout) -> int:
    """Return the bytes of one slot's row as it is sent: reward, two flags, pace, observation."""
    fixed = [leaf for leaf in layout.obs if leaf.dtype is not None]
    return 18 + sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in fixed)


def check_rows(each: int, count: int, data: Any) -> None:
    """Raise ProtocolError unless these can be the rows of `count` slots, of `each` bytes."""
    if len(data) != each * count:
        raise ProtocolError(f"rows of {count} slots are {each * count} bytes, not {len(data)}")
    if bytes(data[8 * count : 10 * count]).strip(b"\0\1"):  # numpy assumes that a bool is 0 or 1
        raise ProtocolError("rows whose flags are neither 0 nor 1")


def fragment_sizes(layout: ArenaLayout, columns: int, num_steps: int) -> list[int]:
    """Return the bytes of each array of a fragment of this size, in the order of `read_fragment`."""
    return [spec.bytes(num_steps, columns) for spec in specs_of(layout)]


class Block:
    """Views of the rows of consecutive slots, for whole steps: same bytes as the functions above, located once."""

    def __init__(self, buffers: Buffers, slots: Sequence[int]) -> None:
        self._buffers, self._slots = buffers, slots
        rows = slice(slots[0], slots[-1] + 1)
        assert rows.stop - rows.start == len(slots)
        self._row_bytes = row_bytes(buffers.layout)
        self._side = _bytes(buffers.side[rows])
        self._inputs = [self._side, *(_bytes(array[rows]) for array in buffers.actions)]
        plain = [buffers.reward, buffers.terminated, buffers.truncated, buffers.pace_s]
        outputs = [_bytes(array[rows]) for array in plain]
        self._outputs = {  # by the side of the last observations, if it is the same for all
            bytes([side]) * len(slots): [*outputs, *(_bytes(o[1 - side, rows]) for o in buffers.obs if o is not None)]
            for side in (0, 1)
        }

    def read_inputs(self) -> bytes:
        return b"".join(self._inputs)

    def write_inputs(self, data: Any) -> None:
        _spread(self._inputs, data)

    def read_rows(self) -> bytes:
        views = self._outputs.get(self._side.tobytes())
        return read_rows(self._buffers, self._slots) if views is None else b"".join(views)

    def write_rows(self, data: Any) -> None:
        check_rows(self._row_bytes, len(self._slots), data)
        views = self._outputs.get(self._side.tobytes())
        if views is None:
            write_rows(self._buffers, self._slots, data)
        else:
            _spread(views, data)


def _bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _spread(views: list[memoryview], data: Any) -> None:
    if len(data) != sum(map(len, views)):
        raise ProtocolError(f"{len(data)} bytes instead of {sum(map(len, views))}")
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)


def read_fragment(side: Side, columns: slice, num_steps: int, packed: Mapping[int, Any] = _NONE) -> list[Any]:
    """Return the bytes of one worker's columns, one buffer per array; those that it has packed are not read."""
    parts = enumerate(side.part(num_steps, columns))
    return [packed[i] if i in packed else _contiguous(array) for i, array in parts]


def view_fragment(specs: Sequence[ArraySpec], columns: int, num_steps: int, parts: Sequence[Any]) -> FragmentArrays:
    """Return arrays over the bytes of `read_fragment`, without a copy."""
    if [len(part) for part in parts] != [spec.bytes(num_steps, columns) for spec in specs]:
        raise ProtocolError("a fragment whose arrays do not have the sizes of its layout")
    return FragmentArrays(
        specs,
        [
            np.frombuffer(part, spec.dtype).reshape(num_steps + spec.extra_rows, columns, *spec.shape)
            for spec, part in zip(specs, parts, strict=True)
        ],
    )


def write_fragment(side: Side, columns: slice, num_steps: int, done: int, parts: Sequence[Any]) -> None:
    """Write the steps of a fragment that are done, and flag the others as lost."""
    received = view_fragment(side.specs, columns.stop - columns.start, done, parts)
    for target, values in zip(side.part(done, columns), received.arrays, strict=True):
        target[...] = values
    if done < num_steps:
        FragmentArrays(side.specs, side.part(num_steps, columns)).lose_unplayed(done)


def _contiguous(array: Any) -> memoryview:
    # Always a copy: the worker continues to write there while this is being sent.
    return np.array(array, order="C").reshape(-1).view(np.uint8).data


def _scatter(arrays: list[Any], rows: Any, count: int, data: Any, exact: bool = True) -> int:
    end = 0
    for array in arrays:
        values, end = _take(data, end, array.dtype, (count, *array.shape[1:]))
        array[rows] = values
    if exact and end != len(data):
        raise ProtocolError(f"{count} slots have {end} bytes, not {len(data)}")
    return end


def _take(data: Any, at: int, dtype: Any, shape: tuple[int, ...]) -> tuple[Any, int]:
    count = math.prod(shape)
    end = at + count * dtype.itemsize
    if end > len(data):
        raise ProtocolError(f"{len(data)} bytes, where at least {end} are expected")
    return np.frombuffer(data, dtype=dtype, count=count, offset=at).reshape(shape), end


def _index(slots: Sequence[int]) -> Any:
    if slots and slots[-1] - slots[0] + 1 == len(slots):
        return slice(slots[0], slots[-1] + 1)
    return list(slots)


def _numbers(slots: Sequence[int]) -> Any:
    return np.asarray(slots, dtype=np.int64)
