"""Pack the observations of a fragment without loss, and unpack them within the bounds of their layout. Pure.

A packed array is `<codec u8> <axis i8> <step u8> <rows u32>`, then for stacked frames (axis >= 0) one bit for each row
that continues the one before it, then the data, compressed by the codec: whole rows first, then the newest frames of
rows that continue. Column by column, because successive frames of one environment are alike.

What is unpacked may come from a node that lies: its size is known before anything is decompressed, and is at most
that of the array in its layout. `unpack*` raise ProtocolError, and nothing else.
"""

from __future__ import annotations

import importlib.util
import struct
import zlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from clusterenv.errors import ProtocolError
from clusterenv.memory import stacks
from clusterenv.memory.fragments import ArraySpec
from clusterenv.memory.stacks import Stack

__all__ = ["CODECS", "Form", "installed_codecs", "pack", "pack_finals", "unpack", "unpack_finals"]

CODECS = ("zstd", "zlib")
"""Names of the compressors, the better one first."""

_NUMBERS = {"": 0, "zlib": 1, "zstd": 2}
_HEADER = struct.Struct("<BbBI")
_LEVEL = 1
_WINDOW = 8 << 20
"""Limit of the memory that decompressing takes beside its result; level 1 of zstd uses half a megabyte."""


class Form(NamedTuple):
    """How an array is packed."""

    stack: Stack | None
    """None: its rows are sent whole."""
    codec: str
    """"": none."""

    def __str__(self) -> str:
        return " + ".join(["frames once"] * (self.stack is not None) + [self.codec] * bool(self.codec))


@cache
def installed_codecs() -> tuple[str, ...]:
    """Return the compressors that this Python can use."""
    return tuple(name for name in CODECS if name == "zlib" or importlib.util.find_spec("zstandard") is not None)


# -- rows -------------------------------------------------------------------------------------------------------


def pack(rows: Any, form: Form) -> bytes:
    """Pack observations [R, K, ...]; the inverse is `unpack`."""
    fits = np.zeros(rows.shape[:2], bool)
    if form.stack is not None:
        for t in range(1, len(rows)):
            fits[t] = stacks.follows(rows[t - 1], rows[t], form.stack)
    by_column = rows.swapaxes(0, 1)
    return _pack(len(rows), fits.T, by_column, form)


def unpack(spec: ArraySpec, columns: int, most_rows: int, data: Any) -> memoryview:
    """Return the bytes of an array of at most this many rows, packed by `pack`."""
    rows, form, fits, at = _header(spec, columns, most_rows, data)
    if fits[:, 0].any():
        raise ProtocolError("a packed array whose first row continues another")
    out = np.empty((rows, columns, *spec.shape), spec.dtype)
    _fill(out.swapaxes(0, 1), fits, form, data[at:])
    if form.stack is not None:
        for t in range(1, rows):
            _restore(out[t - 1], out[t], fits[:, t], form.stack)
    return out.reshape(-1).view(np.uint8).data


# -- final observations -----------------------------------------------------------------------------------------


def pack_finals(values: Any, before: Any, form: Form) -> bytes:
    """Pack the last observations of episodes [F, ...]; `before` are the rows before their last steps, likewise."""
    fits = np.zeros((1, len(values)), bool)
    if form.stack is not None:
        fits[0] = stacks.follows(before, values, form.stack)
    return _pack(len(values), fits, values[None], form)


def unpack_finals(spec: ArraySpec, before: Any, data: Any) -> Any:
    """Return the array that `pack_finals` packed; it has as many rows as `before`."""
    rows, form, fits, at = _header(spec, 1, len(before), data)
    if rows != len(before):
        raise ProtocolError(f"{rows} packed final observations instead of {len(before)}")
    out = np.empty((rows, *spec.shape), spec.dtype)
    _fill(out[None], fits, form, data[at:])
    if form.stack is not None:
        _restore(before, out, fits[0], form.stack)
    return out


# -- both -------------------------------------------------------------------------------------------------------


def _pack(rows: int, fits: Any, values: Any, form: Form) -> bytes:
    """Pack [K, R, ...] values, of which those that fit [K, R] continue the one before them."""
    stack = form.stack
    header = _HEADER.pack(_NUMBERS[form.codec], *((-1, 0) if stack is None else stack), rows)
    if stack is None:
        return header + _compress(form.codec, np.array(values, order="C"))
    frames = stacks.newest(values, stack, 2)  # [K, R, A, B]
    num_whole = int(np.count_nonzero(~fits))
    whole_bytes = num_whole * values[0, 0].nbytes
    body = np.empty(whole_bytes + (fits.size - num_whole) * frames[0, 0].nbytes, np.uint8)
    body[:whole_bytes].view(values.dtype).reshape(num_whole, *values.shape[2:])[...] = values[~fits]
    body[whole_bytes:].reshape(-1, *frames.shape[2:])[...] = frames[fits]
    return header + np.packbits(fits).tobytes() + _compress(form.codec, body)


def _header(spec: ArraySpec, columns: int, most_rows: int, data: Any) -> tuple[int, Form, Any, int]:
    """Return the number of rows, their form, [K, R] which of them continue the one before, and where the data begin."""
    if len(data) < _HEADER.size:
        raise ProtocolError("a packed array that is cut short")
    number, axis, step, rows = _HEADER.unpack_from(data)
    codec = next((name for name, known in _NUMBERS.items() if known == number), None)
    if codec is None or (codec and codec not in installed_codecs()):
        raise ProtocolError(f"an array packed by codec {number}, which cannot be read here")
    if not 1 <= rows <= most_rows or not spec.slot_bytes or spec.dtype.kind not in "iufc":
        raise ProtocolError(f"a packed array of {rows} rows, where at most {most_rows} of {spec.dtype} are possible")
    fits = np.zeros((columns, rows), bool)
    if axis == -1:
        return rows, Form(None, codec), fits, _HEADER.size
    stack, end = Stack(axis, step), _HEADER.size + -(-fits.size // 8)
    if not stack.fits(spec.shape) or end > len(data):
        raise ProtocolError(f"frames stacked along axis {axis} by {step}, in an array of shape {spec.shape}")
    bits = np.frombuffer(data, np.uint8, end - _HEADER.size, _HEADER.size)
    fits[...] = np.unpackbits(bits, count=fits.size).reshape(fits.shape)
    return rows, Form(stack, codec), fits, end


def _fill(values: Any, fits: Any, form: Form, data: Any) -> None:
    """Write whole rows, and the newest frames of rows that continue, into [K, R, ...] values."""
    row_bytes = values[0, 0].nbytes
    if form.stack is None:
        body = _decompress(form.codec, data, fits.size * row_bytes)
        values[...] = np.frombuffer(body, values.dtype).reshape(values.shape)
        return
    frames = stacks.newest(values, form.stack, 2)
    num_whole = int(np.count_nonzero(~fits))
    whole_bytes = num_whole * row_bytes
    body = _decompress(form.codec, data, whole_bytes + (fits.size - num_whole) * frames[0, 0].nbytes)
    whole = np.frombuffer(body, values.dtype, whole_bytes // values.itemsize)
    values[~fits] = whole.reshape(num_whole, *values.shape[2:])
    frames[fits] = np.frombuffer(body, np.uint8, offset=whole_bytes).reshape(-1, *frames.shape[2:])


def _restore(before: Any, after: Any, fits: Any, stack: Stack) -> None:
    """Fill in all but the newest frames of those rows that continue the one before them."""
    if fits.all():
        stacks.restore(before, after, stack)
    elif fits.any():  # all at once: one by one, a node could keep the head busy with small rows
        some = after[fits]
        stacks.restore(before[fits], some, stack)
        after[fits] = some


# -- codecs -----------------------------------------------------------------------------------------------------


def _compress(codec: str, data: Any) -> bytes:
    flat = data.reshape(-1).view(np.uint8).data
    if codec == "zstd":
        import zstandard

        packed: bytes = zstandard.ZstdCompressor(level=_LEVEL).compress(flat)
        return packed
    return zlib.compress(flat, _LEVEL) if codec == "zlib" else bytes(flat)


def _decompress(codec: str, data: Any, size: int) -> Any:
    """Return exactly `size` bytes, or raise ProtocolError; allocates no more than that."""
    try:
        body = _bounded(codec, data, size)
    except Exception as error:  # zlib.error, ZstdError
        raise ProtocolError(f"a packed array that cannot be decompressed: {error}") from None
    if body is None or len(body) != size:
        raise ProtocolError(f"a packed array that is not {size} bytes")
    return body


def _bounded(codec: str, data: Any, size: int) -> Any:
    if codec == "zstd":
        import zstandard

        # `decompress` allocates what the header of the frame says, whatever `max_output_size` is.
        if zstandard.frame_content_size(data) != size:
            return None
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompress(data, size, allow_extra_data=False)
    if codec == "zlib":
        stream = zlib.decompressobj()
        body = stream.decompress(data, size + 1)
        return body if stream.eof and not stream.unused_data else None
    return data
