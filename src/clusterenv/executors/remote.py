"""The executor for workers on other machines; to the driver it looks like a local one.

The driver reads and writes rows and fragments in memory of this process; every request carries what its worker has to
read of them, every answer brings back what the worker wrote. Each machine pulls weights once.
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
from clusterenv.cluster.overview import NodeView, overview
from clusterenv.cluster.roster import ShardAssigned, ShardUnassigned
from clusterenv.code.missing import missing_package
from clusterenv.code.packages import pack
from clusterenv.engine.collecting.weights import Transfer
from clusterenv.engine.inputs import Cause, Exit, Placed, Stack, WeightsHeld, WeightsRefused, WeightsSent
from clusterenv.engine.requests import Request, Requests
from clusterenv.errors import PolicyError, ProtocolError, SpecError, StartError, UsageError
from clusterenv.events import emit
from clusterenv.executors.contract import Nodes, Printed, Processes, is_plain
from clusterenv.executors.envelopes import inputs_of, to_worker_of
from clusterenv.executors.output import OutputLog
from clusterenv.executors.remote_answers import RemoteAnswers
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.progress import PHASES
from clusterenv.memory.rows import Layout
from clusterenv.spec import Blueprint
from clusterenv.system import interrupts
from clusterenv.wire.channel import encode, encode_named
from clusterenv.wire.messages import (
    Answer,
    AssignShard,
    Code,
    Exited,
    Failed,
    Kill,
    Lacks,
    MapFragments,
    MapRows,
    Offer,
    Pull,
    StackTrace,
    Start,
    StepAll,
    SteppedAll,
    TraceStack,
)
from clusterenv.wire.requests import Close
from clusterenv.worker.setup import WorkerConfig

__all__ = ["RemoteExecutor"]

_STEP_S = 0.25
"""How long to wait for a whole step before checking for hangs."""
_SCHEDULER_S = 3.0
"""Time for a scheduler on top of `close`'s timeout: 8 s of the 10 that a user waits at most."""


def _pulled(pull: Pull, sent: int, now: float) -> WeightsSent | WeightsHeld | WeightsRefused:
    if pull.size > 0:
        return WeightsSent(pull.weights, sent)
    return WeightsHeld(pull.weights, now) if pull.size == 0 else WeightsRefused(pull.weights)


class RemoteExecutor:
    def __init__(
        self,
        head: Head,
        blueprint: Blueprint,
        requests: Requests,
        slots_of: list[list[int]],
        shard_of: list[int],
        config: WorkerConfig,
        stop: Any = None,
    ) -> None:
        self._head = head
        self._payload = blueprint.payload
        self._packages = {package.wanted.name: package for package in blueprint.packages}
        self._encode = encode_named if blueprint.is_named else encode
        self._slots_of = slots_of
        self._shard_of = shard_of
        self._workers = [[w for w, at in enumerate(shard_of) if at == shard] for shard in range(max(shard_of) + 1)]
        spec = blueprint.spec
        entry = spec.entry_point if spec is not None else None
        self._hosts = [
            AssignShard(
                shard,
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
            for shard, workers in enumerate(self._workers)
        ]
        self._stop = stop
        self._owner = os.getpid()
        self._placed = {shard for shard in range(len(self._workers)) if head.roster.holder(shard) is not None}
        self._hosted: set[int] = set()
        self._may_lack: set[int] = set()  # shards that may still request packages: once after each `AssignShard`
        self._running: set[int] = set()
        self._requests = requests
        self._answers = RemoteAnswers(requests, slots_of, self._workers, blueprint.is_vector, head.inbox.open_bytes)
        self._summed = (b"", 0)  # weights, and their checksum
        self._layouts: list[tuple[Any, bytes]] = []
        self._events: list[tuple[int, Any]] = []
        self._output = OutputLog(slots_of)
        interrupts.environments_opened(self)
        head.shard_events.clear()  # earlier ones are already in `_placed`
        head.progress.expect(shard_of, len(PHASES))

    # -- starting ---------------------------------------------------------------------------------------------

    @property
    def processes(self) -> Processes:
        return self

    @property
    def nodes(self) -> Nodes:
        return self

    def can_start(self, index: int) -> bool:
        return self._shard_of[index] in self._placed

    def start(self, index: int) -> None:
        shard = self._shard_of[index]
        if shard not in self._hosted:
            self._hosted.add(shard)
            node = self._head.roster.holder(shard)
            if node is not None:
                self._events.append((-1, Placed(shard, node, self._head.roster.session(node))))
            self._head.send(shard, self._hosts[shard], [self._payload])
            self._may_lack.add(shard)
            for kind, layout in self._layouts:
                self._head.send(shard, kind(shard), [layout])
        self._head.send(shard, Start(shard, index))
        self._running.add(index)

    def allocate(self, layout: Layout) -> bytearray:
        memory = self._answers.allocate(layout)
        self._announce(MapRows, layout)
        return memory

    def allocate_arena(self, layout: ArenaLayout) -> mmap.mmap:
        memory = self._answers.allocate_arena(layout)
        self._announce(MapFragments, layout)
        return memory

    def _announce(self, kind: Any, layout: Any) -> None:
        data = msgspec.msgpack.encode(layout)
        self._layouts = [entry for entry in self._layouts if entry[0] is not kind] + [(kind, data)]
        for shard in self._hosted:
            self._head.send(shard, kind(shard), [data])

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
        shard = self._shard_of[index]
        body = self._encode(message)  # first: a message that cannot be encoded must not be awaited
        if index not in self._running:
            return  # its `Exit` was already returned, and settles its requests
        if isinstance(message, Close):
            return  # a node closes its shards itself
        if request is not None:
            self._answers.expect(request)
        tell = to_worker_of(message, shard, index, self._slots_of[index])
        self._head.send(shard, tell, [body, *inputs_of(tell, self._answers.buffers)])

    def _send_step_all(self, request: int) -> None:
        for shard in self._hosted & self._placed:
            self._answers.expect_step(shard, self._running)
            self._head.send(shard, StepAll(shard, request), [self._answers.read_inputs(shard)])

    def step_all(self, number: int) -> tuple[int, list[tuple[int, Any]]] | None:
        """Make every worker step all its slots; see the contract. After anything unusual, `poll` returns everything."""
        self._send_step_all(number)
        workers = len(self._shard_of)
        deadline = time.monotonic() + _STEP_S
        while len(self._events) < workers and not interrupts.STATE.pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return 0, []
            self._collect(left_s)
        events = self._events
        if self._requests.count or len(events) != workers or not all(is_plain(said, number) for _, said in events):
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
        inbox, shards = self._head.inbox, self._head.shard_events
        while self._head.pulls:  # before the answers of workers that waited for weights
            self._events.append((-1, _pulled(*self._head.pulls.popleft())))
        while (said := inbox.next()) is not None:
            shard, message, frames = said
            if shard in self._placed:
                if isinstance(message, Failed):
                    self._failed(shard, message)
                    continue
                try:
                    self._open(shard, message, frames)
                except Exception as error:  # any failure here ends the sending node, never the head
                    self._head.shard_broke(shard, error)
        if self._head.output:
            self._show_output()
        if self._head.leaving:
            self._release()
        while shards:
            self._shard_changed(shards.popleft())

    def _show_output(self) -> None:
        for output in self._head.pop_output():
            if output.worker in self._workers[output.shard]:
                self._output.log(output.worker, Printed(output.text, output.dropped))

    def _release(self) -> None:
        """Release shards that are to move and have no fragment or call under way. A step under way is lost, as the next
        one would be."""
        for shard in self._head.leaving - self._answers.busy_shards():
            self._head.release(shard)

    def _shard_changed(self, change: ShardAssigned | ShardUnassigned) -> None:
        shard = change.shard
        if isinstance(change, ShardAssigned):
            self._placed.add(shard)
            return
        self._placed.discard(shard)
        self._hosted.discard(shard)
        self._events.append((-1, Placed(shard, None)))
        for worker in self._workers[shard]:
            if worker in self._running:
                if change.is_moved:
                    self._exited(worker, f"leaves node {change.node}: {change.reason}", "", Cause.MOVED)
                else:
                    reason = f"was on node {change.node}, which is gone: {change.reason}"
                    self._exited(worker, reason, "", Cause.NODE_LOST)

    def _open(self, shard: int, message: Any, frames: list[Any]) -> None:
        if isinstance(message, SteppedAll):
            self._heard(shard, self._answers.of_shard(shard, message, frames), frames)
        elif isinstance(message, Lacks):
            self._send_code(shard, set(message.packages))
        elif message.worker not in self._workers[shard]:
            raise ProtocolError(f"worker {message.worker} does not belong to shard {shard}")
        elif isinstance(message, Answer):
            self._heard(shard, self._answers.of_worker(message, frames), frames)
        elif isinstance(message, Exited):
            if message.worker in self._running:
                self._exited(message.worker, message.reason, message.tail)
        elif isinstance(message, StackTrace):
            self._events.append((message.worker, Stack(message.text)))

    def _heard(self, shard: int, replies: list[tuple[int, Any]] | None, frames: list[Any]) -> None:
        if replies is None:  # a duplicate, or its request is no longer open
            self._head.answered_nothing(shard, sum(map(len, frames)))
        else:
            self._events += replies

    def _failed(self, shard: int, failed: Failed) -> None:
        """Continue without a node that cannot run this shard; raise if too few others are left."""
        node = self._head.roster.holder(shard)
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

    def _send_code(self, shard: int, names: set[str]) -> None:
        """Send the files of these packages; only once, because packing takes time."""
        if shard not in self._may_lack or not names <= self._packages.keys():
            raise ProtocolError("a request for packages that were not offered, or were sent already")
        self._may_lack.discard(shard)
        packages = [self._packages[name] for name in sorted(names)]
        for package in packages:
            if package.unsendable:
                emit(
                    logging.WARNING,
                    f"node {self._head.roster.holder(shard)} cannot import {package.wanted.name!r} as it is in "
                    f"{package.wanted.folder}, and it cannot be sent because {package.unsendable}: the node uses its "
                    "own package of that name, if it has one",
                )
        self._head.send(shard, Code(shard), [pack(packages)])

    def _exited(self, worker: int, reason: str, tail: str, cause: Cause = Cause.CRASHED) -> None:
        self._running.discard(worker)
        self._answers.exited(worker)
        self._head.progress.forget(worker)
        self._events.append((worker, Exit(reason, tail, cause)))

    # -- watching and ending ----------------------------------------------------------------------------------

    def progress(self, index: int) -> tuple[int, int, int]:
        known = self._head.progress.of(index)
        return (-1, 0, 0) if known is None else known[1:]

    def stats(self) -> dict[str, Any]:
        return {**self._head.stats(), "output_lines_dropped": list(self._output.dropped)}

    def scale(self, nodes: int) -> None:
        most = len(self._workers)
        if not 1 <= nodes <= most:
            raise UsageError(
                f"scale(nodes={nodes}): between 1 and {most}; the backend's max_nodes sets the upper limit"
            )
        self._head.scale(nodes)

    def need_packages(self, names: tuple[str, ...]) -> None:
        wrong = self._head.need_packages(names)
        if wrong is not None:
            raise PolicyError(f"the policy cannot run on {wrong}")

    def overview(self) -> list[NodeView]:
        return overview(self._head)

    def log_tail(self, node: int) -> str:
        return self._head.job_log(node)

    def is_leaving(self, index: int) -> bool:
        return self._shard_of[index] in self._head.leaving

    def is_running(self, index: int) -> bool:
        return index in self._running

    def pid(self, index: int) -> int | None:
        known = self._head.progress.of(index)
        return (known[0] or None) if known else None

    def kill(self, index: int) -> None:
        shard = self._shard_of[index]
        self._head.send(shard, Kill(shard, index))

    def stack(self, index: int) -> None:
        shard = self._shard_of[index]
        self._head.send(shard, TraceStack(shard, index))

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._owner:
            return  # a fork of the head: the nodes belong to the parent
        deadline = time.monotonic() + timeout_s + _SCHEDULER_S
        self._answers.free()
        try:
            if self._stop is not None:
                self._stop(deadline)  # closes the head too
            else:
                self._head.close()
        finally:
            interrupts.environments_closed(self)
