"""Layout of fragments in shared memory: T steps of all slots, on several sides: one fills while another is read.

`FragmentArrays` is the only list of a fragment's arrays: their places in memory, what is sent, and what an answer is
checked for follow from it. Workers write their own columns; the head reads whole arrays. The memfd is sparse: a side
that is never used costs nothing.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from clusterenv.memory.rows import Leaf

__all__ = ["Arena", "ArenaLayout", "ArraySpec", "FragmentArrays", "Side", "specs_of"]

_ALIGN = 64


@dataclass(frozen=True)
class ArenaLayout:
    num_steps: int
    """Maximum number of steps."""
    num_envs: int
    obs: tuple[Leaf, ...]
    action: Leaf
    num_masks: int
    """Columns of action masks; 0: the policy has none."""
    num_sides: int = 2

    def shape(self, spec: ArraySpec) -> tuple[int, ...]:
        return (self.num_steps + spec.extra_rows, self.num_envs, *spec.shape)

    @property
    def side_bytes(self) -> int:
        total = sum(self.aligned_bytes(spec) for spec in specs_of(self))
        return total + -total % mmap.PAGESIZE

    @property
    def size(self) -> int:
        return self.num_sides * self.side_bytes

    def aligned_bytes(self, spec: ArraySpec) -> int:
        size = spec.bytes(self.num_steps, self.num_envs)
        return size + -size % _ALIGN


class _Field(NamedTuple):
    values: Callable[[ArenaLayout], tuple[Leaf, ...]]
    """Leaves of one slot in one row."""
    extra_rows: int = 0
    is_list: bool = False
    """One array for each leaf of a space."""


def _each_step(dtype: str) -> Any:
    leaf = Leaf((), (), dtype)
    return _Field(lambda layout: (leaf,))


class FragmentArrays:
    """The arrays of a fragment, in the order in which they are stored and sent.

    To add one, add a line here and its value to `lose`, `blank` and `lose_unplayed`; write it in the worker's loop, and
    read it where rollouts are assembled. docs/architecture.md lists all places.
    """

    actions: Any = _Field(lambda layout: (layout.action,))
    rewards: Any = _each_step("<f8")
    logprobs: Any = _each_step("<f4")
    terminations: Any = _each_step("|b1")
    truncations: Any = _each_step("|b1")
    valid: Any = _each_step("|b1")
    starts: Any = _each_step("|b1")
    """Whether the row is the first of an episode."""
    masks: Any = _Field(lambda layout: (Leaf((), (layout.num_masks,), "|b1"),))
    obs: Any = _Field(lambda layout: layout.obs, extra_rows=1, is_list=True)
    """[T + 1, N, ...] per leaf; row t + 1 is the observation after step t."""

    def __init__(self, specs: Sequence[ArraySpec], arrays: Iterable[Any]) -> None:
        self.specs = specs
        self.arrays = list(arrays)
        """[T, N, ...] each, in the order of `specs`."""
        values: dict[str, Any] = {name: [] for name in _LISTS}
        for spec, array in zip(specs, self.arrays, strict=True):
            if spec.field in _LISTS:
                values[spec.field].append(array)
            else:
                values[spec.field] = array
        vars(self).update(values)

    def part(self, num_steps: int, columns: slice) -> list[Any]:
        """Return views of the first `num_steps` steps of these columns, in the order of `specs`."""
        return [
            array[: num_steps + spec.extra_rows, columns] for spec, array in zip(self.specs, self.arrays, strict=True)
        ]

    def lose(self, t: int, k: Any) -> None:
        """Flag the rows of these columns as lost, from t on."""
        if t < len(self.valid):
            self.valid[t:, k] = False
            self.rewards[t:, k] = 0.0
            self.terminations[t:, k] = False
            self.truncations[t:, k] = False
            self.truncations[t, k] = True

    def blank(self, t: int) -> None:
        """Flag all rows from t on as not played; the episodes continue from the observation of row t."""
        for array in (self.valid, self.starts, self.terminations, self.truncations):
            array[t:] = False
        self.rewards[t:] = self.logprobs[t:] = 0.0
        for leaf in self.obs:
            leaf[t + 1 :] = leaf[t]

    def lose_unplayed(self, t: int) -> None:
        """Flag all rows from t on as lost; they still hold data of an earlier fragment."""
        self.starts[t:] = False
        self.logprobs[t:] = 0.0
        self.lose(t, slice(None))


_FIELDS: dict[str, _Field] = {name: field for name, field in vars(FragmentArrays).items() if isinstance(field, _Field)}
_LISTS = frozenset(name for name, field in _FIELDS.items() if field.is_list)


class ArraySpec(NamedTuple):
    """One array of a fragment."""

    field: str
    extra_rows: int
    """Rows beyond those of its steps."""
    shape: tuple[int, ...]
    """Of one slot in one row."""
    dtype: np.dtype[Any]
    slot_bytes: int
    """Bytes of one slot in one row."""

    def bytes(self, num_steps: int, columns: int) -> int:
        return (num_steps + self.extra_rows) * columns * self.slot_bytes


@lru_cache(maxsize=16)
def specs_of(layout: ArenaLayout) -> tuple[ArraySpec, ...]:
    """Return the arrays that fragments of this layout have."""
    specs = []
    for name, field in _FIELDS.items():
        for leaf in field.values(layout):
            dtype = np.dtype(leaf.dtype)
            specs.append(ArraySpec(name, field.extra_rows, leaf.shape, dtype, math.prod(leaf.shape) * dtype.itemsize))
    return tuple(specs)


def empty_arrays(layout: ArenaLayout) -> FragmentArrays:
    """Return arrays as those of a side, but zero and in private memory, of which the kernel maps what is read."""
    specs = specs_of(layout)
    return FragmentArrays(specs, [np.zeros(layout.shape(spec), spec.dtype) for spec in specs])


class Side(FragmentArrays):
    """The arrays of one side."""

    def __init__(self, layout: ArenaLayout, memory: mmap.mmap, at: int) -> None:
        specs, arrays = specs_of(layout), []
        for spec in specs:
            shape = layout.shape(spec)
            arrays.append(np.frombuffer(memory, spec.dtype, math.prod(shape), at).reshape(shape))
            at += layout.aligned_bytes(spec)
        super().__init__(specs, arrays)


class Arena:
    def __init__(self, layout: ArenaLayout, memory: mmap.mmap) -> None:
        self.layout = layout
        self.sides = [Side(layout, memory, i * layout.side_bytes) for i in range(layout.num_sides)]
