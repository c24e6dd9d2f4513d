"""Mutated messages and answers: whatever comes raises ProtocolError or passes all checks; nothing is unpickled."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterenv as ce
from clusterenv.engine.answers import check, record
from clusterenv.engine.requests import Kind, Requests
from clusterenv.executors.remote_answers import RemoteAnswers
from clusterenv.wire import messages
from clusterenv.wire.channel import plain
from clusterenv.wire.frames import CHUNK, head_reader, node_reader, to_wire
from clusterenv.wire.infos import Column
from clusterenv.wire.requests import Step
from mutating import mutate_frames
from sample_answers import (
    ACTED,
    BOX,
    BUILT,
    EPISODES,
    FINE,
    INFOS,
    NUMBER,
    RESULT,
    ROWS,
    SLOTS,
    fault,
    good,
    rows,
)

pytestmark = [
    pytest.mark.guarantee(23),
    pytest.mark.filterwarnings("ignore"),  # of numpy and Gymnasium, on values that make no sense
]

FINALS, SAMPLES = RESULT.finals, RESULT.samples
SESSION = 5
ANSWERS = good()
EVIL = [pickle.dumps(print), pickle.dumps(np.zeros(2), 2), b"cos\nsystem\n(S'true'\ntR."]
SAID: list[tuple[Any, list[bytes]]] = [
    (messages.Hello(10, "0.1.0", "3.11", "1.2.0", "abc", "host", 7, 2, True, {"numpy": "2.0"}, ("zstd",)), []),
    (messages.Failed(0, "no module"), []),
    (messages.Lacks(0, ("mine", "other")), []),
    (messages.SteppedAll(1, NUMBER, (1,)), [rows(), plain().pack(FINE)]),
    (messages.Exited(0, 1, "killed by SIGKILL", "last words"), []),
    (messages.Output(0, 1, "a line", 3), []),
    (messages.StackTrace(0, 1, "a stack"), []),
    (messages.Beat(((0, 77, 1, 2, 3),)), []),
    (messages.Pull(3, 1 << 20, 1 << 19), []),
    (messages.Bye("preempted"), []),
    (messages.Answer(0, 1, NUMBER, True, tuple(SLOTS), (8,)), [b"body", b"packed"]),
    (messages.Answer(0, 1, NUMBER, True, tuple(SLOTS)), [random.Random(0).randbytes(2 * CHUNK + 5)]),
    *((messages.Answer(0, 1, NUMBER, last, tuple(slots)), frames) for _, _, slots, last, frames in ANSWERS.values()),
]
TOLD: list[tuple[Any, list[bytes]]] = [
    (messages.Welcome(SESSION, 1.0, 60.0), []),
    (messages.Refused("no", True), []),
    (messages.ToWorker(0, 1, NUMBER, (4, 5), True, 3), [b"body", b"inputs"]),
    (messages.StepAll(0, NUMBER), [b"inputs"]),
    (messages.Offer(3, 0, 100, 7, False, 0, True), []),
    (messages.Chunk(3, 0), [b"x" * 100]),
    (messages.Leave(-1, "the run is over"), []),
]


def wires(said: list[tuple[Any, list[bytes]]]) -> list[list[bytes]]:
    return [list(map(bytes, wire)) for message, load in said for wire in to_wire(SESSION, message, load)]


FROM_NODE, FROM_HEAD = wires(SAID), wires(TOLD)
PARTS = [frame[:300] for wire in (*FROM_NODE, *FROM_HEAD) for frame in wire] + EVIL


def read_all(make_reader: Any, valid: list[list[bytes]], rng: random.Random) -> None:
    """Read a few messages, some of them mutated, as they come over one connection."""
    reader = make_reader()
    reader.limit = 16 << 20
    for _ in range(rng.randint(1, 4)):
        frames = rng.choice(valid)
        if rng.randint(0, 3):
            frames = mutate_frames(frames, rng, PARTS)
        with contextlib.suppress(ce.ProtocolError):
            reader.read(frames)


@settings(max_examples=1000)
@given(st.randoms(use_true_random=False))
def test_mutated_frames_raise_protocol_error_only(rng):
    read_all(head_reader, FROM_NODE, rng)
    read_all(node_reader, FROM_HEAD, rng)


def check_mutated(name: str, rng: random.Random) -> None:
    """Check an answer of this kind with a mutated frame: it passes, or ProtocolError is raised."""
    frames = [bytes(frame) for frame in good()[name][-1]]
    if rng.randint(0, 9):
        changed = mutate_frames(frames, rng, PARTS)
    else:
        changed = [rng.choice(EVIL) if i == 0 or rng.randint(0, 1) else frame for i, frame in enumerate(frames)]
    request, known, slots, last, _ = good()[name]
    try:
        reply = check(request, known, slots, last, changed)
    except ce.ProtocolError:
        return
    for one in getattr(reply, "faults", ()):
        assert one.slot in [-1, *SLOTS]
    record(request, slots, reply, 0)


@settings(max_examples=1000)
@given(st.sampled_from(sorted(ANSWERS)), st.randoms(use_true_random=False))
def test_mutated_answers_raise_protocol_error_only(name, rng):
    check_mutated(name, rng)


@settings(max_examples=500)
@given(st.randoms(use_true_random=False))
def test_what_is_refused_leaves_the_rows_of_the_head_unchanged(rng):
    """From the frames of a connection to the memory that the user's rows are read from."""
    ledger = Requests([[0, 1, 2, 3], SLOTS, [7, 8, 9]])
    answers = RemoteAnswers(ledger, ledger.slots_of, [[0, 1], [2]], is_vector=False, open_bytes=[0, 0])
    memory = answers.allocate(ROWS)
    answers.expect(ledger.open(1, Kind.STEP, SLOTS, Step(NUMBER, SLOTS, None, None)))
    full = bytes(range(1, 1 + len(rows()) % 250)) * len(rows())
    data = [plain().pack(FINE), full[: len(rows())]]
    (wire,) = to_wire(SESSION, messages.Answer(0, 1, NUMBER, True, tuple(SLOTS)), data)
    before = bytes(memory)
    try:
        said = head_reader().read(mutate_frames([bytes(frame) for frame in wire], rng, PARTS))
        done = None
        if said is not None and isinstance(said[1], messages.Answer) and said[1].worker in (0, 1, 2):
            done = answers.of_worker(said[1], said[2])
    except ce.ProtocolError:
        done = None
    if done is None:
        assert bytes(memory) == before and not ledger.get(1, NUMBER).received_bytes


def test_mutated_messages_unpickle_import_and_run_nothing():
    script = """
import pickle, random, sys
import test_fuzzed as t
rng = random.Random(1)
for name in list(t.ANSWERS) * 5:  # lazy imports of numpy and Gymnasium
    t.check_mutated(name, rng)
    t.read_all(t.head_reader, t.FROM_NODE, rng)
seen, is_watching = set(), True
def hook(event, args):
    if is_watching and not event.startswith(("object.", "builtins.id", "gc.")):
        seen.add(event)
sys.addaudithook(hook)
for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"):
    setattr(pickle, name, None)
seen.clear()
for _ in range(1500):
    t.read_all(t.head_reader, t.FROM_NODE, rng)
for _ in range(50):
    for name in t.ANSWERS:
        t.check_mutated(name, rng)
is_watching = False
print(sorted(seen))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.stdout == "[]\n", ran.stdout + ran.stderr


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from([np.zeros(0), np.zeros((3, 4), np.float32), np.arange(3), np.uint64(7), np.array(["a"])]),
        st.sampled_from([FINE, RESULT, ACTED, BUILT, FINALS, fault(), *EPISODES, *INFOS.values(), SAMPLES, BOX]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Column, inner, inner, st.sampled_from(["dict", "number", "array", "object"]), inner),
    ),
    max_leaves=8,
)


@pytest.mark.guarantee(22)
@settings(max_examples=600)
@given(st.sampled_from(sorted(good())), st.data())
def test_any_field_may_be_a_lie(name, data):
    """Some field of an answer, however deep, is replaced; it passes, or ProtocolError is raised, and nothing else."""
    request, known, slots, last, frames = good()[name]
    if len(frames[0]):
        lie = _with_lie(plain().unpack(bytes(frames[0])), data)
        with contextlib.suppress(ce.NotPlainError):
            frames[0] = plain().pack(lie)
    if data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(frames) - 1))
        frames[i] = data.draw(st.one_of(st.binary(max_size=50), st.just(bytes(frames[i])[:-1])))
    header = data.draw(st.one_of(st.just(slots), st.lists(st.integers(-1, 9), max_size=4)))
    ending = data.draw(st.sampled_from([last, not last]))
    try:
        reply = check(request, known, header, ending, frames)
    except ce.ProtocolError:
        return
    assert set(header) <= set(SLOTS)
    for one in getattr(reply, "faults", ()):
        assert one.slot in [-1, *SLOTS]
    record(request, header, reply, 0)


def _with_lie(value: Any, data: Any) -> Any:
    fields = getattr(value, "_fields", None)
    if fields and data.draw(st.integers(0, 3)):
        name = data.draw(st.sampled_from(fields))
        return value._replace(**{name: _with_lie(getattr(value, name), data)})
    if isinstance(value, (list, tuple)) and value and not fields and data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(value) - 1))
        return type(value)(_with_lie(item, data) if j == i else item for j, item in enumerate(value))
    return data.draw(VALUES)
