"""Weights made smaller for the way to a node: halves, or coarse steps from the version that the node has. Pure.

Both ends compute the same bytes: what `unpack` gives is what the node acts with, bit for bit, and the head knows it.
Steps are anchored: they are taken from what the node really has, so that rounding never adds up.

    "fp16"   every float as a half: about 1/2 of fp32
    "int8"   the difference to what the node has, per array in 255 steps of equal size, entropy-coded: about 1/5
    "int4"   the same in 15 steps: about 1/10
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Literal, NamedTuple

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.policy import codec
from clusterenv.policy.codec import Weights

__all__ = ["CODECS", "Codec", "Packed", "pack", "takes_steps", "unpack"]

Codec = Literal["fp32", "fp16", "int8", "int4", "auto"]
CODECS = ("fp32", "fp16", "int8", "int4", "auto")

_PREFIX = struct.Struct("<4sB16s")
_MAGIC = b"CEp1"
_HALVES = 0
_STEPS = {"int8": 127, "int4": 7}  # to each side of zero
_SCALE = np.dtype("<f4")


def takes_steps(kind: str) -> bool:
    """Whether it needs weights that the other end has."""
    return kind in _STEPS


class Packed(NamedTuple):
    data: bytes
    """What travels."""
    weights: bytes
    """What the node has then, as `codec.encode` writes it."""


def pack(kind: str, weights: bytes, base: bytes | None) -> Packed | None:
    """Encoded weights (`codec.encode`) for a node that has `base`; None where they do not fit this form.

    >>> old = codec.encode({"w": np.zeros(1000, np.float32)})
    >>> new = codec.encode({"w": np.linspace(-1, 1, 1000, dtype=np.float32)})
    >>> small = pack("int8", new, old)
    >>> len(small.data) < len(new) / 3, unpack(small.data, old) == small.weights
    (True, True)
    >>> float(abs(codec.decode(small.weights)["w"] - codec.decode(new)["w"]).max()) < 0.005
    True
    """
    target = codec.decode(weights)
    if kind == "fp16":
        with np.errstate(over="ignore"):
            halves = codec.encode({name: _half(array) for name, array in target.items()})
        dtypes = "\n".join(array.dtype.str for array in target.values())
        level, body = _HALVES, dtypes.encode() + b"\0" + halves
    else:
        if base is None:
            return None
        level, origin = _STEPS[kind], codec.decode(base)
        if not _alike(origin, target):
            return None
        body = b"".join(_to_steps(origin[name], array, level) for name, array in target.items())
    engine = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)  # there is nothing to find in weights but how often
    packed = engine.compress(body) + engine.flush()
    given = _unpacked(level, packed, base, len(weights))
    if not all(np.isfinite(array).all() for array in codec.decode(given).values()):
        return None  # too large for a half, or not finite to begin with
    return Packed(_PREFIX.pack(_MAGIC, level, bytes.fromhex(codec.digest(given))[:16]) + packed, given)


def unpack(packed: bytes | memoryview, base: bytes | None, limit: int = 1 << 34) -> bytes:
    """What the node acts with, as `codec.encode` writes it. PolicyError where it is not what the head meant."""
    view = memoryview(packed)
    if len(view) < _PREFIX.size:
        raise PolicyError("packed weights arrived truncated")
    magic, level, digest = _PREFIX.unpack_from(view)
    if magic != _MAGIC or (level != _HALVES and level not in _STEPS.values()):
        raise PolicyError("packed weights of a form that is not known")
    try:
        weights = _unpacked(level, view[_PREFIX.size :], base, limit)
    except (ValueError, KeyError, zlib.error, struct.error) as error:
        raise PolicyError(f"packed weights do not fit what is here: {error}") from None
    if bytes.fromhex(codec.digest(weights))[:16] != digest:
        raise PolicyError("packed weights do not give what the head meant: they are for another version")
    return weights


def _unpacked(level: int, packed: bytes | memoryview, base: bytes | None, limit: int) -> bytes:
    room = max(limit, len(base or b"")) + (1 << 16)
    engine = zlib.decompressobj()
    body = engine.decompress(packed, room)
    if engine.unconsumed_tail or not engine.eof:
        raise ValueError("they are larger than weights can be")
    if level == _HALVES:
        dtypes, _, rest = body.partition(b"\0")
        halves = codec.decode(rest)
        pairs = zip(halves.items(), dtypes.decode().split("\n"), strict=True)
        return codec.encode({name: array.astype(dtype) for (name, array), dtype in pairs})
    if base is None:
        raise ValueError("steps without a version to take them from")
    weights: Weights = {}
    at = 0
    for name, old in codec.decode(base).items():
        weights[name], at = _from_steps(old, body, at, level)
    return codec.encode(weights)


def _half(array: Any) -> Any:
    return array.astype(np.float16) if array.dtype.kind == "f" else array


def _alike(base: Weights, target: Weights) -> bool:
    kinds = [(name, array.dtype, array.shape) for name, array in base.items()]
    return kinds == [(name, array.dtype, array.shape) for name, array in target.items()]


def _to_steps(old: Any, new: Any, level: int) -> bytes:
    """The size of a step, and how many of them for each number; what is no float goes as it is."""
    if new.dtype.kind != "f":
        return bytes(new.tobytes())
    change = (new.astype(np.float64) - old).reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.abs(change).max(initial=0.0).astype(_SCALE) / _SCALE.type(level)
        steps = np.rint(change / scale) if scale > 0 else np.zeros(change.shape)
        steps = np.clip(steps, -level, level).astype(np.int8)
    return bytes(scale.tobytes() + steps.tobytes())


def _from_steps(old: Any, body: bytes, at: int, level: int) -> tuple[Any, int]:
    if old.dtype.kind != "f":
        return np.frombuffer(body, old.dtype, old.size, at).reshape(old.shape), at + old.nbytes
    scale = np.frombuffer(body, _SCALE, 1, at)[0]
    steps = np.frombuffer(body, np.int8, old.size, at + _SCALE.itemsize).reshape(old.shape)
    return (old + steps * np.float64(scale)).astype(old.dtype), at + _SCALE.itemsize + old.size
