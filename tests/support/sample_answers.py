"""Answers that nodes give, of each kind, with the requests that they answer; for tests of how they are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from clusterenv.engine.answers import Known
from clusterenv.engine.requests import Kind, Requests
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.rows import leaves_of, make_layout
from clusterenv.memory.transfer import fragment_sizes, row_bytes
from clusterenv.wire.channel import plain
from clusterenv.wire.infos import pack
from clusterenv.wire.requests import (
    Act,
    Acted,
    Build,
    Built,
    Call,
    DriftSamples,
    Evaluate,
    Fault,
    Finals,
    FragmentResult,
    LoadWeights,
    PlayedEpisode,
    Rebuild,
    Reply,
    Reset,
    RunFragment,
    SetAttr,
    SetPolicy,
    Step,
)

SLOTS = [4, 5, 6]
STEPS = 8
BOX, DISCRETE = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)
ROWS = make_layout(BOX, DISCRETE, 10)
TEXTS = make_layout(spaces.Dict(a=BOX, b=spaces.Text(5)), DISCRETE, 10)
ARENA = ArenaLayout(16, 10, ROWS.obs, leaves_of(DISCRETE)[0], 2)
KNOWN = Known(SLOTS, ROWS, ARENA)
NUMBER = 7
POLICY = SetPolicy(NUMBER, b"", None, None, 0, ())


def asked(kind: Kind, message: Any, slots: list[int] = SLOTS) -> Any:
    ledger = Requests([[], slots])
    if isinstance(message, int):
        ledger.step_all = message
        return ledger.open_step(1)
    request = ledger.open(1, kind, slots, message)
    if kind is Kind.FRAGMENT:
        request.version, request.info_keys = 3, ("mask",)
    return request


def step(act: bool = False) -> Any:
    return asked(Kind.STEP, Step(NUMBER, SLOTS, None, Act({}, [0, 0, 0]) if act else None))


def rows(slots: Any = SLOTS, layout: Any = ROWS) -> bytes:
    return bytes(row_bytes(layout) * len(slots))


def answer(reply: Any, *more: Any) -> list[Any]:
    return [plain().pack(reply), *more]


def fault(slot: int = 4, **changes: Any) -> Fault:
    return Fault(slot, "step", "ValueError: no", "...", 1, 0, 3)._replace(**changes)


ACTED = Acted(SLOTS, np.zeros(3, np.int64), np.zeros(3, np.float32), 3)
INFOS = pack([(4, {"a": 1, "d": {"x": np.ones(2), "e": {"t": "text"}}}), (6, {"a": 2, "b": None})])
FINE = Reply(NUMBER, SLOTS, INFOS)


def fragment_arrays() -> list[bytearray]:
    arrays = [bytearray(size) for size in fragment_sizes(ARENA, len(SLOTS), STEPS)]
    flags(arrays, 5)[:] = 1
    for t, k in ((0, 1), (7, 0)):
        flags(arrays, 3)[t, k] = 1
    flags(arrays, 5)[5:, 2] = 0
    flags(arrays, 4)[5, 2] = 1
    return arrays


def unplayed(steps: int = 0) -> list[bytes]:
    """The arrays of a fragment of which so many steps are done, none of them valid."""
    return [bytes(size) for size in fragment_sizes(ARENA, len(SLOTS), steps)]


def flags(arrays: list[bytearray], i: int) -> Any:
    return np.frombuffer(arrays[i], np.uint8).reshape(STEPS, len(SLOTS))


def places(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


RESULT = FragmentResult(
    STEPS,
    3,
    Finals(places(0, 7, 5), places(1, 0, 2), [np.zeros((3, 4), np.float32)]),
    [(3, 1, 2.5, 10, {"won": True})],
    {"mask": [(0, 0, None)]},
    (np.zeros((3, 2), np.float32), {"c": np.zeros((3, 1))}),
    None,
    DriftSamples(np.array([1], np.uint8), np.array([1], np.uint8), np.zeros((1, 2), np.float32)),
    0.1,
    0.2,
    np.zeros(3, np.float32),
)
PARTIAL = RESULT._replace(
    num_steps=4,
    finals=Finals(places(), places(), [np.zeros((0, 4), np.float32)]),
    samples=RESULT.samples._replace(t=np.array([4], np.uint8)),  # of the step that was not finished
)
FAILED = FragmentResult(0, -1, Finals(None, None, []), [], {}, None, ("no", "..."), None, 0.0, 0.0)
FRAGMENT = RunFragment(NUMBER, STEPS, 0, {}, [0, 0, 0])
EVALUATE = Evaluate(NUMBER, [1, 4, 7], 0, True, 2, {}, [], 0)
EPISODES = [
    PlayedEpisode(1, 1.0, 2, [1, 2, 3]),
    PlayedEpisode(4, 1.0, 2, None),
    PlayedEpisode(7, 0.5, 9, None, {"won": True}),
]
BUILT = Built(NUMBER, BOX, DISCRETE, {"render_modes": []}, None, [(5, DISCRETE, BOX)], [])


def good() -> dict[str, tuple[Any, Known, list[int], bool, list[Any]]]:
    """An answer of each kind: request, what is known, header, frames."""
    texts = KNOWN._replace(rows=TEXTS)
    objects = [(slot, ["abc"]) for slot in SLOTS]
    call, attribute = Call(NUMBER, SLOTS, "render", (), {}), SetAttr(NUMBER, SLOTS, "a", [1, 2, 3])
    reset, rebuild = Reset(NUMBER, SLOTS, [None] * 3, None), Rebuild(NUMBER, SLOTS, [1] * 3, [1] * 3, None, [[]] * 3)
    return {
        "step": (step(), KNOWN, SLOTS, True, answer(FINE, rows())),
        "first part": (step(), KNOWN, SLOTS[:2], False, answer(Reply(NUMBER, SLOTS[:2], last=False), rows([1, 2]))),
        "whole step": (asked(Kind.STEP, NUMBER), KNOWN, SLOTS, True, [b"", rows()]),
        "whole step with infos": (asked(Kind.STEP, NUMBER), KNOWN, SLOTS, True, answer(FINE, rows())),
        "faults": (step(), KNOWN, SLOTS, True, answer(Reply(NUMBER, SLOTS, faults=[fault(), fault(6)]), rows())),
        "objects": (step(), texts, SLOTS, True, answer(Reply(NUMBER, SLOTS, None, objects), rows(SLOTS, TEXTS))),
        "acted": (step(True), KNOWN, SLOTS, True, answer(Reply(NUMBER, SLOTS, result=ACTED), rows())),
        "policy failed": (step(True), KNOWN, [], True, answer(Reply(NUMBER, [], result=FAILED), b"")),
        "reset": (asked(Kind.RESET, reset), KNOWN, SLOTS, True, answer(Reply(NUMBER, SLOTS), rows())),
        "rebuild": (asked(Kind.REBUILD, rebuild), KNOWN, SLOTS, True, answer(Reply(NUMBER, SLOTS), rows())),
        "call": (asked(Kind.CALL, call), KNOWN, [], True, answer(Reply(NUMBER, [], result=[1, "b", None]))),
        "call failed": (asked(Kind.CALL, call), KNOWN, [], True, answer(Reply(NUMBER, [], faults=[fault(-1)]))),
        "set_attr": (asked(Kind.CALL, attribute), KNOWN, [], True, answer(Reply(NUMBER, [], result=[]))),
        "evaluate": (asked(Kind.CALL, EVALUATE), KNOWN, [], True, answer(Reply(NUMBER, [], result=EPISODES))),
        "policy": (asked(Kind.POLICY, POLICY), KNOWN, [], True, answer(Reply(NUMBER, []))),
        "bad policy": (asked(Kind.POLICY, POLICY), KNOWN, [], True, answer(Reply(NUMBER, [], result=FAILED))),
        "weights": (asked(Kind.POLICY, LoadWeights(NUMBER, 3, 0, 9)), KNOWN, [], True, answer(Reply(NUMBER, []))),
        "built": (asked(Kind.BUILD, Build(NUMBER, SLOTS, [1, 2, 3])), Known(SLOTS), [], True, answer(BUILT)),
        "fragment": (
            asked(Kind.FRAGMENT, FRAGMENT),
            KNOWN,
            SLOTS,
            True,
            answer(Reply(NUMBER, SLOTS, result=RESULT), *fragment_arrays()),
        ),
        "no policy": (
            asked(Kind.FRAGMENT, FRAGMENT),
            KNOWN,
            [],
            True,
            answer(Reply(NUMBER, [], result=FAILED), *unplayed()),
        ),
        "part of a fragment": (
            asked(Kind.FRAGMENT, FRAGMENT),
            KNOWN,
            SLOTS,
            True,
            answer(Reply(NUMBER, SLOTS, result=PARTIAL), *unplayed(4)),
        ),
        "policy failed in a fragment": (
            asked(Kind.FRAGMENT, FRAGMENT),
            KNOWN,
            SLOTS,
            True,
            answer(Reply(NUMBER, SLOTS, result=PARTIAL._replace(policy_error=("no", "..."))), *unplayed(4)),
        ),
    }
