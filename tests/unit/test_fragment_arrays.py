"""The arrays of a fragment are listed once: memory, transfer and checks follow from that list."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce
from clusterenv.memory import fragments
from clusterenv.memory.fragments import Arena, ArenaLayout, specs_of
from clusterenv.memory.rows import leaves_of
from clusterenv.memory.transfer import fragment_sizes, read_fragment, view_fragment, write_fragment

SPACE = spaces.Dict(image=spaces.Box(0, 255, (2, 3), np.uint8), mode=spaces.Discrete(4))
ACTION = leaves_of(spaces.Box(-1, 1, (2,), np.float32))[0]
LAYOUT = ArenaLayout(7, 5, tuple(leaves_of(SPACE)), ACTION, 3)


def arena(layout=LAYOUT):
    return Arena(layout, mmap.mmap(-1, layout.size))


def fill(side):
    for number, array in enumerate(side.arrays, start=1):
        array[...] = (np.arange(array.size) % 97 + number).reshape(array.shape).astype(array.dtype)


def test_each_array_has_its_own_place():
    two = arena().sides
    for side in two:
        for number, array in enumerate(side.arrays, start=1):
            array.view(np.uint8)[...] = number + 50 * (side is two[1])
    for side in two:
        for number, array in enumerate(side.arrays, start=1):
            assert (array.view(np.uint8) == number + 50 * (side is two[1])).all()


def test_names_and_shapes():
    side = arena().sides[0]
    assert side.actions.shape == (7, 5, 2) and side.actions.dtype == np.float32
    assert side.rewards.shape == (7, 5) and side.rewards.dtype == np.float64
    assert side.masks.shape == (7, 5, 3) and side.masks.dtype == np.bool_
    assert [leaf.shape for leaf in side.obs] == [(8, 5, 2, 3), (8, 5)]
    assert [leaf.dtype for leaf in side.obs] == [np.uint8, np.int64]


def test_columns_arrive_as_they_were_and_others_stay():
    there, here = arena().sides[0], arena().sides[1]
    fill(there)
    parts = read_fragment(there, slice(1, 3), 4)
    assert [len(part) for part in parts] == fragment_sizes(LAYOUT, 2, 4)
    write_fragment(here, slice(1, 3), 4, 4, parts)
    for spec, sent, got in zip(specs_of(LAYOUT), there.arrays, here.arrays, strict=True):
        rows = 4 + spec.extra_rows
        assert (got[:rows, 1:3] == sent[:rows, 1:3]).all()
        got[:rows, 1:3] = 0
        assert not got.any()


def test_steps_that_were_not_played_are_flagged_as_lost():
    """Whatever an earlier fragment left there."""
    there, here = arena().sides[0], arena().sides[1]
    fill(there)
    for array in here.arrays:
        array[...] = 1
    write_fragment(here, slice(1, 3), 6, 4, read_fragment(there, slice(1, 3), 4))
    assert (here.rewards[:4, 1:3] == there.rewards[:4, 1:3]).all()
    lost = (slice(4, 6), slice(1, 3))
    for array in (here.valid, here.terminations, here.starts, here.rewards, here.logprobs):
        assert not array[lost].any()
        assert array[6:].all() and array[:, [0, 3, 4]].all(), "nothing else is touched"
    assert here.truncations[lost].tolist() == [[True, True], [False, False]]


def test_bytes_of_another_size_are_refused():
    side = arena().sides[0]
    parts = read_fragment(side, slice(0, 2), 4)
    for wrong in (parts[:-1], [*parts, b""], [parts[0][:-1], *parts[1:]]):
        with pytest.raises(ce.ProtocolError):
            write_fragment(side, slice(0, 2), 4, 4, wrong)


def test_one_line_more_in_the_list_is_an_array_more_everywhere(monkeypatch):
    monkeypatch.setitem(fragments._FIELDS, "values", fragments._each_step("<f4"))
    specs_of.cache_clear()
    try:
        there, here = arena().sides[0], arena().sides[1]
        fill(there)
        assert there.values.shape == (7, 5) and there.values.dtype == np.float32
        parts = read_fragment(there, slice(0, 5), 7)
        assert (view_fragment(there.specs, 5, 7, parts).values == there.values).all()
        write_fragment(here, slice(0, 5), 7, 7, parts)
        assert (here.values == there.values).all() and (here.obs[1] == there.obs[1]).all()
    finally:
        specs_of.cache_clear()
