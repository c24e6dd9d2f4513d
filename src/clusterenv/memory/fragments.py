"""Where fragments lie in shared memory: T steps of all slots, on several sides: one fills while another is read.

Workers write their own columns; the head reads whole arrays. A sparse memfd: a side that is never used costs nothing.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterenv.memory.rows import Leaf

__all__ = ["Arena", "ArenaLayout", "Side"]

_ALIGN = 64


@dataclass(frozen=True)
class ArenaLayout:
    num_steps: int
    """How many steps fit."""
    num_envs: int
    obs: tuple[Leaf, ...]
    action: Leaf
    num_masks: int
    """Columns of action masks, 0 where the policy has none."""
    num_sides: int = 2

    def arrays(self) -> list[tuple[tuple[int, ...], str]]:
        """(shape, dtype) of each array of one side."""
        rows = (self.num_steps, self.num_envs)
        flags = [(rows, "|b1")] * 4
        masks = [((*rows, self.num_masks), "|b1")]
        obs = [((self.num_steps + 1, self.num_envs, *leaf.shape), str(leaf.dtype)) for leaf in self.obs]
        return [
            ((*rows, *self.action.shape), str(self.action.dtype)),
            (rows, "<f8"),
            (rows, "<f4"),
            *flags,
            *masks,
            *obs,
        ]

    @property
    def side_bytes(self) -> int:
        total = sum(_aligned(shape, dtype) for shape, dtype in self.arrays())
        return total + -total % mmap.PAGESIZE

    @property
    def size(self) -> int:
        return self.num_sides * self.side_bytes


def _aligned(shape: tuple[int, ...], dtype: str) -> int:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return size + -size % _ALIGN


class Side:
    """The arrays of one side."""

    def __init__(self, layout: ArenaLayout, memory: mmap.mmap, at: int) -> None:
        arrays: list[Any] = []
        for shape, dtype in layout.arrays():
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(memory, dtype=dtype, count=count, offset=at).reshape(shape))
            at += _aligned(shape, dtype)
        self.actions, self.rewards, self.logprobs = arrays[:3]
        self.terminations, self.truncations, self.valid, self.starts, self.masks = arrays[3:8]
        self.obs: list[Any] = arrays[8:]
        """[T + 1, N, ...] per leaf; row t + 1 is the observation after step t."""


class Arena:
    def __init__(self, layout: ArenaLayout, memory: mmap.mmap) -> None:
        self.layout = layout
        self.sides = [Side(layout, memory, i * layout.side_bytes) for i in range(layout.num_sides)]
