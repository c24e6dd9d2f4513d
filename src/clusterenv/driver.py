"""The driver: the only shell around the engine. It holds the executor and the clock, waits, and raises.

Requests of `ClusterEnv` and `Collector` go to the engine, the engine's instructions to the executor, and what the
executor receives back to the engine. A slot whose environment is gone is rebuilt in its next incarnation: the user
sees the episode end once, as truncated and invalid, and then the first row of the new one, never the two spliced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.engine.agreement import agree
from clusterenv.engine.collecting.fragments import Mode
from clusterenv.engine.collecting.weights import Transfer, WeightLedger
from clusterenv.engine.engine import Engine
from clusterenv.engine.failures import env_error
from clusterenv.engine.health import Health
from clusterenv.engine.incarnations import Incarnations
from clusterenv.engine.inputs import WeightsHeld, WeightsSent
from clusterenv.engine.instructions import Instruction, Kill, PutWeights, Reserve, Send, Start
from clusterenv.engine.requests import Kind, Request, Requests
from clusterenv.engine.rows import Delivery, Rows
from clusterenv.engine.slots import Slots
from clusterenv.engine.state import State
from clusterenv.engine.workers import Workers
from clusterenv.errors import DeadlineError, NotPlainError, PolicyError, UsageError, WorkerLostError
from clusterenv.events import EventLog
from clusterenv.executors.building import Building, lay_out, own_mode
from clusterenv.executors.contract import Executor
from clusterenv.journal import Journal
from clusterenv.memory.rows import Buffers
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint, own_spaces
from clusterenv.system.interrupts import STATE, checkpoint, uninterrupted
from clusterenv.wire.requests import Attach, Reply

__all__ = ["Driver", "Rows"]

_WATCH_S = 0.25  # maximum duration of one wait
_LOOK_S = 0.2  # interval between two checks for hung workers
_LOOK_EVERY = 16  # steps of the hot loop between two polls for everything, not only for the workers' answers


class Driver:
    """Drive all slots of a run. `requests`, which has the slots of each worker, is also read by network executors."""

    def __init__(
        self,
        executor: Executor,
        requests: Requests,
        mode: AutoresetMode | None,
        recovery: Recovery,
        *,
        blueprint: Blueprint,
        events: EventLog,
        node_of: list[int] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.executor = executor
        self.slots_of = slots_of = requests.slots_of
        self.node_of = [0] * len(slots_of) if node_of is None else node_of
        """Worker → its machine: weights go to each machine once."""
        self.num_envs = sum(map(len, slots_of))
        self.is_vector = blueprint.is_vector
        self.events = events
        self._inbox: deque[tuple[int, Any]] = deque()
        self.wanted_stacks: deque[int] = deque()
        """Workers whose stack an event is to show; any thread may add one."""
        self._watched_at_s = 0.0
        self.requests = requests
        self.workers = Workers(slots_of, self.node_of, recovery.warn_after_s)
        self.weights = WeightLedger(self.node_of)
        self._health = Health(self.workers, self.requests, self.weights, recovery)
        self._journal = journal
        self.is_resumed = journal is not None and journal.is_resumed
        incarnations = Incarnations(self.num_envs, *(journal.incarnations if journal is not None else ()))
        try:
            self._start(blueprint, incarnations, mode, recovery)
        except BaseException:
            executor.close(0.0)
            raise

    # -- starting ---------------------------------------------------------------------------------------------

    def _start(
        self, blueprint: Blueprint, incarnations: Incarnations, mode: AutoresetMode | None, recovery: Recovery
    ) -> None:
        """Build every environment, then the engine from what they have in common."""
        building = Building(self.executor, self.workers, self.requests, self.weights, self._health)
        built = building.run(incarnations, self.events, recovery.recovery_timeout_s)
        agreed = agree(built, self.slots_of, blueprint.observation_mode, lambda: own_spaces(blueprint))
        self.single_observation_space = agreed.single_observation_space
        self.observation_space = agreed.observation_space
        self.single_action_space = agreed.single_action_space
        self.render_mode = agreed.render_mode
        self.metadata = dict(agreed.metadata)
        self.mode = mode or own_mode(agreed, self.is_vector)
        self.layout = layout = lay_out(agreed, self.num_envs, self.is_vector)
        buffers = Buffers(layout, self.executor.allocate(layout))
        self.rows = Delivery(self.num_envs, self.single_observation_space, buffers)
        self._slots = slots = Slots(self.mode)
        state = State(
            self.workers, slots, self.rows, self.requests, incarnations, self.weights, self.events, self.is_vector
        )
        attach = Attach(layout, self.single_observation_space, self.single_action_space)
        self._state = state
        self._engine = Engine(state, recovery, attach, self._health)
        self.collecting = self._engine.collecting
        for worker in self.workers:
            state.send(worker.index, attach)
        self.carry_out()

    # -- carrying out -----------------------------------------------------------------------------------------

    @uninterrupted
    def carry_out(self) -> None:
        """Carry out the engine's instructions. After an exception, the next call carries out the rest."""
        out = self._state.out
        while out:
            instruction = out.popleft()
            try:
                self._do(instruction)
            except NotPlainError:
                assert isinstance(instruction, Send) and instruction.request is not None
                self._state.cancel(instruction.request)
                raise

    def _do(self, instruction: Instruction) -> None:
        executor = self.executor
        if isinstance(instruction, Send):
            executor.send(instruction.worker, instruction.message, instruction.request)
        elif isinstance(instruction, PutWeights):
            self._put_weights(instruction.transfer)
        elif isinstance(instruction, Start):
            executor.start(instruction.worker)
        elif isinstance(instruction, Reserve):
            self._journal.reserve(instruction.incarnation)  # type: ignore[union-attr]  # not None here
        elif executor.processes is not None:  # only processes are watched
            (executor.processes.kill if isinstance(instruction, Kill) else executor.processes.stack)(instruction.worker)

    def _put_weights(self, transfer: Transfer) -> None:
        if self.executor.put_weights(transfer):
            self.weights.heard(WeightsSent(transfer.weights.number, len(transfer.data)))
            self.weights.heard(WeightsHeld(transfer.weights.number))

    # -- a step of all slots ----------------------------------------------------------------------------------

    def step_all(self, copy: bool) -> tuple[Any, Any, Any, Any, dict[str, Any]] | None:
        """Step every slot with the actions in shared memory: the hot loop.

        Returns None if anything unusual happened: the step is under way, and `collect` and `deliver` complete it.
        """
        requests, engine = self.requests, self._engine
        if requests.number % _LOOK_EVERY == 0:  # workers' output, and other messages that the hot loop does not read
            self._inbox.extend(self.executor.poll(0.0))
            engine.count_steps(_LOOK_EVERY)
        if self._inbox or self._slots.records or requests.count:
            self.send_step(None, None)
            return None
        requests.number = requests.step_all = number = requests.number % 0xFFFF_FFFF + 1
        workers, done = len(self.slots_of), 0
        try:
            answers = self.executor.step_all(number)
            done = workers if answers is None else answers[0]
        finally:
            if done < workers:
                engine.spill(done, time.monotonic())
        if answers is not None:
            for worker, message in answers[1]:
                if worker < done:
                    self.rows.add_rows(message)
                else:
                    self._inbox.append((worker, message))
        if STATE.pending:  # before the delivery, as in `deliver`
            checkpoint()
        return self.rows.all_rows(copy) if done == workers else None

    # -- requests ---------------------------------------------------------------------------------------------

    def send_step(
        self, slots: list[int] | None, actions: list[Any] | None, knobs: dict[str, Any] | None = None
    ) -> None:
        """Step these slots (None: all) with the actions in shared memory or with `actions` (objects); given `knobs`,
        the workers' policy chooses the actions."""
        chosen = list(range(self.num_envs)) if slots is None else slots
        self._engine.acted = []
        self._engine.step(chosen, actions, knobs, time.monotonic())
        self.carry_out()

    def send_reset(self, slots: list[int], seeds: list[int | None], options: dict[str, Any] | None) -> None:
        self._engine.reset(slots, seeds, options, time.monotonic())
        self.carry_out()

    def send_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], slots: list[int] | None = None
    ) -> list[Request]:
        """Call a method (or read an attribute) of these slots' environments (None: all); `results` waits for it."""
        gone = tuple(slot for slot in self._state.slots.gone() if slots is None or slot in slots)
        if gone:
            text = f"call({name!r}): the environments of slots {list(gone)} failed and are not back yet"
            raise WorkerLostError(f"{text}; step or reset first", slots=gone)
        requests = self._engine.call(name, args, kwargs, slots, time.monotonic())
        self.carry_out()
        return requests

    def results(self, requests: Sequence[Request], timeout_s: float | None = None) -> list[Any]:
        """Wait for the results of these calls, in ascending order of their slots."""
        return [result for reply in self.replies(requests, timeout_s) for result in reply.result or []]

    def repeat_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], slots: list[int] | None) -> None:
        """Repeat a call that was made on every later incarnation."""
        self._state.incarnations.remember_call(name, args, kwargs, range(self.num_envs) if slots is None else slots)

    def set_attr(self, name: str, values: dict[int, Any]) -> None:
        """Set an attribute on those of these slots' environments that exist, and on every later incarnation."""
        requests = self._engine.set_attr(name, values, time.monotonic())
        self.carry_out()
        self.replies(requests)

    def replies(self, requests: Sequence[Request], timeout_s: float | None = None) -> list[Reply]:
        """Wait for the answers to calls, and return them in the order of the requests."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not all(request.reply for request in requests):
            lost = [r for r in requests if r.reply is None and not self.requests.is_open(r)]
            if lost:
                slots = tuple(slot for request in lost for slot in self.slots_of[request.worker])
                workers = [request.worker for request in lost]
                raise WorkerLostError(f"workers {workers} died during the call; see events()", slots=slots)
            self.advance(deadline)
            late = [slot for request in requests if request.reply is None for slot in request.slots]
            if late and deadline is not None and time.monotonic() >= deadline:
                raise self._late("call_wait", timeout_s, late)
        replies = [request.reply for request in requests if request.reply is not None]
        for reply in replies:
            if reply.faults:
                fault = reply.faults[0]
                if fault.phase == "policy":
                    raise PolicyError(f"{fault.error}\n{fault.traceback}", remote_traceback=fault.traceback)
                raise env_error(fault)
        return replies

    # -- waiting ----------------------------------------------------------------------------------------------

    def collect(self, min_rows: int, timeout_s: float | None, call: str = "recv") -> None:
        """Wait until at least `min_rows` awaited slots have a row; `call` is the user's call, named in timeouts."""
        rows = self.rows
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while rows.ready_count < min_rows:
            self.advance(deadline)  # at least once: a timeout of 0 asks whether the rows have arrived
            if deadline is not None and rows.ready_count < min_rows and time.monotonic() >= deadline:
                raise self._late(call, timeout_s, np.flatnonzero(rows.awaited & ~rows.ready).tolist())

    def _late(self, call: str, timeout_s: float | None, slots: list[int]) -> DeadlineError:
        workers = sorted({self.workers.of_slot(slot).index for slot in slots})
        text = f"The call to `{call}` has timed out after {timeout_s} second(s)"
        who = f"slots {slots} of workers {workers}"
        return DeadlineError(f"{text}; awaited: {who}. Nothing is lost: call {call}() again.")

    def deliver(self, copy: bool) -> Rows:
        """Deliver every row that is ready, ascending by slot. A call that ends by Ctrl-C has delivered nothing."""
        checkpoint()
        rows = self.rows.rows(copy)
        self._engine.delivered(rows.slots, rows.terminations | rows.truncations)
        return rows

    def advance(self, deadline: float | None) -> None:
        """Start what is due, wait for messages (at most a quarter of a second), process them, then handle Ctrl-C."""
        self._advance(deadline)
        checkpoint()

    @uninterrupted
    def _advance(self, deadline: float | None) -> None:
        engine, state = self._engine, self._state
        now_s = time.monotonic()
        if state.slots:
            for worker in engine.failures.due_workers(now_s):
                if self.executor.nodes is None or self.executor.nodes.can_start(worker):
                    engine.failures.start_worker(worker, now_s)
            engine.failures.rebuild_due(now_s)
        self.carry_out()
        self._inbox.extend(self.executor.poll(self._wait_s(deadline, now_s)))
        self._watch()
        now_s = time.monotonic()
        while self._inbox:  # kept across calls: an exception must not lose received messages
            worker, message = self._inbox.popleft()
            at = self.executor.progress(worker) if worker >= 0 else (-1, 0, 0)
            engine.receive(worker, message, at, now_s)
        if state.slots:
            engine.failures.check_late(now_s)
        self._raise_errors()

    def _wait_s(self, deadline: float | None, now_s: float) -> float:
        timeout_s = _WATCH_S
        due_s = self._engine.next_due_s(now_s) if self._state.slots else None
        if due_s is not None:
            timeout_s = min(timeout_s, max(0.001, due_s - now_s))
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - now_s))
        return timeout_s

    def _watch(self) -> None:
        """Check for hung workers, even while others answer."""
        now_s = time.monotonic()
        if self.executor.processes is None or now_s - self._watched_at_s < _LOOK_S:
            return
        self._watched_at_s = now_s
        while self.wanted_stacks:
            self._do(self._health.trace(self.wanted_stacks.popleft()))
        for worker in self._health.watched():
            instruction = self._health.watch(worker, self.executor.progress(worker), now_s)
            if instruction is not None:
                self._do(instruction)

    def _raise_errors(self) -> None:
        """Raise the first error that the engine has found; the others become its notes."""
        errors = self._state.errors
        if errors:
            first, *others = errors
            errors.clear()
            for other in others:
                first.add_note(f"also: {other}")
            raise first

    def drain(self) -> None:
        """Give up every row under way (before a reset): wait until the workers have finished, then forget the rows."""
        while any(request.kind is not Kind.CALL for request in self.requests):
            self.advance(None)
        self._engine.give_up_rows()

    def give_up_step(self) -> bool:
        """Wait for the other workers after a policy failed on one. Return whether a stepped slot's row is lost."""
        while self.requests:
            try:
                self.advance(None)
            except PolicyError:
                continue
        stepped = self.rows.ready_count > 0
        self._engine.give_up_rows()
        return stepped

    # -- the rest ---------------------------------------------------------------------------------------------

    @property
    def acted(self) -> list[Any]:
        """What the workers' policy did in the last step."""
        return self._engine.acted

    def set_seed_base(self, bases: list[int | None]) -> None:
        self._state.incarnations.set_bases(bases)

    def unused_seeds(self) -> list[int | None]:
        """Return a seed for each slot that no earlier head of this run has used; None for slots to be rebuilt."""
        return [None if self._slots.is_gone(s) else self._state.incarnations.seed(s) for s in range(self.num_envs)]

    def state_dict(self) -> dict[str, Any]:
        return self._state.incarnations.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._engine.resume(state, time.monotonic())

    def need_packages(self, names: tuple[str, ...]) -> None:
        if self.executor.nodes is not None:  # workers of this machine have what the caller has
            self.executor.nodes.need_packages(names)

    def scale(self, nodes: int) -> None:
        if self.executor.nodes is None:
            raise UsageError("scale() is for backends with nodes: this one has none")
        self.executor.nodes.scale(nodes)
        if self._journal is not None:
            self._journal.keep_invited(nodes)
        if self.collecting.fragments.mode is not Mode.STREAM:
            # Nodes without work under way leave now, not with the next request.
            self._inbox.extend(self.executor.poll(0.0))

    def stats(self) -> dict[str, Any]:
        processes = self.executor.processes
        return {
            "workers": len(self.slots_of),
            "worker_pids": [processes.pid(w) if processes else None for w in range(len(self.slots_of))],
            "events": dict(self.events.counts),
            "log_lines_lost": self.events.lost_lines,
            "slow_slots": sorted(self._engine.pace.slow),
            "step_time_s": self.rows.buffers.pace_s.copy(),
            "incarnations": np.array(self._state.incarnations.numbers),
            "pull_s": list(self.weights.pull_s),
            **self.executor.stats(),
        }

    def close(self, timeout_s: float) -> None:
        if hasattr(self, "rows"):
            self.rows.close()
        if hasattr(self, "collecting"):
            self.collecting.close()
        self.executor.close(timeout_s)
