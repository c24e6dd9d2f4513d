"""What nodes say unasked is bounded: in its rate, and in what waits to be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterenv as ce
from clusterenv.cluster.flow import MESSAGE_BYTES, Flow
from clusterenv.cluster.inbox import Inbox, size_of
from clusterenv.cluster.output_queue import OutputQueue
from clusterenv.cluster.peers import Peer
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
    shown = dropped = 0
    for i in range(3000):
        now += 0.01
        output = Output(0, 0, "x" * 99_999 + "\n")
        if limit.passes(output, now):
            shown += 2
            dropped += output.dropped
            assert head.spend(size_of(output, []), now, now), f"message {i}"
    dropped += sum(output.dropped for output in limit.unreported())
    assert shown + dropped == 6000, "what is left out is counted, in lines"
    assert 30 << 20 < shown * 5e4 < 36 << 20


def test_what_a_node_left_out_at_the_end_is_reported_without_more_output():
    limit = OutputLimit(rate=1 << 20, burst=4 << 20)
    printed = [Output(shard, worker, "line\n" * 999 + "line") for shard, worker in [(0, 0), (0, 1), (1, 2)] * 1000]
    passed = [output for output in printed if limit.passes(output, 1.0)]
    reports = limit.unreported()
    assert all(not output.text for output in reports)
    for shard, worker in ((0, 0), (0, 1), (1, 2)):
        got = [output for output in passed + reports if (output.shard, output.worker) == (shard, worker)]
        assert sum(output.num_lines + output.dropped for output in got) == 1_000_000, "each has its own"
    assert limit.unreported() == [], "once"
    assert all(limit.passes(report, 1.0) for report in reports), "a report is no output"


def test_a_line_without_end_is_shortened():
    output, limit = Output(0, 0, "x" * (5 << 20) + "\nsecond"), OutputLimit(rate=1 << 20, burst=4 << 20)
    assert limit.passes(output, 1.0)
    assert len(output.text) < 300_000
    assert [(report.worker, report.dropped) for report in limit.unreported()] == [(0, 1)], "the first is there"


def test_a_report_without_lines_counts_none():
    queue = OutputQueue()
    for _ in range(10_000):
        queue.put(Output(0, 0, "line"))
    for _ in range(3):
        queue.put(Output(0, 0, "", 5))
    assert sum(message.dropped for message in queue.messages) == 15


def test_segments_of_an_unfinished_message_are_a_sign_of_life():
    peer = Peer(b"", (0, 0))
    segments_per_s = {5: True, 1: False}  # 7 kB/s; libzmq's pings, which come from an agent that hangs, too
    for rate, is_alive in segments_per_s.items():
        heard = [peer.is_sending(1000 * rate + int(rate * now), now) for now in range(100 * rate, 100 * rate + 30)]
        assert any(heard[5:]) == is_alive, rate
