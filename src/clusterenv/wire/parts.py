"""Large answers in parts: how much one may hold, and how the results of a call are divided and joined. Pure.

A worker divides what it answers over a network; the head joins it. Rows and fragments have the sizes of their layout;
what comes beside them (infos, results, frames) has none, and is limited here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from clusterenv.wire.requests import Episode, Reply

__all__ = ["BESIDE_BYTES", "RECORD_BYTES", "RESULT_BYTES", "join", "size_of", "split"]

BESIDE_BYTES = 64 << 20
"""What an answer may hold beside its rows: infos, objects, drift samples. Twice the size of its rows comes on top, for
the last observations of episodes."""

RESULT_BYTES = 64 << 20
"""The result of a call on one environment, a frame of `render` for example."""

RECORD_BYTES = 2 << 30
"""The frames of one recorded episode."""

_PART_BYTES = 8 << 20
"""A part is closed once it holds so much."""

_DEEPEST = 20
"""Containers in each other that are looked into: a list may hold itself."""


def split(reply: Reply) -> Iterator[Reply]:
    """Divide the results of a call, or the episodes of an evaluation; any other answer is one part."""
    if not isinstance(reply.result, list) or size_of(reply.result) <= _PART_BYTES:
        yield reply
        return
    part: list[Any] = []
    size = 0
    for item in _items(reply.result):
        if part and size >= _PART_BYTES:
            yield reply._replace(result=part, last=False)
            part, size = [], 0
        part.append(item)
        size += size_of(item)
    yield reply._replace(result=part)


def _items(results: list[Any]) -> Iterator[Any]:
    for item in results:
        if not isinstance(item, Episode) or not item.frames:
            yield item
            continue
        frames: list[Any] = []
        size = 0
        for frame in item.frames:
            if frames and size >= _PART_BYTES:
                yield item._replace(frames=frames)
                frames, size = [], 0
            frames.append(frame)
            size += size_of(frame)
        yield item._replace(frames=frames)


def join(results: list[Any], part: list[Any]) -> None:
    """Append a part to what has come; frames of one episode may come in several."""
    for item in part:
        last = results[-1] if results else None
        if isinstance(item, Episode) and isinstance(last, Episode) and last.number == item.number and item.frames:
            results[-1] = item._replace(frames=[*(last.frames or ()), *item.frames])
        else:
            results.append(item)


def size_of(value: Any, depth: int = 0) -> int:
    """Return about how many bytes a value takes on the wire."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return 8 + sum(size_of(item, depth + 1) for item in value)
    if depth < _DEEPEST and isinstance(value, dict):
        return 8 + sum(size_of(item, depth + 1) for item in value.values())
    return 16
