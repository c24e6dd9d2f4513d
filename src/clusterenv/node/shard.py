"""A shard on a node: the workers of one part of the run, fed by the head's messages. No socket, no user code.

Called by the node agent: `tell` and its kin with what the head said, `take` with what workers said; what is to go to
the head leaves by `send`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from gymnasium.vector import AutoresetMode

from clusterenv.engine.inputs import Exit, Stack
from clusterenv.errors import ClusterEnvError, ProtocolError
from clusterenv.executors.contract import Printed
from clusterenv.executors.worker_processes import WorkerProcesses
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.memory.rows import Buffers, Layout
from clusterenv.memory.transfer import Block, read_fragment, read_rows, write_inputs
from clusterenv.node.weight_store import WeightStore
from clusterenv.spec import Blueprint, Delivered
from clusterenv.system.cpus import cpu_limit
from clusterenv.wire.channel import Brings, Raw
from clusterenv.wire.messages import (
    Answer,
    AssignShard,
    Exited,
    Failed,
    Output,
    StackTrace,
    StepAll,
    SteppedAll,
    ToWorker,
)
from clusterenv.worker.setup import WorkerConfig

__all__ = ["Shard"]

_SPIN_S = 2e-3
"""How long a worker waits awake for its next request: a way to the head and back, and not much more."""

Send = Callable[[Any, Sequence[Any]], None]


class Shard:
    def __init__(
        self, host: AssignShard, payload: bytes, delivered: Delivered, send: Send, weights: WeightStore
    ) -> None:
        self.number = host.shard
        self._send = send
        self._slots = dict(host.workers)
        self._local = {worker: i for i, (worker, _) in enumerate(host.workers)}
        self._global = [worker for worker, _ in host.workers]
        spec = _Entry(host.entry_point) if host.entry_point else None
        blueprint = Blueprint(
            host.num_envs,
            payload,
            False,
            spec,  # type: ignore[arg-type]
            host.is_named,
            delivered=delivered,
        )
        mode = AutoresetMode(host.mode) if host.mode else None
        spin_s = _SPIN_S if len(host.workers) <= cpu_limit() else 0.0
        config = WorkerConfig(mode, host.check, host.threads, host.preload, host.other, spin_s)
        self._executor = WorkerProcesses(blueprint, len(host.workers), config, weights.descriptor)
        self._weights = weights
        self._busy: dict[int, set[int]] = {worker: set() for worker in self._global}  # requests with rows, not answered
        self._ringing: dict[int, Any] = {}  # worker → None, or its answer
        self._send_step_all = -1
        self._waiting: deque[tuple[ToWorker | StepAll, list[Any]]] = deque()  # behind weights that are still to come
        self._buffers: Buffers | None = None
        self._block: Block | None = None
        self._arena: Arena | None = None

    def fileno(self) -> int:
        return self._executor.fileno()

    @property
    def is_busy(self) -> bool:
        return any(self._busy.values()) or bool(self._ringing)

    # -- what the head says -----------------------------------------------------------------------------------

    def rows(self, layout: Any) -> None:
        plan = msgspec.msgpack.decode(layout, type=Layout)
        self._buffers = Buffers(plan, self._executor.allocate(plan))
        self._block = Block(self._buffers, [slot for worker in self._global for slot in self._slots[worker]])

    def fragments(self, layout: Any) -> None:
        plan = msgspec.msgpack.decode(layout, type=ArenaLayout)
        self._arena = Arena(plan, self._executor.allocate_arena(plan))

    def start(self, worker: int) -> None:
        self._executor.start(self._local[worker])

    def kill(self, worker: int) -> None:
        self._executor.kill(self._local[worker])

    def stack(self, worker: int) -> None:
        self._executor.stack(self._local[worker])

    def tell(self, tell: ToWorker, frames: list[Any]) -> None:
        if not self._executor.is_running(self._local[tell.worker]):
            return  # for one that has ended, which the head did not know yet: its replacement is told anew
        self._waiting.append((tell, frames))
        self.go_on()

    def ring(self, ring: StepAll, frames: list[Any]) -> None:
        self._waiting.append((ring, frames))
        self.go_on()

    def go_on(self) -> None:
        """In the order in which the head spoke: a request about weights that are still to come holds up the rest.

        Raises ProtocolError for weights that are neither here nor to come: what lies in their place are others.
        """
        while self._waiting:
            message, frames = self._waiting[0]
            if isinstance(message, ToWorker) and message.weights and not self._weights.has(message.weights):
                if self._weights.awaits(message.weights):
                    return
                raise ProtocolError("workers are to load weights that cannot be pulled")
            self._waiting.popleft()
            if isinstance(message, ToWorker):
                self._forward(message, frames)
            else:
                self._step_all(message, frames)

    def _forward(self, tell: ToWorker, frames: list[Any]) -> None:
        if tell.slots:
            assert self._buffers is not None
            write_inputs(self._buffers, tell.slots, tell.actions, frames[1])
            self._busy[tell.worker].add(tell.request)
        self._executor.forward(self._local[tell.worker], bytes(frames[0]))

    def _step_all(self, ring: StepAll, frames: list[Any]) -> None:
        assert self._block is not None
        self._block.write_inputs(frames[0])
        self._send_step_all = ring.request
        self._ringing = {w: None for w in self._global if self._executor.is_running(self._local[w])}
        if len(self._ringing) < len(self._global):  # one ended, and the head did not know yet
            self._flush_step()
        self._executor.ring(ring.request)

    # -- what workers say -------------------------------------------------------------------------------------

    def take(self) -> None:
        """Hand on whatever workers have said."""
        try:
            events = self._executor.poll(0.0)
        except ClusterEnvError as error:
            self._send(Failed(self.number, str(error)), ())
            return
        for local, message in events:
            worker = self._global[local]
            if isinstance(message, Exit):
                self._flush_step()
                self._busy[worker].clear()
                self._waiting = deque(
                    entry for entry in self._waiting if not isinstance(entry[0], ToWorker) or entry[0].worker != worker
                )
                self.go_on()
                self._send(Exited(self.number, worker, message.reason, message.tail), ())
            elif isinstance(message, Stack):
                self._send(StackTrace(self.number, worker, message.text), ())
            elif isinstance(message, Printed):
                self._send(Output(self.number, worker, message.text, message.dropped), ())
            else:
                self._heard(worker, message)

    def _heard(self, worker: int, message: int | Raw) -> None:
        request = message if isinstance(message, int) else message.request
        if request == self._send_step_all and worker in self._ringing:
            self._ringing[worker] = message
            if all(answer is not None for answer in self._ringing.values()):
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
            frames += read_fragment(self._arena.sides[message.side], columns, message.num_steps)
        self._send(Answer(self.number, worker, message.request, message.last, message.slots), frames)

    def _send_stepped(self) -> None:
        assert self._block is not None
        answers = {worker: m for worker, m in self._ringing.items() if isinstance(m, Raw)}
        self._ringing = {}
        rows = self._block.read_rows()
        bodies = [answer.body for answer in answers.values()]
        self._send(SteppedAll(self.number, self._send_step_all, tuple(answers)), [rows, *bodies])

    def _flush_step(self) -> None:
        """A worker is gone, before or in the middle of a whole step: the others' rows go one by one."""
        ringing, self._ringing = self._ringing, {}
        for worker, message in ringing.items():
            self._busy[worker].add(self._send_step_all)
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
        self._executor.stop_early()

    def close(self, timeout_s: float) -> None:
        """End the workers. What they still say goes nowhere: this may be another thread than the socket's."""
        self._send = _to_nobody
        self._buffers = self._block = self._arena = None
        self._executor.close(timeout_s)


def _to_nobody(message: Any, frames: Sequence[Any]) -> None:
    return None


class _Entry(NamedTuple):
    """What the fork server looks at of an `EnvSpec`: which module to import before it forks."""

    entry_point: str
