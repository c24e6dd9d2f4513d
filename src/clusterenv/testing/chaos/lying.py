"""A node with a valid key that lies: a real agent process that alters its messages on request.

Run as a script, this file is that agent; it takes the options of `clusterenv node`. It behaves normally until a file in
the folder named by `CLUSTERENV_LIES` requests a lie (`ask_lie`), and again after that lie. `Lying` is a loopback
backend whose last node is such an agent.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clusterenv.backends.contract import Plan
from clusterenv.backends.loopback import AgentProcesses, Loopback
from clusterenv.node.agent import Agent
from clusterenv.testing.chaos import faults
from clusterenv.testing.chaos.faults import Kind
from clusterenv.testing.chaos.injector import Act
from clusterenv.transport.keys import Joining, await_joining
from clusterenv.wire.channel import plain
from clusterenv.wire.frames import to_wire
from clusterenv.wire.infos import Column
from clusterenv.wire.messages import Answer, AssignShard, Beat, Exited, Failed, Output, Pull, StackTrace, SteppedAll
from clusterenv.wire.requests import Acted, Built, DriftSamples, Fault, FragmentResult, Reply


@dataclass
class _Self:
    """Identity of this node: its shard, the shard's first worker, its slots, and a slot of another node."""

    shard: int = 0
    worker: int = 0
    slots: tuple[int, ...] = ()
    other: int = 0


ME = _Self()

__all__ = ["LIES", "Lying", "ask_lie", "lie_acts"]

VARIABLE = "CLUSTERENV_LIES"

Said = tuple[Any, Sequence[Any]]
Lie = Callable[[Any, list[Any]], list[Said] | None]
"""Returns what to send instead of a message and its frames; None if the lie does not apply to this message."""


# -- lies about answers -----------------------------------------------------------------------------------------


def _replace(message: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(message, **changes)


def _body(frames: Sequence[Any]) -> Any:
    return plain().unpack(bytes(frames[0]))


def _reply(change: Callable[[Any, Any], Any], kind: type = object) -> Lie:
    """Alter the plain data of an answer whose result is of this kind; add such data to a whole step."""

    def lie(message: Any, frames: list[Any]) -> list[Said] | None:
        if isinstance(message, Answer):
            if not len(frames[0]):
                return None
            reply = _body(frames)
            if not isinstance(reply, Reply) or (kind is not object and not isinstance(reply.result, kind)):
                return None
            return [(message, [plain().pack(change(message, reply)), *frames[1:]])]
        if isinstance(message, SteppedAll) and kind is object:
            reply = Reply(message.request, list(ME.slots), None)
            return [(_replace(message, workers=(ME.worker,)), [frames[0], plain().pack(change(message, reply))])]
        return None

    return lie


def _answers(change: Callable[[Answer, list[Any]], list[Said] | None]) -> Lie:
    """Alter answers that bring rows; a whole step is sent as such an answer."""

    def lie(message: Any, frames: list[Any]) -> list[Said] | None:
        if isinstance(message, SteppedAll):
            message, frames = Answer(message.shard, ME.worker, message.request, True, ME.slots), [b"", frames[0]]
        if isinstance(message, Answer) and len(frames) == 2:
            return change(message, frames)
        return None

    return lie


def _rows_of(frames: list[Any]) -> bytes:
    return bytes(frames[-1])


def _fragments(change: Callable[[FragmentResult, list[Any]], FragmentResult | None]) -> Lie:
    """Alter the result of a fragment, and its arrays in place."""

    def lie(message: Any, frames: list[Any]) -> list[Said] | None:
        if not isinstance(message, Answer) or len(frames) < 3:
            return None
        reply = _body(frames)
        arrays = [bytearray(frame) for frame in frames[1:]]
        result = change(reply.result, arrays)
        return [(message, [plain().pack(reply._replace(result=result)), *arrays])]

    return lie


def _packed(change: Callable[[bytes], bytes]) -> Lie:
    """Send something else in place of the observations of a fragment, as if it were packed."""

    def lie(message: Any, frames: list[Any]) -> list[Said] | None:
        if not isinstance(message, Answer) or len(frames) < 3:
            return None
        return [(_replace(message, packed=(len(frames) - 2,)), [*frames[:-1], change(bytes(frames[-1]))])]

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
    inner = {"deep": Column([ME.other], np.ones(1), "number", float)}
    return reply._replace(infos={"lie": Column([ME.slots[0]], inner, "dict")})


ANSWERS: dict[str, Lie] = {
    "the slots of an answer": _answers(lambda m, f: [(_replace(m, slots=(ME.other, *ME.slots[1:])), f)]),
    "a slot twice": _answers(lambda m, f: [(_replace(m, slots=ME.slots[:1] * len(ME.slots)), f)]),
    "no slots": _answers(lambda m, f: [(_replace(m, slots=()), [f[0], b""])]),
    "rows twice": _answers(lambda m, f: [(_replace(m, last=False), f), (m, f)]),
    "never the last": _answers(lambda m, f: [(_replace(m, last=False), f)]),
    "too few bytes": _answers(lambda m, f: [(m, [f[0], _rows_of(f)[1:]])]),
    "too many bytes": _answers(lambda m, f: [(m, [f[0], _rows_of(f) + b"0"])]),
    "no rows": _answers(lambda m, f: [(m, [f[0]])]),
    "flags that are not bools": _answers(lambda m, f: [(m, [f[0], _rows_of(f)[:16] + b"\7" * 4 + _rows_of(f)[20:]])]),
    "a worker of another node": _answers(lambda m, f: [(_replace(m, worker=0 if ME.worker else 1), f)]),
    "a worker that does not exist": _answers(lambda m, f: [(_replace(m, worker=-1), f)]),
    "objects of others": _reply(lambda m, r: r._replace(objects=[(ME.other, [1])])),
    "infos of others": _reply(lambda m, r: r._replace(infos={"lie": Column([ME.other], np.ones(1), "number", float)})),
    "nested infos of others": _reply(_nested),
    "infos of another length": _reply(
        lambda m, r: r._replace(infos={"a": Column(list(ME.slots[:2]), np.ones(1), "number", int)})
    ),
    "infos that are a number": _reply(lambda m, r: r._replace(infos=7)),
    "faults of others": _reply(lambda m, r: r._replace(faults=[_fault(ME.other)])),
    "faults of nobody": _reply(lambda m, r: r._replace(faults=[_fault(-1)])),
    "a fault twice": _reply(lambda m, r: r._replace(faults=[_fault(ME.slots[0])] * 2)),
    "a phase that does not exist": _reply(lambda m, r: r._replace(faults=[_fault(ME.slots[0], "sleep")])),
    "faults that are numbers": _reply(lambda m, r: r._replace(faults=[3])),
    "slots in the body": _reply(lambda m, r: r._replace(slots=[ME.other, 1])),
    "another request": _reply(lambda m, r: r._replace(request=r.request + 1)),
    "something else": _reply(lambda m, r: Built(r.request, None, None, {}, None, [], [])),
    "no struct": _reply(lambda m, r: [r.request]),
    "a result that nobody asked for": _reply(
        lambda m, r: r._replace(result=Acted([ME.other], np.zeros(1, np.int64), np.zeros(1, np.float32), 0))
    ),
    "workers of others in a step": lambda m, f: (
        [(_replace(m, workers=(0 if ME.worker else 1,)), [*f, b""])] if type(m) is SteppedAll else None
    ),
    "a frame less in a step": lambda m, f: [(_replace(m, workers=(ME.worker,)), f)] if type(m) is SteppedAll else None,
    "garbage in a step": lambda m, f: (
        [(_replace(m, workers=(ME.worker,)), [f[0], b"\1garbage"])] if type(m) is SteppedAll else None
    ),
}

ACTED: dict[str, Lie] = {
    "slots of others": _reply(
        lambda m, r: r._replace(result=r.result._replace(slots=[ME.other, *ME.slots[1:]])), Acted
    ),
    "fewer slots": _reply(lambda m, r: r._replace(result=r.result._replace(slots=list(ME.slots[:1]))), Acted),
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
    "garbage that is packed": _packed(lambda observations: b"garbage of some length"),
    "an array as it is that is packed": _packed(lambda observations: observations),
    "zeros without end": _packed(lambda observations: b"\1\xff\0\x21\0\0\0" + zlib.compress(bytes(200 << 20), 1)),
    "final observations that are packed garbage": _fragments(
        lambda r, a: r._replace(finals=r.finals._replace(leaves=[b"garbage of some length"]))
    ),
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


def _many(make: Callable[[], Any], count: int) -> Lie:
    return lambda m, f: [(make(), ())] * count


CONTROL: dict[str, Lie] = {
    "progress in an unknown phase": _many(lambda: Beat(((ME.worker, 1, ME.slots[0], 99, 0),)), 1),
    "progress without end": _many(lambda: Beat(tuple((w, 1, ME.slots[0], 1, 0) for w in range(50_000))), 1),
    "beats without end": _many(lambda: Beat(()), 300_000),
    "output without end": _many(lambda: Output(ME.shard, ME.worker, "x" * 400_000), 200),
    "stacks without end": _many(lambda: StackTrace(ME.shard, ME.worker, "x" * 400_000), 200),
    "exits without end": _many(lambda: Exited(ME.shard, ME.worker, "x" * 400_000, ""), 200),
    "pulls without end": _many(lambda: Pull(7, 0, 0), 200_000),
    "answers to nothing": _many(lambda: Answer(ME.shard, ME.worker, 1 << 30, True, ME.slots[:1]), 300_000),
    "its code cannot be loaded": _many(lambda: Failed(ME.shard, "a lie"), 1),
    "it cannot start its workers": _many(lambda: Failed(ME.shard, "a lie", is_code=False), 1),
}

LIES = {"answers": ANSWERS, "acted": ACTED, "fragments": FRAGMENTS, "calls": CALLS, "episodes": EPISODES}
LIES["control"] = CONTROL


FOR_GOOD = ("its code cannot be loaded", "it cannot start its workers")
"""Lies after which the head never uses the node again."""


def ask_lie(folder: Path, node: int, group: str, name: str) -> None:
    """Ask this node to tell this lie in place of the next message that it applies to."""
    request = folder / f"lie-{node}"
    request.with_suffix(".new").write_text(f"{group}/{name}")
    request.with_suffix(".new").rename(request)


def lie_acts(folder: Path, nodes: Sequence[int]) -> dict[Kind, Act]:
    """Return the function for the kind `LIE`: it asks one of these nodes, whose agents can lie, for a random lie."""

    def act(fault: faults.Fault) -> None:
        draw = random.Random(fault.random)
        group = draw.choice(["answers", "fragments", "control"])
        names = [name for name in LIES[group] if name not in FOR_GOOD]  # else a long run would run out of nodes
        ask_lie(folder, draw.choice(list(nodes)), group, draw.choice(names))

    return {Kind.LIE: act}


class LyingAgent(Agent):
    def __init__(self, folder: Path, joining: Joining, *args: Any) -> None:
        super().__init__(joining, *args)
        self._request = folder / f"lie-{joining.node}"

    def _host(self, host: AssignShard, payload: bytes) -> None:
        ME.shard, ME.worker = host.shard, host.workers[0][0]
        ME.slots = tuple(slot for _, its in host.workers for slot in its)
        ME.other = 0 if 0 not in ME.slots else max(ME.slots) + 1
        super()._host(host, payload)

    def _say(self, message: Any, payload: Sequence[Any] = ()) -> None:
        lies = None
        if ME.slots and self._request.exists():
            group, _, name = self._request.read_text().partition("/")
            lies = LIES[group][name](message, list(payload))
        if lies is None:
            super()._say(message, payload)
            return
        self._request.rename(self._request.with_suffix(".said"))
        assert self._socket is not None
        for said, frames in lies:  # bypasses the limits that an honest node keeps
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
        with self._log(node).open("ab") as log:
            self._agents[node] = subprocess.Popen(
                [sys.executable, __file__, "--join", str(self._plan.files[node]), *self._options],
                env={**os.environ, VARIABLE: str(self._lying.lies)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, deadline: float) -> None:
        for agent in self._agents.values():  # a flooding agent does not read the message that ends it
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(1.0)
            agent.kill()
        super().stop(deadline)


@dataclass(frozen=True)
class Lying(Loopback):
    """Nodes on this machine; the last one lies when `tell` asks it to. Its replacement is honest until asked again.

    Args:
        lies: folder for these requests.
    """

    lies: Path = field(kw_only=True)

    def tell(self, group: str, name: str) -> None:
        """Request this entry of `LIES`."""
        ask_lie(self.lies, self.nodes - 1, group, name)

    @property
    def has_lied(self) -> bool:
        return (self.lies / f"lie-{self.nodes - 1}.said").exists()

    def launch(self, plan: Plan) -> AgentProcesses:
        return _Jobs(plan, self)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", type=Path)
    parser.add_argument("--lease-s", type=float, default=60.0)
    parser.add_argument("--dead-after-s", type=float, default=10.0)
    options = parser.parse_args()
    joining = await_joining(options.join, 10.0, print)
    return LyingAgent(Path(os.environ[VARIABLE]), joining, options.lease_s, options.dead_after_s).run()


if __name__ == "__main__":
    sys.exit(main())
