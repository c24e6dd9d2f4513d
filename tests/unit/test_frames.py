"""Frames: what is sent is what is read; and whatever else comes raises ProtocolError, and nothing else."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterenv as ce
from clusterenv.wire.frames import CHUNK, FRAME_LIMIT, PIECE_LEAST, head_reader, node_reader, to_wire
from clusterenv.wire.messages import Answer, Beat, Bye, Hello, Pull, SteppedAll, ToWorker

pytestmark = pytest.mark.guarantee(23)

MESSAGES = [
    Hello(1, "0.1.0", "3.11", "1.2.0", "abc", "host", 7, 2, True),
    Answer(0, 3, 17, True, (1, 2, 3)),
    SteppedAll(1, 5, (0, 1)),
    Beat(((0, 77, 1, 2, 3),)),
    Pull(3, 1 << 20, 1 << 19),
    Bye("preempted"),
]


@given(st.sampled_from(MESSAGES), st.lists(st.binary(max_size=200), max_size=5), st.integers(0, 2**64 - 1))
def test_what_is_sent_is_read(message, payload, session):
    (wire,) = to_wire(session, message, payload)
    got = head_reader().read(wire)
    assert got is not None and got[0] == session and got[1] == message and [bytes(p) for p in got[2]] == payload


def test_the_payload_of_a_larger_message_goes_in_frames_of_its_own():
    payload = [bytes(70_000), b"", b"abc"]
    (wire,) = to_wire(9, MESSAGES[1], payload)
    assert len(wire) == 4
    got = head_reader().read(wire)
    assert got is not None and got[1] == MESSAGES[1] and [bytes(p) for p in got[2]] == payload
    for wrong in (wire[:3], [*wire, b"more"], [wire[0], wire[1][1:], *wire[2:]]):
        with pytest.raises(ce.ProtocolError):
            head_reader().read(wrong)


@pytest.mark.parametrize("size", [CHUNK, CHUNK + 900, CHUNK + 1100, FRAME_LIMIT - 10, FRAME_LIMIT + 10])
def test_no_frame_is_larger_than_the_socket_takes(size):
    for frames in to_wire(9, Bye(""), [bytes(size)]):
        assert all(len(frame) + 64 <= FRAME_LIMIT for frame in frames), "encrypted, it is a little larger still"


def test_large_messages_go_in_pieces_that_join():
    rng = random.Random(0)
    payload = [rng.randbytes(size) for size in (10, 3 * CHUNK + 5, 0, CHUNK)]
    wire = to_wire(9, MESSAGES[1], payload)
    assert len(wire) == 5 and all(sum(map(len, frames)) < CHUNK + 100 for frames in wire)
    reader = head_reader()
    reader.limit = 16 << 20
    *early, last = [reader.read(frames) for frames in wire]
    assert early == [None] * 4 and last is not None
    assert last[1] == MESSAGES[1] and [bytes(p) for p in last[2]] == payload
    other = to_wire(9, MESSAGES[3])[0]
    assert reader.read(wire[0]) is None and reader.read(other) is not None, "others may come between"


def test_pieces_that_do_not_fit_are_refused():
    wire = to_wire(9, MESSAGES[1], [bytes(3 * CHUNK)])
    reader = head_reader()
    reader.limit = 16 << 20
    reader.read(wire[0])
    with pytest.raises(ce.ProtocolError, match="does not follow"):
        reader.read(wire[2])
    reader.limit = CHUNK
    with pytest.raises(ce.ProtocolError, match="the most that makes sense"):
        reader.read(wire[0])


def test_a_whole_message_has_the_same_limit_as_pieces():
    reader = head_reader()
    frames = [*to_wire(9, MESSAGES[1], [bytes(70_000)] * 7)[0], *[bytes(CHUNK)] * 100]
    with pytest.raises(ce.ProtocolError, match="the most that makes sense"):
        reader.read(frames)


def test_a_header_is_small():
    reader = head_reader()
    reader.limit = 1 << 30
    wire = to_wire(9, Bye("x" * (5 << 20)))
    with pytest.raises(ce.ProtocolError, match="a header of"):
        for frames in wire:
            reader.read(frames)


VALID = [frames for message in MESSAGES for load in (b"load", bytes(70_000)) for frames in to_wire(5, message, [load])]


@given(
    st.one_of(
        st.lists(st.binary(max_size=300), max_size=6),
        st.builds(
            lambda frames, at, cut, junk: [
                frame[: min(cut, len(frame))] + junk if i == at % len(frames) else frame
                for i, frame in enumerate(map(bytes, frames))
            ],
            st.sampled_from(VALID),
            st.integers(0, 5),
            st.integers(0, 40),
            st.binary(max_size=40),
        ),
    )
)
def test_garbage_raises_protocol_error_only(frames):
    for reader in (head_reader(), node_reader()):
        with contextlib.suppress(ce.ProtocolError):
            reader.read(frames)


def test_lies_about_sizes_cost_no_memory():
    import struct

    reader = head_reader()
    tracemalloc.start()
    for total in (2**63, 10 * 2**30, 17 << 20):
        count = -(-total // CHUNK)
        prefix = struct.pack("<BQIIQ", 1, 5, 0, count % 2**32, total)
        with pytest.raises(ce.ProtocolError):
            reader.read([prefix, b"x" * 1000])
    deep = b"\x91" * 100_000
    with pytest.raises(ce.ProtocolError):
        reader.read([struct.pack("<BQHI", 2, 5, 1, len(deep)) + deep])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_node_does_not_read_what_only_nodes_say():
    tell = ToWorker(0, 1, 2, (0,), True)
    assert node_reader().read(to_wire(1, tell)[0]) is not None
    with pytest.raises(ce.ProtocolError):
        head_reader().read(to_wire(1, tell)[0])


@pytest.mark.parametrize("piece", [PIECE_LEAST, 100_000, CHUNK])
def test_on_a_slow_link_pieces_are_smaller(piece):
    data = random.Random(0).randbytes(3 * CHUNK + 7)
    wire = to_wire(9, MESSAGES[1], [data], piece)
    assert len(wire) == -(-len(data) // piece) and all(sum(map(len, frames)) <= piece + 100 for frames in wire)
    reader = head_reader()
    reader.limit = 16 << 20
    said = [reader.read(frames) for frames in wire]
    assert said[:-1] == [None] * (len(wire) - 1) and bytes(said[-1][2][0]) == data
    with pytest.raises(ce.ProtocolError, match="does not follow"):
        reader.read([wire[0][0], b"x" * 1000])
