"""Divide large answers into parts, join them again, and limit what one may hold. Pure.

A worker divides its answers for the network; the head joins them. The sizes of rows and fragments follow from their
layout; what comes beside them (infos, results, frames) has no given size, and is limited here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from clusterenv.wire.requests import PlayedEpisode, Reply

__all__ = ["BESIDE_BYTES", "RECORD_BYTES", "RESULT_BYTES", "join", "size_of", "split"]

BESIDE_BYTES = 64 << 20
"""Limit of what an answer holds beside its rows: infos, objects, drift samples. Twice the size of its rows is added,
for the last observations of episodes."""

RESULT_BYTES = 64 << 20
"""Limit of the result of a call on one environment, for example a frame of `render`."""

RECORD_BYTES = 2 << 30
"""Limit of the frames of one recorded episode."""

_PART_BYTES = 8 << 20
"""A part is closed once it holds this much."""

_DEEPEST = 20
"""Depth to which containers are measured: a list may contain itself."""


def split(reply: Reply) -> Iterator[Reply]:
    """Divide the results of a call, or the episodes of an evaluation; any other answer is one part."""
    if not isinstance(reply.result, list) or size_of(reply.result) <= _PART_BYTES:
        yield reply
        return
    *parts, last = _chunks(piece for item in reply.result for piece in _pieces(item))
    for part in parts:
        yield reply._replace(result=part, last=False)
    yield reply._replace(result=last)


def _pieces(item: Any) -> Iterable[Any]:
    """Divide the frames of a recorded episode; anything else is one piece."""
    if isinstance(item, PlayedEpisode) and item.frames:
        *first, last = _chunks(item.frames)
        pieces = [item._replace(frames=frames, info={}, not_sent="") for frames in first]
        return [*pieces, item._replace(frames=last)]
    return (item,)


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    size = 0
    for item in items:
        if size >= _PART_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += size_of(item)
    yield chunk


def join(results: list[Any], part: list[Any]) -> None:
    """Append a part to the results so far; the frames of an episode may come in several parts."""
    for item in part:
        last = results[-1] if results else None
        if (
            isinstance(item, PlayedEpisode)
            and isinstance(last, PlayedEpisode)
            and last.number == item.number
            and item.frames
        ):
            results[-1] = item._replace(frames=[*(last.frames or ()), *item.frames])
        else:
            results.append(item)


def size_of(value: Any, depth: int = 0) -> int:
    """Return the approximate size of a value on the wire, in bytes."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return 8 + sum(size_of(item, depth + 1) for item in value)
    if depth < _DEEPEST and isinstance(value, dict):
        return 8 + sum(size_of(item, depth + 1) for item in value.values())
    return 16
