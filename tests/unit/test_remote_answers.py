"""Answers from other machines are read against the entries of the request ledger, and against nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from clusterenv.engine.requests import Kind, Requests
from clusterenv.errors import ProtocolError
from clusterenv.executors.remote_answers import RemoteAnswers
from clusterenv.memory.rows import make_layout
from clusterenv.memory.transfer import row_bytes
from clusterenv.wire.channel import plain
from clusterenv.wire.messages import Answer, SteppedAll
from clusterenv.wire.requests import Call, Reply

SLOTS_OF = [[0, 1], [2, 3], [4, 5]]
SHARDS = [[0, 1], [2]]
LAYOUT = make_layout(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), 6)
STEP = 7


def rows(count: int) -> bytes:
    return bytes(row_bytes(LAYOUT) * count)


def of_worker(worker: int, number: int = STEP) -> tuple[Answer, list[Any]]:
    return Answer(worker // 2, worker, number, True, tuple(SLOTS_OF[worker])), [b"", rows(2)]


@pytest.fixture
def ledger():
    return Requests(SLOTS_OF)


@pytest.fixture
def answers(ledger):
    answers = RemoteAnswers(ledger, SLOTS_OF, SHARDS, is_vector=False, open_bytes=[0, 0])
    answers.allocate(LAYOUT)
    return answers


def ask_step(ledger: Requests, answers: RemoteAnswers) -> None:
    ledger.number = ledger.step_all = STEP
    for shard in range(len(SHARDS)):
        answers.expect_step(shard, {0, 1, 2})


def test_a_step_that_is_answered_as_usual_leaves_no_entry(ledger, answers):
    ask_step(ledger, answers)
    assert all(answers._open_bytes)
    assert answers.of_shard(0, SteppedAll(0, STEP, ()), [rows(4)]) == [(0, STEP), (1, STEP)]
    assert answers.of_shard(1, SteppedAll(1, STEP, ()), [rows(2)]) == [(2, STEP)]
    assert not ledger.count and answers._open_bytes == [0, 0]


def test_a_shard_that_has_answered_is_not_read_again(ledger, answers):
    ask_step(ledger, answers)
    answers.of_shard(0, SteppedAll(0, STEP, ()), [rows(4)])
    for worker in range(3):
        ledger.open_step(worker)  # another shard is late: the step spills
    assert answers.of_shard(0, SteppedAll(0, STEP, ()), [rows(4)]) is None
    assert answers.of_worker(*of_worker(0)) is None
    assert answers.of_shard(1, SteppedAll(1, STEP - 1, ()), [rows(2)]) is None


def test_workers_that_answer_one_by_one_are_checked_against_the_ledgers_entries(ledger, answers):
    ask_step(ledger, answers)
    assert answers.of_worker(*of_worker(0)) == [(0, STEP)]
    entries = [ledger.get(worker, STEP) for worker in range(3)]
    assert entries[2] is None, "the other shard still owes one answer for all"
    assert not entries[0].remaining and entries[1].remaining == {2, 3}
    assert answers.of_worker(*of_worker(0)) is None, "once is enough"
    assert answers.of_shard(0, SteppedAll(0, STEP, ()), [rows(4)]) is None
    assert ledger.open_step(0) is entries[0], "a step that spills opens no second one"
    assert answers.of_worker(*of_worker(1)) == [(1, STEP)]
    assert ledger.count == 2 and answers._open_bytes[0] == 0 < answers._open_bytes[1]


def test_infos_of_a_whole_step_are_checked_against_its_number(ledger, answers):
    ask_step(ledger, answers)
    late = plain().pack(Reply(STEP - 1, [4, 5]))
    with pytest.raises(ProtocolError, match="the number of another request"):
        answers.of_shard(1, SteppedAll(1, STEP, (2,)), [rows(2), late])
    said = plain().pack(Reply(STEP, [4, 5]))
    assert answers.of_shard(1, SteppedAll(1, STEP, (2,)), [rows(2), said]) == [(2, Reply(STEP, [4, 5]))]


def test_a_worker_that_is_gone_answers_nothing(ledger, answers):
    ask_step(ledger, answers)
    answers.exited(0)
    assert answers.of_worker(*of_worker(0)) is None
    assert answers.of_worker(*of_worker(1)) == [(1, STEP)], "the others of its shard answer one by one"
    assert answers._open_bytes[0] == 0


def test_what_the_ledger_closed_is_not_answered(ledger, answers):
    message = Call(3, [4, 5], "render", (), {})
    request = ledger.open(2, Kind.CALL, [4, 5], message)
    answer = Answer(1, 2, 3, True, ()), [plain().pack(Reply(3, [], result=[1, 2]))]
    assert answers.of_worker(*answer) is None, "it was not sent yet"
    assert not answers.busy_shards()
    answers.expect(request)
    assert answers.busy_shards() == {1}
    ledger.close(request)
    assert answers.of_worker(*answer) is None and not answers.busy_shards()
