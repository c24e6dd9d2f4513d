"""Compress weights for sending to a node: as halves, or as coarse steps from the version that the node has. Pure.

Both ends compute the same bytes, so the head knows bit for bit which weights the node acts with. Steps are relative to
the weights that the node actually has, so that rounding errors do not accumulate.

    "fp16"   every float as a half: about 1/2 of fp32
    "int8"   the difference from the node's weights, per array in 255 steps of equal size, entropy-coded: about 1/5
    "int4"   the same in 15 steps: about 1/10
    "int2"   one step up, none, or one down: about 1/25
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.policy.weights import encoding
from clusterenv.policy.weights.encoding import Weights

__all__ = ["CODECS", "Codec", "Packed", "pack", "takes_steps", "unpack"]

Codec = Literal["fp32", "fp16", "int8", "int4", "int2", "auto"]
CODECS = get_args(Codec)
"""From the largest to the smallest, then "auto", which chooses among them."""

_PREFIX = struct.Struct("<B8s")  # form, first bytes of the digest of the unpacked weights
_HALVES = 0
_STEPS = {"int8": 127, "int4": 7, "int2": 1}  # to each side of zero
_SCALE = np.dtype("<f4")
_TRIPLE = np.array([1, 3, 9], dtype=np.uint8)
_TRIPLES = (np.arange(27)[:, None] // _TRIPLE % 3 - 1).astype(np.int8)
"""Three "int2" steps share a byte, because the entropy coder spends at least one bit per symbol."""


def takes_steps(kind: str) -> bool:
    """Return whether this codec sends steps from weights that the node already has."""
    return kind in _STEPS


class Packed(NamedTuple):
    data: bytes
    """The bytes to send."""
    weights: bytes
    """The weights that the node then has, encoded by `encoding.encode`."""


def pack(kind: str, weights: bytes, base: bytes | None) -> Packed | None:
    """Pack encoded weights (`encoding.encode`) for a node that has `base`; None if they do not fit this form.

    >>> old = encoding.encode({"w": np.zeros(1000, np.float32)})
    >>> new = encoding.encode({"w": np.linspace(-1, 1, 1000, dtype=np.float32)})
    >>> small = pack("int8", new, old)
    >>> len(small.data) < len(new) / 3, unpack(small.data, old) == small.weights
    (True, True)
    >>> float(abs(encoding.decode(small.weights)["w"] - encoding.decode(new)["w"]).max()) < 0.005
    True
    """
    target = encoding.decode(weights)
    if kind == "fp16":
        with np.errstate(over="ignore"):
            halves = encoding.encode({name: _half(array) for name, array in target.items()})
        dtypes = "\n".join(array.dtype.str for array in target.values())
        form, body = _HALVES, _deflate(dtypes.encode() + b"\0" + halves)
    else:
        if base is None:
            return None
        form, origin = _STEPS[kind], encoding.decode(base)
        if not _alike(origin, target):
            return None
        body = _to_steps(origin, target, form)
    given = _unpacked(form, body, base, len(weights))
    if not all(np.isfinite(array).all() for array in encoding.decode(given).values()):
        return None  # too large for a half, or not finite to begin with
    return Packed(_PREFIX.pack(form, _digest(given)) + body, given)


def unpack(packed: bytes | memoryview, base: bytes | None, limit: int = 1 << 34) -> bytes:
    """Return the encoded weights for the node to act with; raise PolicyError if they differ from the head's."""
    view = memoryview(packed)
    if len(view) < _PREFIX.size:
        raise PolicyError("packed weights arrived truncated")
    form, digest = _PREFIX.unpack_from(view)
    if form != _HALVES and form not in _STEPS.values():
        raise PolicyError("packed weights have an unknown form")
    try:
        weights = _unpacked(form, view[_PREFIX.size :], base, limit)
    except (ValueError, KeyError, IndexError, zlib.error, struct.error) as error:
        raise PolicyError(f"packed weights do not fit the weights of this node: {error}") from None
    if _digest(weights) != digest:
        raise PolicyError("packed weights do not unpack to the head's weights: they are for another version")
    return weights


def _unpacked(form: int, body: bytes | memoryview, base: bytes | None, limit: int) -> bytes:
    if form == _HALVES:
        dtypes, _, rest = _inflate(body, limit + (1 << 16)).partition(b"\0")
        halves = encoding.decode(rest)
        pairs = zip(halves.items(), dtypes.decode().split("\n"), strict=True)
        return encoding.encode({name: array.astype(dtype) for (name, array), dtype in pairs})
    if base is None:
        raise ValueError("steps without a version to apply them to")
    return encoding.encode(_from_steps(encoding.decode(base), body, form))


def _digest(weights: bytes) -> bytes:
    return bytes.fromhex(encoding.digest(weights))[:8]


def _half(array: Any) -> Any:
    return array.astype(np.float16) if array.dtype.kind == "f" else array


def _alike(base: Weights, target: Weights) -> bool:
    kinds = [(name, array.dtype, array.shape) for name, array in base.items()]
    return kinds == [(name, array.dtype, array.shape) for name, array in target.items()]


# -- steps --------------------------------------------------------------------------------------------------------


def _to_steps(base: Weights, target: Weights, level: int) -> bytes:
    """Encode each float array's step size, non-float arrays unchanged, and the number of steps of each float."""
    plain, steps = [], [np.zeros(0, np.int8)]
    for name, new in target.items():
        if new.dtype.kind == "f":
            scale, taken = _quantized((new.astype(np.float64) - base[name]).reshape(-1), level)
            plain.append(scale.tobytes())
            steps.append(taken)
        else:
            plain.append(new.tobytes())
    return b"".join(plain) + _deflate(_symbols(np.concatenate(steps), level))


def _quantized(change: Any, level: int) -> tuple[Any, Any]:
    """Return the size of a step, and the number of steps of each element."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        largest = np.abs(change).max(initial=0.0)
        if level > 1:
            scale = _SCALE.type(largest / level)
            steps = np.rint(change / np.float64(scale)) if scale != 0 else np.zeros(change.shape)
        else:
            # One step for each element that changed by more than the spread. The step size keeps the length of the
            # change along its own direction: a smaller one has less squared error, but leaves more drift.
            squares = np.square(change)
            spread = np.sqrt(squares.mean()) if change.size else 0.0
            steps = np.sign(change) * (np.abs(change) >= 0.999 * spread)
            covered = (change * steps).sum()
            scale = _SCALE.type(np.minimum(squares.sum() / covered, largest) if covered != 0 else covered)
        return scale, np.clip(steps, -level, level).astype(np.int8)


def _from_steps(base: Weights, body: bytes | memoryview, level: int) -> Weights:
    weights: Weights = {}
    scales = {}
    at = count = 0
    for name, old in base.items():
        if old.dtype.kind == "f":
            scales[name] = np.float64(np.frombuffer(body, _SCALE, 1, at)[0])
            at, count = at + _SCALE.itemsize, count + old.size
        else:
            weights[name] = np.frombuffer(body, old.dtype, old.size, at).reshape(old.shape)
            at += old.nbytes
    steps = _steps(_inflate(body[at:], count), level, count)
    at = 0
    for name, old in base.items():
        if name in scales:
            taken = steps[at : at + old.size].reshape(old.shape)
            weights[name] = (old + taken * scales[name]).astype(old.dtype)
            at += old.size
    return {name: weights[name] for name in base}


def _symbols(steps: Any, level: int) -> bytes:
    if level > 1:
        return bytes(steps.tobytes())
    digits = np.ones(-(-steps.size // 3) * 3, np.uint8)
    digits[: steps.size] += steps.view(np.uint8)
    return bytes((digits.reshape(-1, 3) * _TRIPLE).sum(axis=1, dtype=np.uint8).tobytes())


def _steps(symbols: bytes, level: int, count: int) -> Any:
    if level > 1:
        return np.frombuffer(symbols, np.int8, count)
    if len(symbols) != -(-count // 3):
        raise ValueError(f"{len(symbols)} symbols for {count} numbers")
    return _TRIPLES[np.frombuffer(symbols, np.uint8)].reshape(-1)[:count]


def _deflate(data: bytes) -> bytes:
    # Weights have no repeated sequences to match, only uneven symbol frequencies.
    engine = zlib.compressobj(1, wbits=-15, strategy=zlib.Z_HUFFMAN_ONLY)
    return engine.compress(data) + engine.flush()


def _inflate(data: bytes | memoryview, limit: int) -> bytes:
    engine = zlib.decompressobj(wbits=-15)
    whole = engine.decompress(data, limit + 1)
    if len(whole) > limit or not engine.eof:
        raise ValueError("unpacked, they are not as large as the weights")
    return whole
