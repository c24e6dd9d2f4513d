"""A node with a valid key that lies: a real agent process that alters what it says, once, when the test asks for it.

`Lying` is the backend: nodes on this machine over loopback, of which the last one lies. Run as a script, this file is
that node's agent. Its replacement is honest.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clusterenv.backends.contract import Plan
from clusterenv.backends.loopback import AgentProcesses, Loopback
from clusterenv.node.agent import Agent
from clusterenv.transport.keys import await_joining
from clusterenv.wire.channel import plain
from clusterenv.wire.frames import to_wire
from clusterenv.wire.infos import Column
from clusterenv.wire.messages import Answer, Beat, Exited, Failed, Output, Pull, StackTrace, SteppedAll
from clusterenv.wire.requests import Acted, Built, DriftSamples, Fault, FragmentResult, Reply

OTHERS = 0
"""A slot of another node."""

Said = tuple[Any, Sequence[Any]]
Lie = Callable[[Any, list[Any]], list[Said] | None]
"""What to say instead of a message and its frames; None: not about this message."""


# -- lies about answers -----------------------------------------------------------------------------------------


def _replace(message: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(message, **changes)


def _body(frames: Sequence[Any]) -> Any:
    return plain().unpack(bytes(frames[0]))


def _reply(change: Callable[[Answer, Reply], Any], kind: type = object) -> Lie:
    """Alter the plain data of an answer whose result is of this kind; of a whole step, add some."""

    def lie(message: Any, frames: list[Any]) -> list[Said] | None:
        if isinstance(message, Answer):
            if not len(frames[0]):
                return None
            reply = _body(frames)
            if not isinstance(reply, Reply) or (kind is not object and not isinstance(reply.result, kind)):
                return None
            return [(message, [plain().pack(change(message, reply)), *frames[1:]])]
        if isinstance(message, SteppedAll) and kind is object:
            reply = Reply(message.request, LIES_ABOUT, None)
            return [(_replace(message, workers=(1,)), [frames[0], plain().pack(change(message, reply))])]
        return None

    return lie


LIES_ABOUT = [2, 3]
"""The slots of the node that lies."""


def _answers(change: Callable[[Answer, list[Any]], list[Said] | None]) -> Lie:
    """Alter answers that bring rows; a whole step is said as one of them."""

    def lie(message: Any, frames: list[Any]) -> list[Said] | None:
        if isinstance(message, SteppedAll):
            message, frames = Answer(message.shard, 1, message.request, True, tuple(LIES_ABOUT)), [b"", frames[0]]
        if isinstance(message, Answer) and len(frames) == 2:
            return change(message, frames)
        return None

    return lie


def _rows_of(frames: list[Any]) -> bytes:
    return bytes(frames[-1])


def _fragments(change: Callable[[FragmentResult, list[Any]], FragmentResult]) -> Lie:
    """Alter the result of a fragment, and its arrays in place."""

    def lie(message: Any, frames: list[Any]) -> list[Said] | None:
        if not isinstance(message, Answer) or len(frames) < 3:
            return None
        reply = _body(frames)
        arrays = [bytearray(frame) for frame in frames[1:]]
        result = change(reply.result, arrays)
        return [(message, [plain().pack(reply._replace(result=result)), *arrays])]

    return lie


def _valid_again(result: FragmentResult, arrays: list[Any]) -> FragmentResult:
    arrays[5][0] = 0
    return result


def _ended_without_final(result: FragmentResult, arrays: list[Any]) -> FragmentResult:
    arrays[3][:] = bytes([1]) * len(arrays[3])
    return result


def _bool_of_seven(result: FragmentResult, arrays: list[Any]) -> FragmentResult:
    arrays[5][0] = 7
    return result


def _fault(slot: int, phase: str = "step") -> Fault:
    return Fault(slot, phase, "a lie", "", None, 0, 1)


def _nested(message: Any, reply: Reply) -> Reply:
    inner = {"deep": Column([OTHERS], np.ones(1), "number", float)}
    return reply._replace(infos={"lie": Column([2], inner, "dict")})


ANSWERS: dict[str, Lie] = {
    "the slots of an answer": _answers(lambda m, f: [(_replace(m, slots=(OTHERS, 3)), f)]),
    "a slot twice": _answers(lambda m, f: [(_replace(m, slots=(2, 2)), f)]),
    "no slots": _answers(lambda m, f: [(_replace(m, slots=()), [f[0], b""])]),
    "rows twice": _answers(lambda m, f: [(_replace(m, last=False), f), (m, f)]),
    "never the last": _answers(lambda m, f: [(_replace(m, last=False), f)]),
    "too few bytes": _answers(lambda m, f: [(m, [f[0], _rows_of(f)[1:]])]),
    "too many bytes": _answers(lambda m, f: [(m, [f[0], _rows_of(f) + b"0"])]),
    "no rows": _answers(lambda m, f: [(m, [f[0]])]),
    "flags that are not bools": _answers(lambda m, f: [(m, [f[0], _rows_of(f)[:16] + b"\7" * 4 + _rows_of(f)[20:]])]),
    "a worker of another node": _answers(lambda m, f: [(_replace(m, worker=0), f)]),
    "a worker that does not exist": _answers(lambda m, f: [(_replace(m, worker=-1), f)]),
    "objects of others": _reply(lambda m, r: r._replace(objects=[(OTHERS, [1])])),
    "infos of others": _reply(lambda m, r: r._replace(infos={"lie": Column([OTHERS], np.ones(1), "number", float)})),
    "nested infos of others": _reply(_nested),
    "infos of another length": _reply(lambda m, r: r._replace(infos={"a": Column([2, 3], np.ones(1), "number", int)})),
    "infos that are a number": _reply(lambda m, r: r._replace(infos=7)),
    "faults of others": _reply(lambda m, r: r._replace(faults=[_fault(OTHERS)])),
    "faults of nobody": _reply(lambda m, r: r._replace(faults=[_fault(-1)])),
    "a fault twice": _reply(lambda m, r: r._replace(faults=[_fault(2), _fault(2)])),
    "a phase that does not exist": _reply(lambda m, r: r._replace(faults=[_fault(2, "sleep")])),
    "faults that are numbers": _reply(lambda m, r: r._replace(faults=[3])),
    "slots in the body": _reply(lambda m, r: r._replace(slots=[OTHERS, 1])),
    "another request": _reply(lambda m, r: r._replace(request=r.request + 1)),
    "something else": _reply(lambda m, r: Built(r.request, None, None, {}, None, [], [])),
    "no struct": _reply(lambda m, r: [r.request]),
    "a result that nobody asked for": _reply(
        lambda m, r: r._replace(result=Acted([OTHERS], np.zeros(1, np.int64), np.zeros(1, np.float32), 0))
    ),
    "workers of others in a step": lambda m, f: (
        [(_replace(m, workers=(0,)), [*f, b""])] if type(m) is SteppedAll else None
    ),
    "a frame less in a step": lambda m, f: [(_replace(m, workers=(1,)), f)] if type(m) is SteppedAll else None,
    "garbage in a step": lambda m, f: (
        [(_replace(m, workers=(1,)), [f[0], b"\1garbage"])] if type(m) is SteppedAll else None
    ),
}

ACTED: dict[str, Lie] = {
    "slots of others": _reply(lambda m, r: r._replace(result=r.result._replace(slots=[OTHERS, 3])), Acted),
    "fewer slots": _reply(lambda m, r: r._replace(result=r.result._replace(slots=[2])), Acted),
    "actions of another shape": _reply(
        lambda m, r: r._replace(result=r.result._replace(actions=np.zeros((2, 3), np.int64))), Acted
    ),
    "a version past 64 bits": _reply(lambda m, r: r._replace(result=r.result._replace(version=2**80)), Acted),
    "nothing": _reply(lambda m, r: r._replace(result=None), Acted),
}

FRAGMENTS: dict[str, Lie] = {
    "valid again": _fragments(_valid_again),
    "ended without a final": _fragments(_ended_without_final),
    "flags that are not bools": _fragments(_bool_of_seven),
    "another version": _fragments(lambda r, a: r._replace(version=77)),
    "times that are not finite": _fragments(lambda r, a: r._replace(env_s=float("nan"))),
    "keys that nobody asked for": _fragments(lambda r, a: r._replace(infos={"lie": [(0, 0, 1)]})),
    "samples that are not finite": _fragments(
        lambda r, a: r._replace(
            samples=DriftSamples(np.zeros(1, np.uint8), np.zeros(1, np.uint8), np.full((1, 2), np.nan, np.float32))
        )
    ),
    "a state of another size": _fragments(lambda r, a: r._replace(initial_state=np.zeros((7, 3)))),
    "an episode's length past 64 bits": _fragments(lambda r, a: r._replace(episodes=[(0, 0, 1.0, 2**70, {})])),
    "no result": _fragments(lambda r, a: None),
}

CALLS: dict[str, Lie] = {
    "fewer results": _reply(lambda m, r: r._replace(result=r.result[:1]), list),
    "more results": _reply(lambda m, r: r._replace(result=[*r.result, 1]), list),
    "no results": _reply(lambda m, r: r._replace(result=None), list),
    "rows beside them": lambda m, f: [(m, [*f, b"rows"])] if type(m) is Answer and len(f) == 1 else None,
}

EPISODES: dict[str, Lie] = {
    "other episodes": _reply(lambda m, r: r._replace(result=[e._replace(number=99) for e in r.result]), list),
    "an episode twice": _reply(lambda m, r: r._replace(result=r.result[:1] * 2), list),
    "no episodes": _reply(lambda m, r: r._replace(result=[3] * len(r.result)), list),
    "frames that nobody asked for": _reply(
        lambda m, r: r._replace(result=[e._replace(frames=[1]) for e in r.result]), list
    ),
}


# -- lies beside answers ----------------------------------------------------------------------------------------


def _many(message: Any, count: int) -> Lie:
    return lambda m, f: [(message, ())] * count


CONTROL: dict[str, Lie] = {
    "progress in an unknown phase": _many(Beat(((1, 1, 2, 99, 0),)), 1),
    "progress without end": _many(Beat(tuple((w, 1, 2, 1, 0) for w in range(50_000))), 1),
    "beats without end": _many(Beat(()), 300_000),
    "output without end": _many(Output(1, 1, "x" * 400_000), 200),
    "stacks without end": _many(StackTrace(1, 1, "x" * 400_000), 200),
    "exits without end": _many(Exited(1, 1, "x" * 400_000, ""), 200),
    "pulls without end": _many(Pull(7, 0, 0), 200_000),
    "answers to nothing": _many(Answer(1, 1, 1 << 30, True, (2,)), 300_000),
    "its code cannot be loaded": _many(Failed(1, "a lie"), 1),
    "it cannot start its workers": _many(Failed(1, "a lie", is_code=False), 1),
}

LIES = {"answers": ANSWERS, "acted": ACTED, "fragments": FRAGMENTS, "calls": CALLS, "episodes": EPISODES}
LIES["control"] = CONTROL


class LyingAgent(Agent):
    def __init__(self, lie: Lie, flag: Path, *args: Any) -> None:
        super().__init__(*args)
        self._lie, self._flag = lie, flag
        self._done = flag.with_name("done")
        self._is_honest = self._done.exists()

    def _say(self, message: Any, payload: Sequence[Any] = ()) -> None:
        lies = None
        if not self._is_honest and self._flag.exists():
            lies = self._lie(message, list(payload))
        if lies is None:
            super()._say(message, payload)
            return
        self._is_honest = True
        self._done.touch()
        assert self._socket is not None
        for said, frames in lies:  # past whatever an honest node limits itself to
            for wire in to_wire(self._session, said, frames):
                self._socket.send(wire)


class _Jobs(AgentProcesses):
    """The last node's agent lies."""

    def __init__(self, plan: Plan, lying: Lying) -> None:
        super().__init__(plan, dead_after_s=10.0)
        self._lying = lying

    def start(self, node: int) -> None:
        if node < self._lying.nodes - 1:
            super().start(node)
            return
        what = [*self._lying.lie, str(self._lying.flag), str(self._plan.files[node]), str(self._plan.lease_s)]
        with (self._plan.folder / f"node-{node}.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                [sys.executable, __file__, *what],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, deadline: float) -> None:
        for agent in self._agents.values():  # one that floods does not hear that it is to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(1.0)
            agent.kill()
        super().stop(deadline)


@dataclass(frozen=True)
class Lying(Loopback):
    """Nodes of one worker each; the last one lies in this way once `tell()` was called."""

    lie: tuple[str, str] = field(kw_only=True)
    folder_of_lies: Path = field(kw_only=True)

    @property
    def flag(self) -> Path:
        return self.folder_of_lies / "lie"

    def tell(self) -> None:
        """From now on."""
        self.flag.touch()

    @property
    def was_told(self) -> bool:
        return (self.folder_of_lies / "done").exists()

    def launch(self, plan: Plan) -> AgentProcesses:
        return _Jobs(plan, self)


def main(group: str, name: str, flag: str, key: str, lease_s: str) -> int:
    joining = await_joining(Path(key), 10.0, print)
    return LyingAgent(LIES[group][name], Path(flag), joining, float(lease_s), max(10.0, float(lease_s))).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
