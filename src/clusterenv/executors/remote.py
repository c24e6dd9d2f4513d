"""Workers on other machines, with the face of local ones: the pool does not know the difference.

The pool reads and writes rows and fragments in memory of this process; every request takes along what its worker has to
know of it, every answer brings back what the worker wrote. Weights are pulled by each machine once.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
import zlib
from typing import Any, Literal, NamedTuple

import msgspec
from gymnasium.vector import AutoresetMode

from clusterenv.cluster.checks import check_fragment, check_missing
from clusterenv.cluster.head import Head
from clusterenv.cluster.roster import Seated, Unseated
from clusterenv.code.missing import missing_package
from clusterenv.code.packages import pack
from clusterenv.engine.inputs import Cause, Exit, Placed, Stack, WeightsHeld, WeightsRefused, WeightsSent
from clusterenv.engine.requests import Request
from clusterenv.engine.weights import Transfer
from clusterenv.errors import PolicyError, ProtocolError, SpecError, StartError, UsageError
from clusterenv.events import emit, emit_output
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.memory.rows import Buffers, Layout
from clusterenv.memory.transfer import Block, read_inputs, write_fragment, write_rows
from clusterenv.spec import Blueprint
from clusterenv.wire.channel import encode, encode_named, plain
from clusterenv.wire.messages import (
    Answer,
    Code,
    Exited,
    Failed,
    Fragments,
    Host,
    Kill,
    Lacks,
    Offer,
    Output,
    Pull,
    Ring,
    Rows,
    Rung,
    StackTrace,
    Start,
    Tell,
    TraceStack,
)
from clusterenv.wire.requests import Built, Close, FragmentResult, LoadWeights, Rebuild, Reply, Reset, RunFragment, Step

__all__ = ["RemoteCrew", "inputs_of", "tell_of"]

_TAKE_S = 0.25
_SCHEDULER_S = 3.0
"""What a scheduler gets on top of `close`'s timeout: 8 s of the 10 that a user waits at most."""
_OVERHEAD = 64 << 20
"""Bytes that an answer may have beside its rows: infos, recorded frames."""


class _Asked(NamedTuple):
    """What an answer brings along."""

    brings: str
    side: int
    num_steps: int


_ROWS = _Asked("rows", 0, 0)


def tell_of(message: Any, seat: int, worker: int, slots: list[int]) -> Tell:
    """How a message to a worker with these slots travels, and what its answer brings."""
    request = getattr(message, "request", None) or 0
    if isinstance(message, (Step, Reset, Rebuild)):
        actions = isinstance(message, Step) and message.actions is None and message.act is None
        return Tell(seat, worker, request, tuple(message.slots), "rows", 0, 0, actions)
    if isinstance(message, RunFragment):
        return Tell(seat, worker, request, tuple(slots), "fragment", message.side, message.num_steps, False)
    weights = message.number if isinstance(message, LoadWeights) else 0
    return Tell(seat, worker, request, (), "nothing", 0, 0, False, weights)


def inputs_of(tell: Tell, buffers: Buffers | None) -> list[bytes]:
    """What the worker reads of the rows to do it."""
    return [read_inputs(buffers, tell.slots, tell.actions)] if tell.slots and buffers is not None else []


def _pulled(pull: Pull, sent: int, now: float) -> WeightsSent | WeightsHeld | WeightsRefused:
    if pull.size > 0:
        return WeightsSent(pull.weights, sent)
    return WeightsHeld(pull.weights, now) if pull.size == 0 else WeightsRefused(pull.weights)


class RemoteCrew:
    is_inline = False

    def __init__(
        self,
        head: Head,
        blueprint: Blueprint,
        slots_of: list[list[int]],
        seat_of: list[int],
        mode: AutoresetMode | None,
        check: bool,
        *,
        threads: int | None = 1,
        preload: tuple[str, ...] = (),
        other: Literal["refuse", "repr"] = "refuse",
        stop: Any = None,
    ) -> None:
        self._head = head
        self._payload = blueprint.payload
        self._packages = {package.wanted.name: package for package in blueprint.packages}
        self._encode = encode_named if blueprint.is_named else encode
        self._slots_of = slots_of
        self._seat_of = seat_of
        self._workers = [[w for w, at in enumerate(seat_of) if at == seat] for seat in range(max(seat_of) + 1)]
        spec = blueprint.spec
        entry = spec.entry_point if spec is not None else None
        self._hosts = [
            Host(
                seat,
                tuple((w, tuple(slots_of[w])) for w in workers),
                blueprint.num_envs,
                entry if isinstance(entry, str) else None,
                mode.value if mode else None,
                check,
                threads,
                preload,
                other,
                blueprint.is_named,
                tuple(package.wanted for package in blueprint.packages),
            )
            for seat, workers in enumerate(self._workers)
        ]
        self._stop = stop
        self._owner = os.getpid()
        self._seated = {seat for seat in range(len(self._workers)) if head.roster.holder(seat) is not None}
        self._hosted: set[int] = set()
        self._may_lack: set[int] = set()  # may still ask for packages: once after each `Host`
        self._running: set[int] = set()
        self._asked: dict[tuple[int, int], _Asked] = {}  # by (worker, request); what is not here is not listened to
        self._rung_at: dict[int, int] = {}  # seat → the whole step that it was asked for
        self._summed = (b"", 0)  # weights, and their checksum
        self._buffers: Buffers | None = None
        self._blocks: list[Block] = []  # per seat
        self._arena: Arena | None = None
        self._layouts: list[tuple[Any, bytes]] = []
        self._events: list[tuple[int, Any]] = []
        head.seat_events.clear()  # those before this moment are in `_seated`

    # -- starting ---------------------------------------------------------------------------------------------

    def can_start(self, index: int) -> bool:
        return self._seat_of[index] in self._seated

    def start(self, index: int) -> None:
        seat = self._seat_of[index]
        if seat not in self._hosted:
            self._hosted.add(seat)
            node = self._head.roster.holder(seat)
            if node is not None:
                self._events.append((-1, Placed(seat, node, self._head.roster.session(node))))
            self._head.send(seat, self._hosts[seat], [self._payload])
            self._may_lack.add(seat)
            for kind, layout in self._layouts:
                self._head.send(seat, kind(seat), [layout])
        self._head.send(seat, Start(seat, index))
        self._running.add(index)

    def allocate(self, layout: Layout) -> bytearray:
        memory = bytearray(layout.size)
        self._buffers = Buffers(layout, memory)
        slots = [[slot for worker in workers for slot in self._slots_of[worker]] for workers in self._workers]
        self._blocks = [Block(self._buffers, its) for its in slots]
        self._announce(Rows, layout)
        return memory

    def allocate_arena(self, layout: ArenaLayout) -> mmap.mmap:
        memory = mmap.mmap(-1, layout.size)
        self._arena = Arena(layout, memory)
        self._head.message_limit = layout.side_bytes + _OVERHEAD
        self._announce(Fragments, layout)
        return memory

    def _announce(self, kind: Any, layout: Any) -> None:
        data = msgspec.msgpack.encode(layout)
        self._layouts = [entry for entry in self._layouts if entry[0] is not kind] + [(kind, data)]
        for seat in self._hosted:
            self._head.send(seat, kind(seat), [data])

    def put_weights(self, transfer: Transfer) -> bool:
        weights, data = transfer.weights, transfer.data
        if data is not self._summed[0]:  # one snapshot goes to every node
            self._summed = (data, zlib.crc32(data))
        offer = Offer(
            weights.number,
            transfer.offset,
            len(data),
            self._summed[1],
            transfer.is_packed,
            weights.base if transfer.is_packed else 0,
            weights.keep,
        )
        self._head.offer(transfer.machine.node, transfer.machine.session, offer, data)
        return False

    # -- messages ---------------------------------------------------------------------------------------------

    def send(self, index: int, message: Any, request: Request | None = None) -> None:
        seat = self._seat_of[index]
        body = self._encode(message)  # first: what cannot travel must not be waited for
        if index not in self._running:
            return  # its `Exit` was handed out already, and settles what was asked of it
        if isinstance(message, Close):
            return  # a node closes its seats itself
        tell = tell_of(message, seat, index, self._slots_of[index])
        if tell.request:
            self._asked[index, tell.request] = _Asked(tell.brings, tell.side, tell.num_steps)
        self._head.send(seat, tell, [body, *inputs_of(tell, self._buffers)])

    def ring(self, request: int) -> None:
        for seat in self._hosted & self._seated:
            self._rung_at[seat] = request
            for worker in self._running.intersection(self._workers[seat]):
                self._asked[worker, request] = _ROWS
            self._head.send(seat, Ring(seat, request), [self._blocks[seat].read_inputs()])

    def take(self, index: int) -> list[Any]:
        deadline = time.monotonic() + _TAKE_S
        while self.is_running(index) and not any(worker == index for worker, _ in self._events):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._collect(left_s)
        mine = [message for worker, message in self._events if worker == index and not isinstance(message, Exit)]
        self._events = [event for event in self._events if event[0] != index or isinstance(event[1], Exit)]
        return mine

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        if not self._events:
            self._collect(timeout_s)
        events, self._events = self._events, []
        return events

    @property
    def _rows(self) -> Buffers:
        assert self._buffers is not None
        return self._buffers

    def _collect(self, timeout_s: float) -> None:
        self._head.pump(timeout_s)
        inbox, seats = self._head.inbox, self._head.seat_events
        while self._head.pulls:  # before the answers of workers that waited for weights
            self._events.append((-1, _pulled(*self._head.pulls.popleft())))
        while inbox:
            seat, message, frames = inbox.popleft()
            if seat in self._seated:
                try:
                    self._open(seat, message, frames)
                except ProtocolError as error:
                    node = self._head.roster.holder(seat)
                    if node is not None:
                        self._head.node_gone(node, f"it broke the protocol: {error}")
        if self._head.leaving:
            self._release()
        while seats:
            self._seat_changed(seats.popleft())

    def _release(self) -> None:
        """Seats that are to change hands do so where no fragment is under way, nor a call. A step that is under way is
        lost, as the next one would be."""
        busy = {self._seat_of[worker] for (worker, _), asked in self._asked.items() if asked.brings != "rows"}
        for seat in self._head.leaving - busy:
            self._head.release(seat)

    def _seat_changed(self, change: Seated | Unseated) -> None:
        seat = change.seat
        if isinstance(change, Seated):
            self._seated.add(seat)
            return
        self._seated.discard(seat)
        self._hosted.discard(seat)
        self._events.append((-1, Placed(seat, None)))
        for worker in self._workers[seat]:
            if worker in self._running:
                if change.is_moved:
                    self._exited(worker, f"leaves node {change.node}: {change.reason}", "", Cause.MOVED)
                else:
                    reason = f"was on node {change.node}, which is gone: {change.reason}"
                    self._exited(worker, reason, "", Cause.NODE_LOST)

    def _open(self, seat: int, message: Any, frames: list[Any]) -> None:
        if isinstance(message, Rung):
            self._rung(seat, message, frames)
        elif isinstance(message, Failed):
            self._failed(seat, message)
        elif isinstance(message, Lacks):
            self._send_code(seat, set(message.packages))
        elif message.worker not in self._workers[seat]:
            raise ProtocolError(f"worker {message.worker} is not of seat {seat}")
        elif isinstance(message, Answer):
            self._answer(message, frames)
        elif isinstance(message, Exited):
            if message.worker in self._running:
                self._exited(message.worker, message.reason, message.tail)
        elif isinstance(message, Output):
            self._print(message)
        elif isinstance(message, StackTrace):
            self._events.append((message.worker, Stack(message.text)))

    def _failed(self, seat: int, failed: Failed) -> None:
        """Go on without the node that cannot run this seat; raise where too few others are left."""
        node = self._head.roster.holder(seat)
        if node is None:
            return  # it is gone already
        error: SpecError | StartError
        if failed.is_code:
            advice = missing_package(failed.text, f"node {node}")
            text = f"the environments' code could not be loaded on node {node}{': ' * bool(advice)}{advice}"
            error = SpecError(f"{text}\n{failed.text}")
        else:
            text = f"node {node} cannot start its workers"
            error = StartError(f"{text}: {failed.text}")
        if not self._head.node_unfit(node, text, failed.text):
            raise error

    def _send_code(self, seat: int, names: set[str]) -> None:
        """Send the files of these packages: once, for packing them takes time."""
        if seat not in self._may_lack or not names <= self._packages.keys():
            raise ProtocolError("a request for packages that were not offered, or were sent already")
        self._may_lack.discard(seat)
        packages = [self._packages[name] for name in sorted(names)]
        for package in packages:
            if package.unsendable:
                emit(
                    logging.WARNING,
                    f"node {self._head.roster.holder(seat)} cannot import {package.wanted.name!r} as it is in "
                    f"{package.wanted.folder}, and it cannot be sent because {package.unsendable}: the node uses what "
                    "it has under that name, if anything",
                )
        self._head.send(seat, Code(seat), [pack(packages)])

    def _rung(self, seat: int, rung: Rung, frames: list[Any]) -> None:
        if self._rung_at.pop(seat, -1) != rung.request:
            return  # said twice, or of another time
        workers = self._workers[seat]
        for worker in workers:
            if self._asked.pop((worker, rung.request), None) is None:
                raise ProtocolError(f"a whole step of seat {seat}, whose worker {worker} had ended before")
        if len(frames) != 1 + len(rung.workers):
            raise ProtocolError("a whole step with frames missing")
        self._blocks[seat].write_rows(frames[0])
        bodies = dict(zip(rung.workers, frames[1:], strict=True))
        for worker in workers:
            said: Any = rung.request
            if worker in bodies:
                said = self._reply(bodies[worker], rung.request, worker)
            self._events.append((worker, said))

    def _answer(self, answer: Answer, frames: list[Any]) -> None:
        worker, request = answer.worker, answer.request
        if not frames or not set(answer.slots) <= set(self._slots_of[worker]):
            raise ProtocolError(f"an answer of worker {worker} about slots that it does not have")
        asked = self._asked.get((worker, request))
        if asked is None:
            return  # said twice, or of another time
        if answer.last:
            del self._asked[worker, request]
        if len(frames) != 1 if asked.brings == "nothing" else len(frames) < 2:
            raise ProtocolError(f"an answer of worker {worker} with {len(frames)} frames")
        if asked.brings == "fragment":
            slots, arena = self._slots_of[worker], self._arena
            assert arena is not None
            write_fragment(arena.sides[asked.side], slice(slots[0], slots[-1] + 1), asked.num_steps, frames[1:])
        elif asked.brings == "rows":
            write_rows(self._rows, answer.slots, frames[1])
        reply = self._reply(frames[0], request, worker) if len(frames[0]) else request
        if asked.brings == "fragment":
            if not isinstance(reply, Reply) or not isinstance(reply.result, FragmentResult):
                raise ProtocolError(f"worker {worker} answered a request for a fragment without its result")
            check_fragment(reply.result, asked.num_steps, len(self._slots_of[worker]), self._rows.layout.obs)
            check_missing(reply.infos)
        self._events.append((worker, reply))

    def _reply(self, body: Any, request: int, worker: int) -> Any:
        reply = plain().unpack(body)
        if not isinstance(reply, (Reply, Built)) or reply.request != request:
            raise ProtocolError("an answer that is none to what was asked")
        own = self._slots_of[worker]
        told = [*getattr(reply, "slots", ()), *(fault.slot for fault in reply.faults if fault.slot >= 0)]
        if not all(slot in own for slot in told):
            raise ProtocolError(f"an answer of worker {worker} about slots that it does not have")
        return reply

    def _exited(self, worker: int, reason: str, tail: str, cause: Cause = Cause.CRASHED) -> None:
        self._running.discard(worker)
        self._asked = {key: asked for key, asked in self._asked.items() if key[0] != worker}
        self._head.progress.pop(worker, None)
        self._events.append((worker, Exit(reason, tail, cause)))

    def _print(self, output: Output) -> None:
        slots = self._slots_of[output.worker]
        for line in output.text.split("\n"):
            mark, _, rest = line.removeprefix("\x00").partition("\x00")
            known = line.startswith("\x00") and mark.isdecimal()
            where = f"slot {mark}" if known else f"slots {slots[0]}-{slots[-1]}"
            emit_output(f"[{where}] {rest if line.startswith(chr(0)) else line}")

    # -- watching and ending ----------------------------------------------------------------------------------

    def progress(self, index: int) -> tuple[int, int, int]:
        known = self._head.progress.get(index)
        return (-1, 0, 0) if known is None else known[1:]

    def stats(self) -> dict[str, Any]:
        return self._head.stats()

    def scale(self, nodes: int) -> None:
        most = len(self._workers)
        if not 1 <= nodes <= most:
            raise UsageError(
                f"scale(nodes={nodes}): between 1 and {most}; the backend's max_nodes says how many there may be"
            )
        self._head.scale(nodes)

    def need_packages(self, names: tuple[str, ...]) -> None:
        wrong = self._head.need_packages(names)
        if wrong is not None:
            raise PolicyError(f"the policy cannot run on {wrong}")

    def is_leaving(self, index: int) -> bool:
        return self._seat_of[index] in self._head.leaving

    def is_running(self, index: int) -> bool:
        return index in self._running

    def pid(self, index: int) -> int | None:
        known = self._head.progress.get(index)
        return (known[0] or None) if known else None

    def kill(self, index: int) -> None:
        seat = self._seat_of[index]
        self._head.send(seat, Kill(seat, index))

    def stack(self, index: int) -> None:
        seat = self._seat_of[index]
        self._head.send(seat, TraceStack(seat, index))

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._owner:
            return  # a fork of the head: the nodes are the parent's
        deadline = time.monotonic() + timeout_s + _SCHEDULER_S
        self._buffers = self._arena = None
        self._blocks = []
        if self._stop is not None:
            self._stop(deadline)  # the head as well
        else:
            self._head.close()
