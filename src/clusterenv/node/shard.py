"""Run a shard on a node: the workers of one part of the run. No socket, no user code.

The node agent calls `handle` with the head's messages, and `take` when workers have answered; messages to the head
leave by `send`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from gymnasium.vector import AutoresetMode

from clusterenv.engine.inputs import Exit, Stack
from clusterenv.errors import ClusterEnvError, ProtocolError
from clusterenv.executors.contract import Printed
from clusterenv.executors.worker_processes import WorkerProcesses
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.memory.progress import LINK, STOP
from clusterenv.memory.rows import Buffers, Layout
from clusterenv.memory.transfer import Block, read_fragment, read_rows, write_inputs
from clusterenv.node.weight_store import WeightStore
from clusterenv.spec import Blueprint, Delivered
from clusterenv.system.cpus import cpu_limit
from clusterenv.wire import messages
from clusterenv.wire.channel import Brings, Raw
from clusterenv.worker.setup import WorkerConfig

_SPIN_S = 2e-3  # how long a worker spins for its next request: about a round trip to the head

_MOST_KB = 0x7FFF_FFFF  # that the word for the link's rate can hold

Send = Callable[[Any, Sequence[Any]], None]


class Shard:
    def __init__(
        self,
        host: messages.AssignShard,
        payload: bytes,
        delivered: Delivered,
        send: Send,
        weights: WeightStore,
        welcome: messages.Welcome | None = None,
    ) -> None:
        self.number = host.shard
        self._send = send
        self._slots = dict(host.workers)
        self._local = {worker: i for i, (worker, _) in enumerate(host.workers)}
        self._global = [worker for worker, _ in host.workers]
        spec: Any = _Entry(host.entry_point) if host.entry_point else None
        blueprint = Blueprint(host.num_envs, payload, False, spec, host.is_named, delivered=delivered)
        mode = AutoresetMode(host.mode) if host.mode else None
        spin_s = _SPIN_S if len(host.workers) <= cpu_limit() else 0.0
        config = WorkerConfig(mode, host.check, host.threads, host.preload, host.other, spin_s)
        if welcome is not None:
            config = replace(config, compress=welcome.compress, codecs=welcome.codecs)
        self._executor = WorkerProcesses(blueprint, len(host.workers), config, weights.descriptor)
        self._weights = weights
        self._busy: dict[int, set[int]] = {worker: set() for worker in self._global}  # open requests with rows
        self._stepping: dict[int, Any] = {}  # worker → None, or its answer to the common step
        self._step_request = -1
        self._waiting: deque[tuple[Any, list[Any]]] = deque()  # ToWorker, StepAll: for weights not yet here
        self._buffers: Buffers | None = None
        self._block: Block | None = None
        self._arena: Arena | None = None

    @property
    def num_workers(self) -> int:
        return len(self._global)

    def fileno(self) -> int:
        return self._executor.fileno()

    @property
    def is_busy(self) -> bool:
        return any(self._busy.values()) or bool(self._stepping)

    # -- from the head ----------------------------------------------------------------------------------------

    def handle(self, message: Any, frames: list[Any]) -> None:
        if isinstance(message, messages.StepAll):
            self._waiting.append((message, frames))
            self.go_on()
        elif isinstance(message, messages.ToWorker):
            # Not for a worker that ended before the head knew: its replacement gets its own requests.
            if self._executor.is_running(self._local[message.worker]):
                self._waiting.append((message, frames))
                self.go_on()
        elif isinstance(message, messages.Start):
            self._executor.start(self._local[message.worker])
        elif isinstance(message, messages.Kill):
            self._executor.kill(self._local[message.worker])
        elif isinstance(message, messages.TraceStack):
            self._executor.stack(self._local[message.worker])
        elif isinstance(message, messages.MapRows):
            layout = msgspec.msgpack.decode(frames[0], type=Layout)
            self._buffers = Buffers(layout, self._executor.allocate(layout))
            self._block = Block(self._buffers, [slot for worker in self._global for slot in self._slots[worker]])
        elif isinstance(message, messages.MapFragments):
            arena = msgspec.msgpack.decode(frames[0], type=ArenaLayout)
            self._arena = Arena(arena, self._executor.allocate_arena(arena))

    def go_on(self) -> None:
        """Forward requests in the order of their arrival: one that needs weights not yet here holds up the rest.

        Raises ProtocolError for weights that are neither here nor awaited: other weights are in their place.
        """
        while self._waiting:
            message, frames = self._waiting[0]
            if isinstance(message, messages.ToWorker) and message.weights and not self._weights.has(message.weights):
                if self._weights.awaits(message.weights):
                    return
                raise ProtocolError("a request needs weights that cannot be pulled")
            self._waiting.popleft()
            if isinstance(message, messages.ToWorker):
                self._forward(message, frames)
            else:
                self._step_all(message, frames)

    def _forward(self, message: messages.ToWorker, frames: list[Any]) -> None:
        if message.slots:
            assert self._buffers is not None
            write_inputs(self._buffers, message.slots, message.actions, frames[1])
            self._busy[message.worker].add(message.request)
        self._executor.forward(self._local[message.worker], bytes(frames[0]))

    def _step_all(self, step: messages.StepAll, frames: list[Any]) -> None:
        assert self._block is not None
        self._block.write_inputs(frames[0])
        self._step_request = step.request
        self._stepping = {w: None for w in self._global if self._executor.is_running(self._local[w])}
        if len(self._stepping) < len(self._global):  # one ended, and the head does not know yet
            self._flush_step()
        self._executor.ring(step.request)

    # -- from the workers -------------------------------------------------------------------------------------

    def take(self) -> None:
        """Pass on everything that workers have sent."""
        try:
            events = self._executor.poll(0.0)
        except ClusterEnvError as error:
            self._send(messages.Failed(self.number, str(error)), ())
            return
        for local, message in events:
            worker = self._global[local]
            if isinstance(message, Exit):
                self._flush_step()
                self._busy[worker].clear()
                # A StepAll is for all workers.
                self._waiting = deque(item for item in self._waiting if getattr(item[0], "worker", None) != worker)
                self.go_on()
                self._send(messages.Exited(self.number, worker, message.reason, message.tail), ())
            elif isinstance(message, Stack):
                self._send(messages.StackTrace(self.number, worker, message.text), ())
            elif isinstance(message, Printed):
                self._send(messages.Output(self.number, worker, message.text, message.dropped), ())
            else:
                self._heard(worker, message)

    def _heard(self, worker: int, message: int | Raw) -> None:
        request = message if isinstance(message, int) else message.request
        if request == self._step_request and worker in self._stepping:
            self._stepping[worker] = message
            if all(answer is not None for answer in self._stepping.values()):
                self._send_stepped()
            return
        self._answer(worker, message)

    def _answer(self, worker: int, message: int | Raw) -> None:
        if isinstance(message, int):
            message = Raw(message, True, self._slots[worker], b"")
        if message.last:
            self._busy[worker].discard(message.request)
        frames: list[Any] = [message.body]
        if message.brings is Brings.ROWS:
            assert self._buffers is not None
            frames.append(read_rows(self._buffers, message.slots))
        elif message.brings is Brings.FRAGMENT:
            assert self._arena is not None
            columns = slice(self._slots[worker][0], self._slots[worker][-1] + 1)
            side = self._arena.sides[message.side]
            frames += read_fragment(side, columns, message.num_steps, message.packed)
        answer = messages.Answer(
            self.number, worker, message.request, message.last, message.slots, tuple(message.packed)
        )
        self._send(answer, frames)

    def _send_stepped(self) -> None:
        assert self._block is not None
        answers = {worker: m for worker, m in self._stepping.items() if isinstance(m, Raw)}
        self._stepping = {}
        rows = self._block.read_rows()
        bodies = [answer.body for answer in answers.values()]
        self._send(messages.SteppedAll(self.number, self._step_request, tuple(answers)), [rows, *bodies])

    def _flush_step(self) -> None:
        """Answer a common step worker by worker, because one of them has ended."""
        stepping, self._stepping = self._stepping, {}
        for worker, message in stepping.items():
            self._busy[worker].add(self._step_request)
            if message is not None:
                self._answer(worker, message)

    # -- the rest ---------------------------------------------------------------------------------------------

    def progress(self) -> list[tuple[int, int, int, int, int]]:
        return [
            (worker, self._executor.pid(i) or 0, *self._executor.progress(i))
            for i, worker in enumerate(self._global)
            if self._executor.is_running(i)
        ]

    def stop_early(self) -> None:
        """End running fragments after their current step."""
        self._executor.signal(STOP, 1)

    def set_link_rate(self, bytes_per_s: float) -> None:
        """Tell the workers how fast the link is for each of them."""
        self._executor.signal(LINK, int(min(max(bytes_per_s / 1e3, 1), _MOST_KB)))

    def close(self, timeout_s: float) -> None:
        """End the workers. What they still send is discarded: this may be another thread than the socket's."""
        self._send = lambda message, frames: None
        self._buffers = self._block = self._arena = None
        self._executor.close(timeout_s)


class _Entry(NamedTuple):
    """The part of an `EnvSpec` that the fork server needs: which module to import before it forks."""

    entry_point: str
