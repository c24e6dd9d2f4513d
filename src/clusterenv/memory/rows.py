"""Layout of rows in shared memory, derived from spaces: each slot's observation, reward, flags and action.

A `Layout` is plain data, computed once at the head and sent to every worker; `Buffers` are the arrays over it.
Values of spaces without a fixed size (Text, Sequence, Graph, custom ones) are not stored here: they travel
outside the shared memory, as objects.

Observations have two sides. A worker writes to the side that the head has not delivered, so a worker that
dies in the middle of a row cannot corrupt the last observation that the user saw.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import Space, spaces

__all__ = ["Buffers", "Layout", "Leaf", "assemble", "flatten", "has_room", "leaves_of", "make_layout"]

_FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_ALIGN = 64


@dataclass(frozen=True)
class Leaf:
    """One array of a (nested) space; `dtype` is None if the values are objects."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str | None
    low: int | tuple[int, ...] | None = None
    high: int | tuple[int, ...] | None = None
    """Bounds of a Discrete, MultiDiscrete or MultiBinary leaf (`high` is excluded), checked because an index outside
    them is always a bug; a tuple has one for each element. A Box has none: many environments exceed theirs a little."""

    @property
    def name(self) -> str:
        return "".join(f"[{part!r}]" for part in self.path)

    def unusable(self, values: Any) -> Any | None:
        """Return which of these values [..., *shape] are not finite, or outside the bounds; None: none of them.

        To check more of a space, do it here; if its values are floats, also in `finite_checker`.
        """
        usable = self._usable(values)
        if usable is None or usable.all():
            return None
        return ~usable.all(axis=tuple(range(values.ndim - len(self.shape), values.ndim)))

    def _usable(self, values: Any) -> Any | None:
        if values.dtype.kind in "fc":
            return np.isfinite(values)
        if self.low is None or self.high is None:
            return None
        return (values >= _bounds(self.low, self.shape)) & (values < _bounds(self.high, self.shape))

    def problem(self, value: Any) -> str:
        """Return what is wrong with an unusable value."""
        if value.dtype.kind in "fc":
            return f"observation{self.name} is not finite: {value!r}"
        at = tuple(int(i) for i in np.argwhere(~np.asarray(self._usable(value)))[0])  # of the first wrong element
        low, high = (np.broadcast_to(_bounds(bound, self.shape), self.shape)[at] for bound in (self.low, self.high))
        where = "".join(f"[{i}]" for i in at)
        return f"observation{self.name}{where} is {value[at]}, its space says {low} to {high - 1}"


@functools.lru_cache
def _bounds(bound: int | tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return bound if isinstance(bound, int) else np.reshape(bound, shape)


def leaves_of(space: Space[Any], path: tuple[str | int, ...] = ()) -> list[Leaf]:
    """Return the leaves in the order in which `flatten` yields values."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in leaves_of(sub, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for i, sub in enumerate(space.spaces) for leaf in leaves_of(sub, (*path, i))]
    if isinstance(space, _FIXED) and space.dtype is not None and np.dtype(space.dtype).kind in "biufc":
        return [Leaf(path, tuple(space.shape or ()), np.dtype(space.dtype).str, *_bounds_of(space))]
    return [Leaf(path, (), None)]


def _bounds_of(space: Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return _plain(space.start), _plain(space.start + space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return 0, 2
    return None, None


def _plain(bound: Any) -> int | tuple[int, ...]:
    """Return one number if all elements have the same bound, because that compares faster."""
    values = tuple(bound.reshape(-1).tolist())
    return values[0] if len(set(values)) == 1 else values


def flatten(space: Space[Any], value: Any) -> Iterator[Any]:
    """Yield the leaf values of one sample, or of one batch."""
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            yield from flatten(sub, value[key])
    elif isinstance(space, spaces.Tuple):
        if len(value) != len(space.spaces):
            raise ValueError(f"expected a tuple of {len(space.spaces)} elements, got {len(value)}")
        for sub, item in zip(space.spaces, value, strict=True):
            yield from flatten(sub, item)
    else:
        yield value


def assemble(space: Space[Any], values: Iterator[Any]) -> Any:
    """Build one sample or batch from its leaf values: the inverse of `flatten`."""
    if isinstance(space, spaces.Dict):
        return {key: assemble(sub, values) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(assemble(sub, values) for sub in space.spaces)
    return next(values)


@dataclass(frozen=True)
class Layout:
    num_envs: int
    obs: tuple[Leaf, ...]
    actions: tuple[Leaf, ...]
    offsets: tuple[int, ...]
    """Of reward, terminated, truncated, side, pace; then of each fixed obs leaf, then each fixed action leaf."""
    size: int

    @property
    def actions_are_shared(self) -> bool:
        return all(leaf.dtype is not None for leaf in self.actions)


def _arrays(layout_obs: tuple[Leaf, ...], actions: tuple[Leaf, ...], n: int) -> list[tuple[Any, ...]]:
    """Return (shape, dtype) of every array, in the order of `Layout.offsets`."""
    fixed: list[tuple[Any, ...]] = [((n,), "<f8"), ((n,), "|b1"), ((n,), "|b1"), ((n,), "|u1"), ((n,), "<f8")]
    fixed += [((2, n, *leaf.shape), leaf.dtype) for leaf in layout_obs if leaf.dtype]
    if all(leaf.dtype for leaf in actions):
        fixed += [((n, *leaf.shape), leaf.dtype) for leaf in actions]
    return fixed


def make_layout(observation_space: Space[Any], action_space: Space[Any], num_envs: int, is_same: bool = True) -> Layout:
    """Return the layout of the rows. `is_same`: all slots have this exact space; else only its shapes and dtypes."""
    obs, actions = tuple(leaves_of(observation_space)), tuple(leaves_of(action_space))
    if not is_same:
        obs = tuple(_unbounded(leaf) for leaf in obs)
    offsets, end = [], 0
    for shape, dtype in _arrays(obs, actions, num_envs):
        offsets.append(end)
        end += int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        end += -end % _ALIGN
    return Layout(num_envs, obs, actions, tuple(offsets), max(end, mmap.PAGESIZE))


def has_room(leaves: tuple[Leaf, ...], space: Space[Any]) -> bool:
    """Return whether observations of this space fit a layout with these leaves, including bounds if it has any."""
    own = tuple(leaves_of(space))
    return own == leaves or tuple(map(_unbounded, own)) == leaves


def _unbounded(leaf: Leaf) -> Leaf:
    return replace(leaf, low=None, high=None)


class Buffers:
    """The arrays of a layout over one block of memory (a mapped memfd, or plain bytes in one process)."""

    def __init__(self, layout: Layout, memory: mmap.mmap | bytearray) -> None:
        self.layout = layout
        arrays = [
            np.frombuffer(memory, dtype=dtype, count=int(np.prod(shape, dtype=np.int64)), offset=offset).reshape(shape)
            for offset, (shape, dtype) in zip(
                layout.offsets, _arrays(layout.obs, layout.actions, layout.num_envs), strict=True
            )
        ]
        self.reward, self.terminated, self.truncated, self.side, self.pace_s = arrays[:5]
        rest = iter(arrays[5:])
        self.obs: list[Any] = [next(rest) if leaf.dtype else None for leaf in layout.obs]  # [2, N, ...]
        self.actions: list[Any] = list(rest)  # [N, ...]; empty where actions are objects


def coerce(value: Any, leaf: Leaf, what: str, count: int | None = None) -> Any:
    """Return `value` as an array; raise ValueError unless it has the leaf's shape and values that its dtype can hold.

    `count`: the value is a batch of this many.
    """
    array, dtype = np.asarray(value), np.dtype(leaf.dtype)
    shape = leaf.shape if count is None else (count, *leaf.shape)
    if array.shape != shape:
        raise ValueError(f"{what}{leaf.name} has shape {array.shape}, its space says {shape}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{what}{leaf.name} has dtype {array.dtype}, its space says {dtype}")
    if array.dtype != dtype and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
        narrow = array.astype(dtype)  # wraps around silently
        if not np.array_equal(narrow, array):
            wrong = array[narrow != array].flat[0]
            raise ValueError(f"{what}{leaf.name} has the value {wrong}, which its dtype {dtype} cannot hold")
    return array


def row_writer(space: Space[Any], buffers: Buffers) -> Callable[[int, int, Any], list[Any] | None]:
    """Return a function `write(side, slot, obs)`, which returns the values of object leaves, if there are any."""
    leaves = buffers.layout.obs
    sides = [None if array is None else (array[0], array[1]) for array in buffers.obs]

    if len(leaves) == 1 and leaves[0].dtype is not None and not isinstance(space, (spaces.Dict, spaces.Tuple)):
        leaf, pair = leaves[0], sides[0]
        assert pair is not None
        shape, dtype = leaf.shape, np.dtype(leaf.dtype)
        ndarray = np.ndarray

        def write_one(side: int, slot: int, obs: Any) -> None:
            # The hot path: nearly every environment returns exactly the array that its space describes.
            if obs.__class__ is ndarray and obs.shape == shape and obs.dtype == dtype:
                pair[side][slot] = obs
            else:
                pair[side][slot] = coerce(obs, leaf, "observation")

        return write_one

    def write(side: int, slot: int, obs: Any) -> list[Any] | None:
        objects = []
        for leaf, both, value in zip(leaves, sides, flatten(space, obs), strict=True):
            if both is None:
                objects.append(value)
            else:
                both[side][slot] = coerce(value, leaf, "observation")
        return objects or None

    return write


_concatenate = np.concatenate  # used in every step: saves the attribute lookup


def blocks_of(leaves: tuple[Leaf, ...], array: Any) -> Any:
    """View the array [M, K, ...] of a single-array space as M blocks for `write_block`; None for other spaces."""
    leaf = leaves[0]
    if len(leaves) != 1 or leaf.path or leaf.dtype is None or not leaf.shape:
        return None
    return array.reshape(len(array), array.shape[1] * leaf.shape[0], *leaf.shape[1:])


def write_block(observations: list[Any], block: Any, shapes: list[tuple[int, ...]]) -> bool:
    """Write the observations of all K environments at once.

    Returns False if one is missing or does not match its space: then nothing is written, and `row_writer` names it.
    """
    try:
        if [obs.shape for obs in observations] != shapes or observations[0].dtype != block.dtype:
            return False
        _concatenate(observations, out=block, casting="no")
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def finite_checker(buffers: Buffers, rows: slice) -> Callable[[int], bool]:
    """Return `check(side)`: True if these rows' one observation array and rewards are finite; else ask `bad_rows`."""
    leaf = buffers.layout.obs[0]
    rewards = buffers.reward[rows]
    blocks = None
    if leaf.dtype is not None and np.dtype(leaf.dtype) in (np.float32, np.float64):
        blocks = [buffers.obs[0][side][rows].reshape(-1) for side in (0, 1)]
    is_safe = blocks is not None or (leaf.dtype is not None and np.dtype(leaf.dtype).kind in "biu" and leaf.low is None)
    is_finite, every = np.isfinite, np.logical_and.reduce  # `.all()` goes through Python, and this runs in every step

    def check(side: int) -> bool:
        if blocks is not None and not every(is_finite(blocks[side])):
            return False
        return is_safe and bool(every(is_finite(rewards)))

    return check


def bad_rows(buffers: Buffers, side: int, rows: slice | list[int]) -> list[tuple[int, str]]:
    """Return (index into rows, problem) for observations that are not finite or outside their bounds."""
    bad: dict[int, str] = {}
    for leaf, array in zip(buffers.layout.obs, buffers.obs, strict=True):
        if array is None:
            continue
        block = array[side][rows]
        unusable = leaf.unusable(block)
        if unusable is not None:
            for i in np.flatnonzero(unusable):
                bad.setdefault(int(i), leaf.problem(block[i]))
    return sorted(bad.items())


def wrong_rows(buffers: Buffers, slots: list[int], sides: list[int]) -> list[tuple[int, str]]:
    """Return (slot, problem) for rows with an invalid observation or reward."""
    wrong = []
    for side in (0, 1):
        part = [slot for slot, its in zip(slots, sides, strict=True) if its == side]
        if part:
            wrong += [(part[i], text) for i, text in bad_rows(buffers, side, part)]
    rewards = buffers.reward[slots]
    return wrong + [(slots[i], f"reward is {rewards[i]}") for i in np.flatnonzero(~np.isfinite(rewards))]
