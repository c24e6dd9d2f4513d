"""Encode weights to bytes and back: named arrays behind a small header, with a checksum.

No pickle, so that a node can read them from a network. `digest` identifies the content: equal weights, equal version.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import numpy as np

from clusterenv.errors import PolicyError

__all__ = ["Weights", "decode", "digest", "encode"]

Weights = dict[str, Any]
"""Name → array; a version's parameters and buffers, on the CPU."""

_PREFIX = struct.Struct("<4sI32s")
_MAGIC = b"CEw1"
_KINDS = "biufc"


def encode(weights: Weights) -> bytes:
    entries, parts = [], []
    for name, value in weights.items():
        array = np.ascontiguousarray(value)
        if array.dtype.kind not in _KINDS:
            raise PolicyError(f"the weights {name!r} have dtype {array.dtype}, which cannot travel")
        entries.append([name, array.dtype.str, list(np.shape(value))])
        parts.append(array.tobytes())
    header = json.dumps(entries).encode()
    body = header + b"".join(parts)
    return _PREFIX.pack(_MAGIC, len(header), hashlib.blake2b(body, digest_size=32).digest()) + body


def digest(encoded: bytes) -> str:
    return encoded[8:40].hex()


def decode(encoded: bytes | memoryview) -> Weights:
    """Return the arrays as read-only views of `encoded`; raise PolicyError if the checksum does not match."""
    view = memoryview(encoded)
    if len(view) < _PREFIX.size:
        raise PolicyError("weights arrived truncated")
    magic, size, checksum = _PREFIX.unpack_from(view)
    body = view[_PREFIX.size :]
    if magic != _MAGIC or hashlib.blake2b(body, digest_size=32).digest() != checksum:
        raise PolicyError("weights arrived damaged: their checksum does not match")
    weights: Weights = {}
    at = size
    for name, dtype, shape in json.loads(bytes(body[:size])):
        array = np.frombuffer(body, dtype=dtype, count=int(np.prod(shape, dtype=np.int64)), offset=at)
        weights[name] = array.reshape(shape)
        at += array.nbytes
    return weights
