"""Rows of all environments are written at once into a view of the shared memory, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterenv.memory.rows import Leaf, blocks_of, write_block


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_a_block_is_a_view_of_some_columns(moments: int, count: int, first: int, shape: list[int]) -> None:
    shared = np.zeros((moments, first + count + 1, *shape), np.float32)
    blocks = blocks_of((Leaf((), tuple(shape), "<f4"),), shared[:, first : first + count])
    rng = np.random.default_rng(0)
    rows = [rng.random(shape, np.float32) for _ in range(count)]
    assert write_block(rows, blocks[-1], [tuple(shape)] * count)
    assert np.array_equal(shared[-1, first : first + count], np.stack(rows))
    assert not shared[:-1].any() and not shared[:, :first].any() and not shared[:, first + count :].any()


@pytest.mark.parametrize(
    "leaves",
    [
        (Leaf((), (), "<i8"),),
        (Leaf((), (), None),),
        (Leaf(("key",), (2,), "<f4"),),
        (Leaf((0,), (2,), "<f4"), Leaf((1,), (2,), "<f4")),
    ],
)
def test_a_space_that_is_not_one_array_has_no_blocks(leaves: tuple[Leaf, ...]) -> None:
    assert blocks_of(leaves, np.zeros((2, 3, 2), np.float32)) is None


@pytest.mark.parametrize(
    "rows",
    [
        [np.ones(2, np.float32)],
        [np.ones(2, np.float32), np.ones(3, np.float32)],
        [np.ones(2, np.float64), np.ones(2, np.float64)],
        [np.ones(2, np.float32), [1.0, 1.0]],
        [],
    ],
)
def test_what_its_space_does_not_say_is_left_to_the_row_writer(rows: list[Any]) -> None:
    blocks = blocks_of((Leaf((), (2,), "<f4"),), np.zeros((1, 2, 2), np.float32))
    assert not write_block(rows, blocks[0], [(2,)] * 2)
    assert not blocks.any()
