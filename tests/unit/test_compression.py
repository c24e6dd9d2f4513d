"""Packed observations are the same after unpacking, bit for bit; whatever else comes raises ProtocolError."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import clusterenv as ce
from clusterenv.memory import compression, stacks
from clusterenv.memory.compression import Form, installed_codecs, pack, pack_finals, unpack, unpack_finals
from clusterenv.memory.fragments import ArraySpec
from clusterenv.memory.stacks import Stack

pytestmark = pytest.mark.guarantee(23)

CODECS = ["", *installed_codecs()]


def spec_of(rows):
    shape = rows.shape[2:]
    return ArraySpec("obs", 1, shape, rows.dtype, int(np.prod(shape)) * rows.itemsize)


def same(rows, form, most_rows=None):
    """Return the packed bytes, which have the same content as these rows [R, K, ...]."""
    data = pack(rows, form)
    assert bytes(unpack(spec_of(rows), rows.shape[1], most_rows or len(rows), data)) == rows.tobytes()
    return data


def stacked(steps=9, columns=3, frame=(6, 5), size=4, axis=0, step=1, dtype=np.uint8, seed=0):
    """Random frames, stacked along an axis of the observation, which the frames have too if there are several new."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 250, (steps + size, columns, *frame)).astype(dtype)
    if step == 1:
        rows = [np.stack([frames[t + i] for i in range(size)], 1 + axis) for t in range(steps + 1)]
    else:
        rows = [np.concatenate([frames[t + i] for i in range(size)], 1 + axis) for t in range(steps + 1)]
    return np.stack(rows)


NO_STARTS = np.zeros((1, 3), bool)


def test_rows_of_which_some_continue_are_restored_together(monkeypatch):
    """One by one, a node with many small rows could keep the head busy for seconds."""
    calls, restore = [], stacks.restore
    monkeypatch.setattr(stacks, "restore", lambda *args: (calls.append(1), restore(*args)))
    rows = stacked(steps=9, columns=64, frame=(2,))
    rows[1:, ::3] = 255 - rows[1:, ::3]  # another episode begins
    same(rows, Form(Stack(0, 1), ""))
    assert len(calls) <= len(rows)
    calls.clear()
    before, after = rows[0], rows[1]
    data = pack_finals(after, before, Form(Stack(0, 1), ""))
    assert np.array_equal(unpack_finals(spec_of(rows), before, data), after) and len(calls) == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("axis", "frame", "step", "size"),
    [
        (0, (6, 5), 1, 4),
        (2, (6, 5), 1, 4),  # channels last
        (1, (6, 5), 1, 3),
        (2, (6, 5), 1, 8),
        (0, (3, 8, 8), 3, 4),  # colour frames along the channels
        (2, (8, 8, 3), 3, 4),
        (0, (), 1, 5),  # the last values of one number
    ],
)
def test_stacked_frames_are_found_and_sent_once(codec, dtype, axis, frame, step, size):
    rows = stacked(frame=frame, size=size, axis=axis, step=step, dtype=dtype)
    stack = stacks.find(rows, NO_STARTS)
    assert stack == Stack(axis, step)
    data = same(rows, Form(stack, codec))
    frames = (len(rows) - 1 + size) * rows.shape[1]
    most = frames * rows[0, 0].nbytes // size + 100
    assert len(data) <= most if codec == "" else len(data) < 1.2 * most


@pytest.mark.parametrize("axis", [0, 2])
def test_rows_that_do_not_fit_are_sent_whole(axis):
    rows = stacked(axis=axis)
    rows[4, 1] = 7  # an episode starts, by repeating its first frame
    rows[6, 2, 0, 0, 0] ^= 1  # one bit of an old frame
    stack = stacks.find(rows, NO_STARTS)
    data = same(rows, Form(stack, ""))
    bits = np.unpackbits(np.frombuffer(data, np.uint8, 4, 7), count=30).reshape(3, 10)
    assert [(int(k), int(t)) for k, t in np.argwhere(bits == 0)] == [
        (0, 0),
        *((1, t) for t in (0, 4, 5)),
        *((2, t) for t in (0, 6)),
    ]


def test_starts_of_episodes_do_not_hide_the_stack():
    rows, starts = stacked(steps=12), np.zeros((12, 3), bool)
    for t in range(0, 12, 2):
        rows[t], starts[t] = np.random.default_rng(t).integers(0, 9, rows[t].shape), True
        rows[t + 1, :, :-1] = rows[t, :, 1:]
    assert stacks.find(rows, starts) == Stack(0, 1)
    assert stacks.find(rows, NO_STARTS) is None


def test_what_is_not_stacked_is_not_found():
    rng = np.random.default_rng(0)
    assert stacks.find(rng.integers(0, 255, (10, 3, 4, 6, 5)), NO_STARTS) is None
    assert stacks.find(np.zeros((10, 3, 4, 6, 5), np.uint8), NO_STARTS) is None, "along any axis: nothing changes"
    assert stacks.find(rng.random((10, 3)), NO_STARTS) is None
    assert stacks.find(np.arange(3)[None, :, None], NO_STARTS) is None, "a single row"


def test_equal_numbers_with_other_bits_are_kept():
    rows = stacked(dtype=np.float32)
    rows[3, 0, 3, 0, 0], rows[4, 0, 2, 0, 0], rows[5, 0, 1, 0, 0], rows[6, 0, 0, 0, 0] = 0.0, -0.0, -0.0, -0.0
    rows[3:7, 1] = np.nan
    same(rows, Form(Stack(0, 1), ""))


@pytest.mark.parametrize("codec", CODECS)
def test_one_step_of_one_environment(codec):
    rows = stacked(steps=1, columns=1)
    assert stacks.find(rows, NO_STARTS) == Stack(0, 1)
    same(rows, Form(Stack(0, 1), codec))
    same(rows[:1], Form(Stack(0, 1), codec))
    same(rows, Form(None, codec))


ROWS = arrays.arrays(
    st.sampled_from([np.uint8, np.float32, np.int64]),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(2, 4), st.integers(1, 4)),
    elements=st.integers(0, 1),  # so that some rows happen to continue others
)


@settings(max_examples=200)
@given(ROWS, st.sampled_from([None, Stack(0, 1), Stack(1, 1)]), st.sampled_from(CODECS))
def test_any_rows_in_any_form(rows, stack, codec):
    same(rows, Form(stack if stack is not None and stack.fits(rows.shape[2:]) else None, codec))


@pytest.mark.parametrize("codec", CODECS)
def test_columns_of_a_larger_array(codec):
    """As in memory: the columns of one worker are not contiguous."""
    whole = stacked(columns=7)
    rows = whole[:6, 2:5]
    data = pack(rows, Form(Stack(0, 1), codec))
    assert bytes(unpack(spec_of(rows), 3, 9, data)) == rows.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_final_observations_continue_the_rows_before_them(codec):
    rows = stacked()
    before, values = rows[[2, 5, 6], [0, 1, 2]], rows[[3, 6, 7], [0, 1, 2]].copy()
    values[1] = 9
    data = pack_finals(values, before, Form(Stack(0, 1), codec))
    if codec == "":
        assert len(data) == 7 + 1 + 2 * 30 + 120
    assert unpack_finals(spec_of(rows), before, data).tobytes() == values.tobytes()
    for other in (before[:2], rows[:4, 0]):
        with pytest.raises(ce.ProtocolError, match=r"rows|instead of 4"):
            unpack_finals(spec_of(rows), other, data)


# -- lies -------------------------------------------------------------------------------------------------------

STACKED = stacked()
SPEC = spec_of(STACKED)


def refused(data, match=None, spec=SPEC, columns=3, most_rows=10):
    with pytest.raises(ce.ProtocolError, match=match):
        unpack(spec, columns, most_rows, data)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("stack", [None, Stack(0, 1)])
def test_bytes_of_another_size_are_refused(stack, codec):
    data = pack(STACKED, Form(stack, codec))
    refused(data[:-1])
    refused(data[:-9])
    refused(data + b"0")
    refused(data[:5], "cut short")
    refused(b"")
    refused(data, "at most 9", most_rows=9)
    refused(data, columns=2)
    refused(data, columns=4)
    refused(data, spec=SPEC._replace(shape=(4, 6, 4), slot_bytes=96))


def test_headers_that_lie():
    body = bytes(STACKED.nbytes)

    def header(codec=0, axis=-1, step=0, rows=10):
        return struct.pack("<BbBI", codec, axis, step, rows)

    assert bytes(unpack(SPEC, 3, 10, header() + body)) == body
    refused(header(codec=9) + body, "codec 9")
    refused(header(rows=0), "0 rows")
    refused(header(rows=0xFFFF_FFFF) + body, "rows")
    refused(header(axis=3, step=1) + body, "axis 3")
    refused(header(axis=-2, step=1) + body, "axis -2")
    refused(header(axis=0, step=0) + body, "axis 0 by 0")
    refused(header(axis=0, step=4) + body, "axis 0 by 4")
    refused(header(axis=0, step=1), "axis 0")
    refused(header(axis=0, step=1) + b"\xff" * 4 + body, "first row continues")
    refused(header() + body, spec=SPEC._replace(dtype=np.dtype(bool)))
    refused(header(), spec=SPEC._replace(shape=(0,), slot_bytes=0))


def test_a_codec_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(compression, "installed_codecs", lambda: ("zlib",))
    refused(struct.pack("<BbBI", 2, -1, 0, 10) + b"x", "codec 2")


@pytest.mark.parametrize("codec", installed_codecs())
def test_what_expands_without_end_takes_no_memory(codec):
    bomb = compression._compress(codec, np.zeros(200 << 20, np.uint8))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    refused(struct.pack("<BbBI", compression._NUMBERS[codec], -1, 0, 10) + bomb)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_zstd_frame_with_a_huge_window_is_refused():
    """A frame that is complete needs no window; for one that is cut short, zstd would allocate it."""
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=STACKED.nbytes)
    frame = writer.compress(STACKED.swapaxes(0, 1).tobytes()) + writer.flush()
    lie = bytearray(frame)
    if zstandard.get_frame_parameters(frame).window_size <= compression._WINDOW:  # a single segment: has no window
        lie[4] &= ~0x20 & 0xFF
        lie[5:5] = bytes([(27 - 10) << 3])
    assert zstandard.get_frame_parameters(bytes(lie)).window_size > compression._WINDOW
    refused(struct.pack("<BbBI", 2, -1, 0, 10) + bytes(lie[:-1]), "too much memory")


@settings(max_examples=500)
@given(
    st.sampled_from(
        [pack(STACKED, Form(stack, codec)) for stack in (None, Stack(0, 1), Stack(2, 1)) for codec in CODECS]
    ),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=5),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_damaged_data_raise_protocol_error_only(data, changes, first, length):
    damaged = bytearray(data)
    for at, value in changes:
        damaged[at % min(len(damaged), 300)] = value
    if length < 30:
        del damaged[first : first + length]
    try:
        assert len(unpack(SPEC, 3, 10, damaged)) <= STACKED.nbytes
        assert unpack_finals(SPEC, STACKED[:, 0], damaged).shape == STACKED[:, 0].shape
    except ce.ProtocolError:
        pass


@settings(max_examples=300)
@given(st.integers(0, 3), st.integers(-128, 127), st.integers(0, 255), st.integers(0, 12), st.binary(max_size=200))
def test_random_data_raise_protocol_error_only(codec, axis, step, rows, rest):
    data = struct.pack("<BbBI", codec, axis, step, rows) + (zlib.compress(rest) if codec == 1 else rest)
    refused(data)
