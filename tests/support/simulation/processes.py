"""Simulate worker processes in memory: each is a real `Dispatcher` with an inbox and an outbox.

`SimulatedProcesses` has the interface of `WorkerProcesses`, which a node's shards use; `SimulatedExecutor` that of
`ProcessExecutor`. Channels keep the order and lose nothing, like a socket pair; when a worker runs, when its answer is
read and when it ends is drawn.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.engine.inputs import Exit, Stack
from clusterenv.executors.contract import is_plain
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.progress import PROGRESS_BYTES, TICK
from clusterenv.memory.rows import Layout
from clusterenv.spec import Vector
from clusterenv.system import interrupts
from clusterenv.wire.requests import Evaluate, Rebuild
from clusterenv.worker.dispatch import Dispatcher
from clusterenv.worker.vector_env import VectorGroup
from simulation.environment import SimulatedEnv, SimulatedRows, SimulatedVector
from simulation.world import Died, Hangs, World

__all__ = ["Process", "SimulatedExecutor", "Workers", "interrupt"]


class Memory:
    """The memory that a head or node shares with its workers."""

    def __init__(self) -> None:
        self.row_bytes = bytearray()
        self.arena: Any = None
        self.weight_bytes = bytearray()

    def rows(self) -> bytearray:
        return self.row_bytes

    def fragments(self) -> Any:
        return self.arena

    def weights(self) -> memoryview:
        return memoryview(bytes(self.weight_bytes))

    def write_weights(self, data: Any, offset: int) -> None:
        if len(self.weight_bytes) < offset + len(data):
            self.weight_bytes.extend(bytes(offset + len(data) - len(self.weight_bytes)))
        self.weight_bytes[offset : offset + len(data)] = data


class Process:
    """One worker process, from its start to its end."""

    def __init__(self, world: World, dispatcher: Dispatcher, pid: int) -> None:
        self.world = world
        self.dispatcher = dispatcher
        self.pid = pid
        self.inbox: deque[Any] = deque()
        self.outbox: deque[Any] = deque()
        self.is_hung = False
        self.exit: Exit | None = None
        """How it ended; reported only after its earlier messages are read."""

    @property
    def can_run(self) -> bool:
        return bool(self.inbox) and self.exit is None and not self.is_hung

    @property
    def can_be_read(self) -> bool:
        return bool(self.outbox) or self.exit is not None

    def run(self, begin: Callable[[Any], None], answer: Callable[[Any], None]) -> None:
        """Handle the next request. Its environments may end the process."""
        message, world = self.inbox.popleft(), self.world
        world.event("run", "" if world.trace is None else f"pid {self.pid} {_short(message)}")
        if isinstance(message, Rebuild):
            for slot, incarnation, seed in zip(message.slots, message.incarnations, message.seeds, strict=True):
                world.rebuilds(slot, incarnation, seed)
        world.is_evaluating = isinstance(message, Evaluate)
        try:
            begin(message)
            reply = self.dispatcher.handle(message, answer)
            if reply is not None:
                answer(reply)
        except Died:
            self.end("was killed by SIGKILL")
        except Hangs:
            self.is_hung = True
        finally:
            world.is_evaluating = False

    def end(self, reason: str, said: int | None = None) -> None:
        """End the process; of its unread messages, only the first `said` were sent (None: all)."""
        if self.exit is not None:
            return
        while said is not None and len(self.outbox) > said:
            self.outbox.pop()
        self.exit = Exit(reason, "")
        self.inbox.clear()
        group: Any = self.dispatcher.group
        for env in getattr(group.venv, "envs", []) if isinstance(group, VectorGroup) else group.envs:
            if env is not None:
                self.world.env_gone(env.number)


class Workers:
    """The processes of one machine, or of one shard."""

    def __init__(self, world: World, slots_of: list[list[int]], mode: AutoresetMode, is_vector: bool) -> None:
        workers = len(slots_of)
        self.world = world
        self.mode = mode
        self.memory = Memory()
        self.by_index: dict[int, Process] = {}
        self._progress = [memoryview(bytearray(PROGRESS_BYTES)).cast("i") for _ in range(workers)]
        makers = [_maker(world, slot) for slots in slots_of for slot in slots]
        self._makers: list[Any] = [makers] * workers
        """Worker → how it makes its environments."""
        if is_vector:
            self._makers = [_vector(world, slots[0], mode) for slots in slots_of]
        self._pids = 0
        self.said: deque[tuple[int, Any]] = deque()
        """Messages of the machine itself about its processes."""

    def start(self, index: int) -> None:
        old = self.by_index.get(index)
        assert old is None, f"worker {index} is started while it runs"
        self._pids += 1
        self._progress[index][0] = -1
        dispatcher = Dispatcher(self._makers[index], self.mode, True, self._progress[index], self.memory)
        self.by_index[index] = Process(self.world, dispatcher, self._pids)
        self.world.event("start", f"worker {index}")

    def allocate(self, layout: Layout) -> bytearray:
        self.memory.row_bytes = bytearray(layout.size)
        return self.memory.row_bytes

    def allocate_arena(self, layout: ArenaLayout) -> Any:
        self.memory.arena = mmap.mmap(-1, layout.size)
        return self.memory.arena

    def progress(self, index: int) -> tuple[int, int, int]:
        at = self._progress[index]
        return at[0], at[1], at[TICK]

    def is_running(self, index: int) -> bool:
        return index in self.by_index

    def pid(self, index: int) -> int | None:
        process = self.by_index.get(index)
        return None if process is None else process.pid

    def kill(self, index: int) -> None:
        process = self.by_index.get(index)
        if process is not None:
            self.world.event("killed", f"worker {index}")
            process.end("was killed by SIGKILL")

    def stack(self, index: int) -> None:
        if index in self.by_index:
            self.said.append((index, Stack('Current thread 1\n  File "env.py", line 1 in step')))

    def signal(self, word: int, value: int) -> None:
        for at in self._progress:
            at[word] = value

    # -- what may happen next ---------------------------------------------------------------------------------

    def runnable(self) -> list[int]:
        return [index for index, process in self.by_index.items() if process.can_run]

    def readable(self) -> list[int]:
        return [index for index, process in self.by_index.items() if process.can_be_read]

    def run(self, index: int) -> None:
        process = self.by_index[index]
        process.run(_nothing, process.outbox.append)

    def read(self, index: int) -> Any:
        """Return the next message of this worker; its `Exit` after the last one."""
        process = self.by_index[index]
        if process.outbox:
            return process.outbox.popleft()
        assert process.exit is not None
        del self.by_index[index]
        return process.exit

    def crash(self, index: int) -> None:
        """Kill a process from outside, at any moment: its unread messages may be lost from some point on."""
        process = self.by_index[index]
        said = len(process.outbox) - self.world.choices.draw(len(process.outbox) + 1)
        self.world.event("crash", f"worker {index}, {said} of {len(process.outbox)} answers said")
        process.end("was killed by SIGSEGV", said)


def _short(message: Any) -> str:
    if isinstance(message, int):
        return f"step {message}"
    slots = getattr(message, "slots", "")
    faults = "".join(f" fault of slot {fault.slot}" for fault in getattr(message, "faults", ()))
    return f"{type(message).__name__} {getattr(message, 'request', '')} {slots}{faults}"


def _nothing(message: Any) -> None:
    return None


def _maker(world: World, slot: int) -> Callable[[], SimulatedEnv]:
    return lambda: SimulatedEnv(world, slot)


def _vector(world: World, first: int, mode: AutoresetMode) -> Vector:
    kind = SimulatedRows if world.steps_rows else SimulatedVector
    return Vector(lambda num_envs, seeds: kind(world, first, num_envs, mode))


def interrupt(world: World) -> None:
    """Press Ctrl-C, if that is drawn."""
    if not interrupts.STATE.pending and world.happens("interrupt"):
        world.event("interrupt")
        interrupts.STATE.pending, interrupts.STATE.frame = True, None


class SimulatedExecutor(Workers):
    """Executor of one machine; see `nodes.py` for several."""

    nodes = None

    @property
    def processes(self) -> SimulatedExecutor:
        return self

    def __init__(self, world: World, slots_of: list[list[int]], mode: AutoresetMode, is_vector: bool) -> None:
        super().__init__(world, slots_of, mode, is_vector)
        self._num_workers = len(slots_of)
        self._heard: deque[tuple[int, Any]] = deque()
        self.is_closed = False
        self.on_wait: Callable[[], None] = lambda: None
        interrupts.environments_opened(self)

    def put_weights(self, transfer: Any) -> bool:
        self.memory.write_weights(transfer.weights.data, transfer.offset)
        return True

    def send(self, index: int, message: Any, request: Any = None) -> None:
        self.world.waits()  # also finds endless requests
        process = self.by_index.get(index)
        if process is not None and process.exit is None:
            process.inbox.append(message)
        interrupt(self.world)

    def step_all(self, number: int) -> tuple[int, list[tuple[int, Any]]] | None:
        """Wait for the workers in order until one is silent or sends an unusual message, like `ProcessExecutor`."""
        world = self.world
        world.event("step_all")
        for process in self.by_index.values():
            if process.exit is None:
                process.inbox.append(number)
        heard: list[tuple[int, Any]] = []
        done = 0
        for index in range(self._num_workers):
            interrupt(world)
            process = self.by_index.get(index)
            if interrupts.STATE.pending or process is None:
                break
            if world.happens("kill"):
                self.crash(index)
            while process.can_run and not process.outbox and not world.happens("late"):
                self.run(index)
                interrupt(world)
            if not process.outbox:
                world.clock.now_s += 0.25
                break
            messages = list(process.outbox)
            process.outbox.clear()
            if messages != [number]:
                heard += [(index, message) for message in messages]
                if len(messages) != 1 or not is_plain(messages[0], number):
                    break
            done += 1
        return None if done == self._num_workers and not heard else (done, heard)

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        world, choices = self.world, self.world.choices
        world.waits()
        self.on_wait()
        interrupt(world)
        if world.happens("kill") and self.by_index:
            alive = [index for index, process in self.by_index.items() if process.exit is None]
            if alive:
                self.crash(alive[choices.draw(len(alive))])
        heard: list[tuple[int, Any]] = list(self._heard)
        self._heard.clear()
        deadline = world.clock.now_s + timeout_s
        while self.said:
            heard.append(self.said.popleft())
        turns = 0
        while turns < 40:
            turns += 1
            runnable, readable = self.runnable(), self.readable()
            count = len(runnable) + len(readable)
            if not count or (world.happens("late") and not heard):
                if not heard:
                    world.clock.now_s = deadline
                break
            pick = choices.draw(count)
            if pick < len(readable):
                index = readable[pick]
                heard.append((index, self.read(index)))
                world.event("deliver", "" if world.trace is None else f"worker {index} {_short(heard[-1][1])}")
                if choices.draw(3) == 0:
                    break
            else:
                self.run(runnable[pick - len(readable)])
        return heard

    def background(self) -> None:
        """Let workers continue while the learner is busy."""
        while self.runnable() and self.world.choices.draw(3):
            runnable = self.runnable()
            self.run(runnable[self.world.choices.draw(len(runnable))])

    def stats(self) -> dict[str, Any]:
        return {"output_lines_dropped": [0] * self._num_workers}

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        self.by_index.clear()
        interrupts.environments_closed(self)
