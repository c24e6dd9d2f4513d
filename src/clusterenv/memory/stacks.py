"""Find stacked frames in observations, and split rows into what is new in each of them. Pure.

A wrapper that stacks frames shifts them by one at each step: all but the newest frame of an observation were in the one
before. `find` searches for the axis along which the rows of a fragment are shifted; `follows` tells exactly which rows
continue the row before them, so that only their newest frame has to be sent; `restore` fills in the rest.

All values are compared as bytes: NaN equals NaN here, and 0.0 differs from -0.0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Stack", "find", "follows", "newest", "restore"]

_PROBES = 8
"""Pairs of rows that are compared before a whole fragment is."""

_STEPS = (1, 3)
"""How far a stack may be shifted at each step: 3 for colour frames that are stacked along the channels."""

_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class Stack(NamedTuple):
    """How frames are stacked in an observation."""

    axis: int
    """Of one observation."""
    step: int
    """Entries along the axis that are new in each row; the newest come last."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether observations of this shape can be such stacks."""
        return 0 <= self.axis < len(shape) and 0 < self.step < shape[self.axis]


def find(rows: Any, starts: Any) -> Stack | None:
    """Return how the frames in these rows are stacked; None if they are not, or if nothing changes in them.

    Args:
        rows: [R, K, ...], observations of one leaf.
        starts: [<= R, K], whether a row is the first of an episode.
    """
    pairs = list(_changes(rows, starts))
    if not pairs:
        return None
    before, after = (np.stack(side) for side in zip(*pairs, strict=True))
    shape = rows.shape[2:]
    found = [
        stack
        for axis, size in enumerate(shape)
        for stack in (Stack(axis, step) for step in _STEPS if size % step == 0)
        if stack.fits(shape) and follows(before, after, stack).mean() >= 0.75
    ]
    return min(found, key=lambda stack: stack.step / shape[stack.axis], default=None)


def _changes(rows: Any, starts: Any) -> Iterator[tuple[Any, Any]]:
    """Yield some rows that differ from the row before them, with that one: equal ones are shifted along any axis."""
    count, columns = rows.shape[:2]
    total = (count - 1) * columns
    for at in range(0, total, max(1, total // _PROBES)):
        t, k = 1 + at // columns, (at + at // columns) % columns
        if not (t < len(starts) and starts[t, k]) and rows[t - 1, k].tobytes() != rows[t, k].tobytes():
            yield rows[t - 1, k], rows[t, k]


def follows(before: Any, after: Any, stack: Stack) -> Any:
    """Return [M] bools: whether `after` is `before` shifted by one step, apart from its newest frame; both [M, ...]."""
    old, new, size = _grouped(before, stack), _grouped(after, stack), _frame_bytes(after, stack)
    word = _word(new)
    if word is not None:
        kept = word.type((1 << 8 * (word.itemsize - size)) - 1)
        same = (new.view(word)[..., 0] & kept) == (old.view(word)[..., 0] >> word.type(8 * size))
        return same.all(axis=1)
    unit = np.dtype(f"u{math.gcd(8, size, new.shape[-1])}")
    size //= unit.itemsize
    return (new.view(unit)[..., :-size] == old.view(unit)[..., size:]).all(axis=(1, 2))


def newest(rows: Any, stack: Stack, lead: int = 1) -> Any:
    """Return a view of the newest frame of each row as bytes, [..., A, B]; rows have `lead` axes before those."""
    return _grouped(rows, stack, lead)[..., -_frame_bytes(rows, stack, lead) :]


def restore(before: Any, after: Any, stack: Stack) -> None:
    """Fill in all but the newest frames of `after` from `before`; both [M, ...]."""
    old, new, size = _grouped(before, stack), _grouped(after, stack), _frame_bytes(after, stack)
    word = _word(new)
    if word is None:
        new[..., :-size] = old[..., size:]
    else:
        shift, target = word.type(8 * (word.itemsize - size)), new.view(word)[..., 0]
        np.bitwise_or(old.view(word)[..., 0] >> word.type(8 * size), target >> shift << shift, out=target)


def _grouped(rows: Any, stack: Stack, lead: int = 1) -> Any:
    """Return a view of rows as bytes, [..., A, B]: frames lie in B, the newest last; A counts what is outside them."""
    outer = math.prod(rows.shape[lead : lead + stack.axis])
    return rows.reshape(*rows.shape[:lead], outer, rows[(0,) * lead].size // outer).view(np.uint8)


def _frame_bytes(rows: Any, stack: Stack, lead: int = 1) -> int:
    """Return the bytes of the newest frame within each of its groups."""
    inner: int = math.prod(rows.shape[lead + stack.axis + 1 :])
    return stack.step * inner * int(rows.itemsize)


def _word(grouped: Any) -> np.dtype[Any] | None:
    """Return the integer as wide as a group: shifting it is much faster than copying a few bytes many times."""
    return _WORDS.get(grouped.shape[-1]) if sys.byteorder == "little" else None
