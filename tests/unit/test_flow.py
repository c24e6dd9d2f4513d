"""What nodes say unasked is bounded: in its rate, and in what waits to be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterenv as ce
from clusterenv.cluster.flow import MESSAGE_BYTES, Flow
from clusterenv.cluster.inbox import Inbox, size_of
from clusterenv.cluster.output_queue import OutputQueue
from clusterenv.node.output import OutputLimit
from clusterenv.wire.frames import CONTROL_LIMIT
from clusterenv.wire.messages import Answer, Output


def test_a_flood_ends():
    flow = Flow(rate=1000, burst=10_000)
    sent = 0
    while flow.spend(100, now=5.0, read_all_at=5.0):
        sent += 1
    assert sent == (10_000 // (100 + MESSAGE_BYTES))
    assert not flow.spend(100, now=5.1, read_all_at=5.1)
    assert flow.spend(100, now=6.1, read_all_at=6.1), "after a second it may say more"


@given(st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 500)), min_size=1, max_size=20))
def test_whoever_keeps_to_the_rate_is_never_refused(said):
    """However long the head is held up in between: what waited meanwhile is read at once."""
    flow, now = Flow(rate=1000, burst=2000), 1.0
    for pause_s, size in said:
        read_all_at, now = now, now + pause_s
        for _ in range(int(pause_s * 1000 / (size + MESSAGE_BYTES))):
            assert flow.spend(size, now, read_all_at)


def answer(shard: int = 0) -> Answer:
    return Answer(shard, 0, 1, True, (0,))


def test_no_more_waits_than_was_asked_for():
    inbox = Inbox(2)
    inbox.open_bytes[0] = 10 << 20
    for _ in range(11):
        inbox.put(answer(), [bytes(1 << 20)])
    with pytest.raises(ce.ProtocolError, match="not read yet"):
        inbox.put(answer(), [bytes(2 << 20)])
    with pytest.raises(ce.ProtocolError, match="not read yet"):
        inbox.put(answer(1), [bytes(3 << 20)])
    assert inbox.next() is not None
    inbox.put(answer(), [bytes(1 << 20)])
    assert len(inbox) == 11


def test_output_that_nobody_reads_is_dropped_and_counted():
    queue = OutputQueue()
    for _ in range(100):
        queue.put(Output(0, 0, "x" * 100_000))
    kept = [message for message in queue.messages if message.text]
    assert 0 < sum(len(message.text) for message in kept) <= 4 << 20
    assert sum(message.dropped for message in queue.messages) == 100 - len(kept)


def test_a_node_that_had_to_leave_a_seat_may_finish_its_answer():
    inbox = Inbox(2)
    inbox.open_bytes[1] = 50 << 20
    assert inbox.limit(0, [1]) == (50 << 20) + CONTROL_LIMIT
    inbox.left(0, 1)
    inbox.open_bytes[1] = 0
    assert inbox.limit(0, []) == (50 << 20) + CONTROL_LIMIT
    inbox.joined(0)
    assert inbox.limit(0, [1]) == CONTROL_LIMIT


def test_a_node_passes_on_what_its_head_listens_to():
    limit, head, now = OutputLimit(rate=1 << 20, burst=4 << 20), Flow(), 1.0
    shown = left_out = 0
    for i in range(3000):
        now += 0.01
        output = Output(0, 0, "x" * 100_000)
        if limit.passes(output, now):
            text, _, note = output.text.partition("\n")
            shown += len(text)
            left_out += int(note.split()[0][1:]) if note else 0
            assert head.spend(size_of(output, []), now, now), f"message {i}"
    assert (shown + left_out) / 1e5 > 2980, "what is left out is counted"
    assert 30 << 20 < shown < 36 << 20


def test_a_line_without_end_is_shortened():
    output = Output(0, 0, "x" * (5 << 20))
    assert OutputLimit(rate=1 << 20, burst=4 << 20).passes(output, 1.0)
    assert len(output.text) < 300_000 and "left out" in output.text
