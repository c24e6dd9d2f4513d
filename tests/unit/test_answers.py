"""Answers of nodes are checked completely before anything of them is used; whatever is wrong is a ProtocolError."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.engine.answers import Known, check, check_step, limit_bytes, record
from clusterenv.engine.requests import Kind
from clusterenv.wire.infos import Column
from clusterenv.wire.parts import split
from clusterenv.wire.requests import (
    Build,
    Call,
    Finals,
    PlayedEpisode,
    Reply,
)
from sample_answers import (
    ACTED,
    BOX,
    BUILT,
    EPISODES,
    EVALUATE,
    FAILED,
    FINE,
    FRAGMENT,
    KNOWN,
    NUMBER,
    PARTIAL,
    POLICY,
    RESULT,
    SLOTS,
    STEPS,
    TEXTS,
    answer,
    asked,
    fault,
    flags,
    fragment_arrays,
    good,
    places,
    rows,
    step,
    unplayed,
)

pytestmark = pytest.mark.guarantee(22)


@pytest.mark.parametrize("name", good())
def test_what_workers_answer_passes(name):
    request, known, slots, last, frames = good()[name]
    reply = check(request, known, slots, last, frames)
    assert record(request, slots, reply, sum(map(len, frames))) is not None
    if last and name != "policy failed":
        assert not request.remaining
    assert sum(map(len, frames)) <= limit_bytes(request, known)


def refuse(request: Any, frames: list[Any], slots: Any = SLOTS, last: bool = True, known: Known = KNOWN) -> None:
    before = copy.deepcopy((request.remaining, request.parts, request.received_bytes))
    with pytest.raises(ce.ProtocolError):
        check(request, known, slots, last, frames)
    assert before == (request.remaining, request.parts, request.received_bytes), "nothing is noted of it"


@pytest.mark.parametrize(
    "change",
    [
        {"request": NUMBER + 1},
        {"request": True},
        {"slots": [4, 5]},
        {"slots": [4, 5, 7]},
        {"slots": None},
        {"last": False},
        {"last": 1},
        {"infos": [1]},
        {"infos": {"a": 1}},
        {"infos": {"a": Column([1], np.ones(1), "number", float)}},
        {"infos": {"a": Column([4, 5], np.ones(1), "number", float)}},
        {"infos": {"a": Column([5, 4], np.ones(2), "number", float)}},
        {"infos": {"a": Column([4, 4], np.ones(2), "number", float)}},
        {"infos": {"a": Column([4], np.ones(1), "number", None)}},
        {"infos": {"a": Column([4], np.ones(1), "number", int)}},
        {"infos": {"a": Column([4], np.ones((1, 1)), "number", float)}},
        {"infos": {"a": Column([4], np.array(1.0), "array")}},
        {"infos": {"a": Column([4], [1, 2], "object")}},
        {"infos": {"a": Column([4], {"b": Column([5], [1], "object")}, "dict")}},
        {"infos": {"a": Column([4], {"b": Column([4], {"c": Column([0], [1], "object")}, "dict")}, "dict")}},
        {"infos": {"a": Column([4], [1], "other")}},
        {"infos": {"a": Column("4", [1], "object")}},
        {"objects": [(4, [1])]},
        {"faults": [fault(3)]},
        {"faults": [fault(-1)]},
        {"faults": [fault(4), fault(4)]},
        {"faults": [fault(phase="sleep")]},
        {"faults": [fault(phase=3)]},
        {"faults": [fault(error=None)]},
        {"faults": [fault(traceback="x" * (2 << 20))]},
        {"faults": [fault(incarnation="1")]},
        {"faults": [fault(seed=[])]},
        {"faults": [4]},
        {"faults": None},
        {"faults": [fault(4)]},  # and an info of the same slot
        {"result": ACTED},
        {"result": RESULT},
        {"result": 3},
    ],
    ids=str,
)
def test_lies_about_rows(change):
    refuse(step(), answer(FINE._replace(**change), rows()))
    with pytest.raises(ce.ProtocolError):
        check_step(asked(Kind.STEP, NUMBER), KNOWN, answer(FINE._replace(**change))[0])


def test_lies_about_the_parts_of_an_answer():
    part = Reply(NUMBER, SLOTS[:2], last=False)
    refuse(step(), answer(part._replace(last=True), rows([1, 2])), SLOTS[:2], True)
    refuse(step(), answer(Reply(NUMBER, SLOTS, last=False), rows()), SLOTS, False)
    refuse(step(), answer(Reply(NUMBER, [], last=False), b""), [], False)
    refuse(step(), answer(Reply(NUMBER, []), b""), [], True)
    request = step()
    record(request, SLOTS[:2], check(request, KNOWN, SLOTS[:2], False, answer(part, rows([1, 2]))), 10)
    refuse(request, answer(part, rows([1, 2])), SLOTS[:2], False)
    refuse(request, answer(Reply(NUMBER, SLOTS), rows()), SLOTS, True)
    check(request, KNOWN, SLOTS[2:], True, answer(Reply(NUMBER, SLOTS[2:]), rows([1])))


@pytest.mark.parametrize("slots", [[4, 4], [5, 4], [4, 9], [-1], [0], [4, 5, 6, 7]], ids=str)
def test_slots_that_were_not_asked(slots):
    refuse(step(), answer(Reply(NUMBER, slots, last=False), rows(slots)), slots, False)


def test_bytes_that_are_not_of_the_layout():
    refuse(step(), answer(FINE, rows()[1:]))
    refuse(step(), answer(FINE, rows() + b"0"))
    refuse(step(), answer(FINE))
    refuse(step(), answer(FINE, rows(), b""))
    refuse(step(), [])
    refuse(step(), [b"", rows()])
    data = bytearray(rows())
    data[8 * 3] = 2
    refuse(step(), answer(FINE, bytes(data)))
    arrays = fragment_arrays()
    fragment = Reply(NUMBER, SLOTS, result=RESULT)
    refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(fragment, *arrays[:-1]))
    refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(fragment, *arrays[:-1], bytes(3)))
    refuse(asked(Kind.POLICY, POLICY), answer(Reply(NUMBER, []), b""), [])


def test_more_bytes_than_were_asked_for():
    call = asked(Kind.CALL, Call(NUMBER, SLOTS, "render", (), {}))
    call.received_bytes = limit_bytes(call, KNOWN) - 10
    refuse(call, answer(Reply(NUMBER, [], result=[1, 2, 3])), [])


def test_lies_about_objects():
    known = KNOWN._replace(rows=TEXTS)
    for objects in (
        None,
        [],
        [(4, ["a"])],
        [(4, ["a"]), (5, []), (6, ["a"])],
        [(s, ["a"]) for s in (3, 5, 6)],
        [4] * 3,
    ):
        refuse(step(), answer(Reply(NUMBER, SLOTS, None, objects), rows(SLOTS, TEXTS)), known=known)
    refuse(asked(Kind.STEP, NUMBER), [b"", rows(SLOTS, TEXTS)], known=known)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": [4, 5]},
        {"slots": [0, 5, 6]},
        {"actions": np.zeros(2, np.int64)},
        {"actions": np.zeros((3, 1))},
        {"actions": [0, 0, 0]},
        {"actions": np.array(["a", "b", "c"])},
        {"logprobs": np.zeros((3, 2), np.float32)},
        {"logprobs": None},
        {"version": 2**63},
        {"version": "3"},
    ],
    ids=str,
)
def test_lies_about_actions(change):
    refuse(step(True), answer(Reply(NUMBER, SLOTS, result=ACTED._replace(**change)), rows()))


def test_actions_that_are_missing():
    refuse(step(True), answer(Reply(NUMBER, SLOTS), rows()))
    refuse(step(True), answer(Reply(NUMBER, [], result=RESULT), b""), [])
    refuse(step(), answer(Reply(NUMBER, [], result=FAILED), b""), [])


FINALS, SAMPLES = RESULT.finals, RESULT.samples


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": 9},
        {"num_steps": True},
        {"num_steps": 3},  # rows after it are valid
        {"version": "3"},
        {"version": 4},
        {"env_s": -1.0},
        {"policy_s": float("inf")},
        {"pace_s": np.zeros(2, np.float32)},
        {"policy_error": ("one",)},
        {"policy_error": 3},
        {"not_sent": "x" * 2000},
        {"finals": FINALS._replace(t=places(0, 8, 5))},
        {"finals": FINALS._replace(columns=places(1, -1, 2))},
        {"finals": FINALS._replace(columns=places(0))},
        {"finals": FINALS._replace(t=places(0, 7, 5).astype(np.uint64))},
        {"finals": FINALS._replace(leaves=[np.zeros((3, 5), np.float32)])},
        {"finals": FINALS._replace(leaves=[np.zeros((3, 4))])},
        {"finals": FINALS._replace(leaves=[])},
        {"finals": FINALS._replace(t=places(0, 7, 7), columns=places(1, 0, 0))},  # one twice
        {"finals": FINALS._replace(t=places(0, 7, 4))},  # of an episode that goes on
        {"finals": Finals(places(0, 5), places(1, 2), [np.zeros((2, 4), np.float32)])},  # one is missing
        {"finals": Finals(None, None, [])},
        {"finals": None},
        {"samples": SAMPLES._replace(params=np.zeros((2, 2), np.float32))},
        {"samples": SAMPLES._replace(params=np.full((1, 2), np.nan, np.float32))},
        {"samples": SAMPLES._replace(t=np.zeros(1))},
        {"initial_state": np.zeros((2, 2))},
        {"initial_state": ("a",)},
        {"episodes": [(8, 0, 1.0, 1, {})]},
        {"episodes": [(0, 0, "1.0", 1, {})]},
        {"episodes": [(0, 0, 1.0, 2**70, {})]},
        {"episodes": [1]},
        {"infos": {"mask": [(0, 3, None)]}},
        {"infos": {"mask": 7}},
        {"infos": {"other": [(0, 0, None)]}},
    ],
    ids=str,
)
def test_lies_about_a_fragment(change):
    reply = Reply(NUMBER, SLOTS, result=RESULT._replace(**change))
    refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(reply, *fragment_arrays()))


@pytest.mark.parametrize("change", [(5, 6, 2, 1), (3, 2, 0, 1), (5, 0, 0, 2), (6, 0, 0, 9)], ids=str)
def test_lies_in_the_arrays_of_a_fragment(change):
    """A row is valid again, one has ended without its last observation, a flag is none."""
    arrays = fragment_arrays()
    which, t, k, value = change
    flags(arrays, which)[t, k] = value
    refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(Reply(NUMBER, SLOTS, result=RESULT), *arrays))


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ({}, 3),
        ({}, 5),
        ({}, STEPS),
        ({"num_steps": STEPS + 1}, STEPS + 1),
        ({"num_steps": -1}, 4),
        ({"episodes": [(4, 0, 1.0, 1, {})]}, 4),
        ({"infos": {"mask": [(4, 0, None)]}}, 4),
        ({"finals": Finals(places(4), places(0), [np.zeros((1, 4), np.float32)])}, 4),
        ({"samples": RESULT.samples._replace(t=np.array([5], np.uint8))}, 4),
    ],
    ids=str,
)
def test_lies_about_a_part_of_a_fragment(change, steps):
    """Arrays of other steps than it says are done, or something in steps that are not."""
    reply = Reply(NUMBER, SLOTS, result=PARTIAL._replace(**change))
    refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(reply, *unplayed(steps)))


def test_a_fragment_without_its_result():
    for result in (None, 3, ACTED):
        refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(Reply(NUMBER, SLOTS, result=result), *fragment_arrays()))
    refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(Reply(NUMBER, SLOTS, result=FAILED), *unplayed()))
    refuse(asked(Kind.FRAGMENT, FRAGMENT), answer(Reply(NUMBER, [], result=RESULT), *fragment_arrays()), [])


def test_results_in_parts():
    request = asked(Kind.CALL, Call(NUMBER, SLOTS, "render", (), {}))
    frames = [np.full(5 << 20, i, np.uint8) for i in range(3)]
    parts = list(split(Reply(NUMBER, [], result=frames)))
    assert [part.last for part in parts] == [False, True]
    for part in parts:
        reply = record(request, [], check(request, KNOWN, [], part.last, answer(part)), 0)
    assert [frame[0] for frame in reply.result] == [0, 1, 2]


def test_frames_in_parts():
    request = asked(Kind.CALL, EVALUATE)
    frames = [np.full(3 << 20, i, np.uint8) for i in range(10)]
    played = [PlayedEpisode(1, 1.5, 9, frames, {"won": True}, "no handle"), *EPISODES[1:]]
    parts = list(split(Reply(NUMBER, [], result=played)))
    assert len(parts) == 4
    for part in parts:
        reply = record(request, [], check(request, KNOWN, [], part.last, answer(part)), 0)
    assert [frame[0] for frame in reply.result[0].frames] == list(range(10))
    assert [part.result[0].info for part in parts[:-1]] == [{}, {}, {}], "it is sent once"
    assert reply.result[0]._replace(frames=None) == PlayedEpisode(1, 1.5, 9, None, {"won": True}, "no handle")
    assert reply.result[1:] == EPISODES[1:]


@pytest.mark.parametrize("results", [[], [1, 2], [1, 2, 3, 4], None, 7], ids=str)
def test_another_number_of_results(results):
    refuse(asked(Kind.CALL, Call(NUMBER, SLOTS, "render", (), {})), answer(Reply(NUMBER, [], result=results)), [])


@pytest.mark.parametrize(
    "episodes",
    [
        EPISODES[:2],
        [*EPISODES, EPISODES[0]],
        [*EPISODES[:2], EPISODES[2]._replace(number=2)],
        [EPISODES[0]._replace(frames=None), *EPISODES[1:]],
        [EPISODES[0]._replace(frames=[1]), *EPISODES[1:]],
        [EPISODES[0], EPISODES[1]._replace(frames=[1, 2, 3]), EPISODES[2]],
        [EPISODES[0], EPISODES[1]._replace(length=2**70), EPISODES[2]],
        [EPISODES[0], EPISODES[1]._replace(total=1), EPISODES[2]],
        [EPISODES[0], EPISODES[1]._replace(info=[("won", True)]), EPISODES[2]],
        [EPISODES[0], EPISODES[1]._replace(info=None), EPISODES[2]],
        [EPISODES[0], EPISODES[1]._replace(not_sent="x" * 2000), EPISODES[2]],
        [EPISODES[0], EPISODES[1]._replace(not_sent=None), EPISODES[2]],
        [1, 2, 3],
    ],
    ids=str,
)
def test_lies_about_episodes(episodes):
    refuse(asked(Kind.CALL, EVALUATE), answer(Reply(NUMBER, [], result=episodes)), [])


@pytest.mark.parametrize(
    "change",
    [
        {"request": 3},
        {"metadata": None},
        {"render_mode": 3},
        {"observation_space": np.zeros(3)},
        {"others": [(1, BOX, BOX)]},
        {"others": [(4, BOX)]},
        {"others": [(4, BOX, np.zeros(3))]},
        {"others": 4},
        {"faults": [fault(1)]},
    ],
    ids=str,
)
def test_lies_about_what_was_built(change):
    request = asked(Kind.BUILD, Build(NUMBER, SLOTS, [1, 2, 3]))
    refuse(request, answer(BUILT._replace(**change)), [], known=Known(SLOTS))
    refuse(request, answer(Reply(NUMBER, [])), [], known=Known(SLOTS))


def test_a_header_that_does_not_fit_what_was_built():
    request = asked(Kind.BUILD, Build(NUMBER, SLOTS, [1, 2, 3]))
    refuse(request, answer(BUILT), [0], known=Known(SLOTS))
    refuse(request, answer(BUILT), [], False, known=Known(SLOTS))
