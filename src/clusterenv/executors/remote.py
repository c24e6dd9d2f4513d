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
from typing import Any

import msgspec

from clusterenv.cluster.head import Head
from clusterenv.cluster.roster import Seated, Unseated
from clusterenv.code.missing import missing_package
from clusterenv.code.packages import pack
from clusterenv.engine.inputs import Cause, Exit, Placed, Stack, WeightsHeld, WeightsRefused, WeightsSent
from clusterenv.engine.requests import Request
from clusterenv.engine.weights import Transfer
from clusterenv.errors import PolicyError, ProtocolError, SpecError, StartError, UsageError
from clusterenv.events import emit
from clusterenv.executors.contract import Nodes, Printed, Processes, is_plain
from clusterenv.executors.open_requests import OpenRequests
from clusterenv.executors.output import OutputLog
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.progress import PHASES
from clusterenv.memory.rows import Buffers, Layout
from clusterenv.memory.transfer import read_inputs
from clusterenv.spec import Blueprint
from clusterenv.system import interrupts
from clusterenv.wire.channel import encode, encode_named
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
    Pull,
    Ring,
    Rows,
    Rung,
    StackTrace,
    Start,
    Tell,
    TraceStack,
)
from clusterenv.wire.requests import Close, LoadWeights, Rebuild, Reset, RunFragment, Step
from clusterenv.worker.setup import WorkerConfig

__all__ = ["RemoteCrew", "inputs_of", "tell_of"]

_STEP_S = 0.25
"""How long a whole step is awaited before hangs are looked for."""
_SCHEDULER_S = 3.0
"""What a scheduler gets on top of `close`'s timeout: 8 s of the 10 that a user waits at most."""


def tell_of(message: Any, seat: int, worker: int, slots: list[int]) -> Tell:
    """How a message to a worker with these slots travels, and whose sides (and actions) go with it."""
    request = getattr(message, "request", None) or 0
    if isinstance(message, (Step, Reset, Rebuild)):
        actions = isinstance(message, Step) and message.actions is None and message.act is None
        return Tell(seat, worker, request, tuple(message.slots), actions)
    weights = message.number if isinstance(message, LoadWeights) else 0
    return Tell(seat, worker, request, tuple(slots) if isinstance(message, RunFragment) else (), False, weights)


def inputs_of(tell: Tell, buffers: Buffers | None) -> list[bytes]:
    """What the worker reads of the rows to do it."""
    return [read_inputs(buffers, tell.slots, tell.actions)] if tell.slots and buffers is not None else []


def _pulled(pull: Pull, sent: int, now: float) -> WeightsSent | WeightsHeld | WeightsRefused:
    if pull.size > 0:
        return WeightsSent(pull.weights, sent)
    return WeightsHeld(pull.weights, now) if pull.size == 0 else WeightsRefused(pull.weights)


class RemoteCrew:
    def __init__(
        self,
        head: Head,
        blueprint: Blueprint,
        slots_of: list[list[int]],
        seat_of: list[int],
        config: WorkerConfig,
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
                config.mode.value if config.mode else None,
                config.check,
                config.threads,
                config.preload,
                config.plain or "refuse",
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
        self._requests = OpenRequests(slots_of, self._workers, blueprint.is_vector, head.inbox.open_bytes)
        self._summed = (b"", 0)  # weights, and their checksum
        self._layouts: list[tuple[Any, bytes]] = []
        self._events: list[tuple[int, Any]] = []
        self._output = OutputLog(slots_of)
        interrupts.environments_opened(self)
        head.seat_events.clear()  # those before this moment are in `_seated`
        head.expect_workers(seat_of, len(PHASES))

    # -- starting ---------------------------------------------------------------------------------------------

    @property
    def processes(self) -> Processes:
        return self

    @property
    def nodes(self) -> Nodes:
        return self

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
        memory = self._requests.allocate(layout)
        self._announce(Rows, layout)
        return memory

    def allocate_arena(self, layout: ArenaLayout) -> mmap.mmap:
        memory = self._requests.allocate_arena(layout)
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
        if request is not None:
            self._requests.open(request)
        tell = tell_of(message, seat, index, self._slots_of[index])
        self._head.send(seat, tell, [body, *inputs_of(tell, self._requests.buffers)])

    def _ring(self, request: int) -> None:
        for seat in self._hosted & self._seated:
            self._requests.open_step(seat, request, self._running)
            self._head.send(seat, Ring(seat, request), [self._requests.read_inputs(seat)])

    def step_all(self, number: int) -> tuple[int, list[tuple[int, Any]]] | None:
        """Have every worker step all its slots; see the contract. Where anything is unusual, `poll` has all of it."""
        self._ring(number)
        workers = len(self._seat_of)
        deadline = time.monotonic() + _STEP_S
        while len(self._events) < workers and not interrupts.STATE.pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return 0, []
            self._collect(left_s)
        events = self._events
        if len(events) != workers or not all(is_plain(message, number) for _, message in events):
            return 0, []
        self._events = []
        heard = [event for event in events if event[1] != number]
        return (workers, heard) if heard else None

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        if not self._events:
            self._collect(timeout_s)
        events, self._events = self._events, []
        return events

    def _collect(self, timeout_s: float) -> None:
        self._head.pump(timeout_s)
        inbox, seats = self._head.inbox, self._head.seat_events
        while self._head.pulls:  # before the answers of workers that waited for weights
            self._events.append((-1, _pulled(*self._head.pulls.popleft())))
        while (said := inbox.next()) is not None:
            seat, message, frames = said
            if seat in self._seated:
                if isinstance(message, Failed):
                    self._failed(seat, message)
                    continue
                try:
                    self._open(seat, message, frames)
                except Exception as error:  # whatever a message leads to here ends its sender, never the head
                    self._head.seat_broke(seat, error)
        if self._head.output:
            self._show_output()
        if self._head.leaving:
            self._release()
        while seats:
            self._seat_changed(seats.popleft())

    def _show_output(self) -> None:
        for output in self._head.take_output():
            if output.worker in self._workers[output.seat]:
                self._output.log(output.worker, Printed(output.text, output.dropped))

    def _release(self) -> None:
        """Seats that are to change hands do so where no fragment is under way, nor a call. A step that is under way is
        lost, as the next one would be."""
        for seat in self._head.leaving - self._requests.busy_seats():
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
            self._heard(seat, self._requests.take_step(seat, message, frames), frames)
        elif isinstance(message, Lacks):
            self._send_code(seat, set(message.packages))
        elif message.worker not in self._workers[seat]:
            raise ProtocolError(f"worker {message.worker} is not of seat {seat}")
        elif isinstance(message, Answer):
            self._heard(seat, self._requests.take(message, frames), frames)
        elif isinstance(message, Exited):
            if message.worker in self._running:
                self._exited(message.worker, message.reason, message.tail)
        elif isinstance(message, StackTrace):
            self._events.append((message.worker, Stack(message.text)))

    def _heard(self, seat: int, replies: list[tuple[int, Any]] | None, frames: list[Any]) -> None:
        if replies is None:  # said twice, or of another time
            self._head.answered_nothing(seat, sum(map(len, frames)))
        else:
            self._events += replies

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

    def _exited(self, worker: int, reason: str, tail: str, cause: Cause = Cause.CRASHED) -> None:
        self._running.discard(worker)
        self._requests.exited(worker)
        self._head.progress.pop(worker, None)
        self._events.append((worker, Exit(reason, tail, cause)))

    # -- watching and ending ----------------------------------------------------------------------------------

    def progress(self, index: int) -> tuple[int, int, int]:
        known = self._head.progress.get(index)
        return (-1, 0, 0) if known is None else known[1:]

    def stats(self) -> dict[str, Any]:
        return {**self._head.stats(), "output_lines_dropped": list(self._output.dropped)}

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
        self._requests.free()
        try:
            if self._stop is not None:
                self._stop(deadline)  # the head as well
            else:
                self._head.close()
        finally:
            interrupts.environments_closed(self)
