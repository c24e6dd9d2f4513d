"""The engine: everything that the head decides about a run, without I/O. Time is passed in, instructions come out.

The driver makes requests (`step`, `reset`, `call`, ...), passes on what the executor received (`receive`), and carries
out the instructions in `state.out`. Each fact has one owner: slots, workers, requests, rows, incarnations (`State`);
`Failures` changes several of them when something fails.
"""

from __future__ import annotations

import logging
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.engine.collecting.collecting import Collecting, of_slots
from clusterenv.engine.failures import Failures
from clusterenv.engine.health import Health, PaceWatch
from clusterenv.engine.inputs import Cause, Exit, Placed, Stack, WeightsHeld, WeightsRefused, WeightsSent
from clusterenv.engine.instructions import PutWeights
from clusterenv.engine.requests import Kind, Request
from clusterenv.engine.slots import REBUILT_FOR_OTHERS, Env
from clusterenv.engine.state import State
from clusterenv.engine.workers import Progress
from clusterenv.events import Event
from clusterenv.recovery import Recovery
from clusterenv.wire import infos as info_columns
from clusterenv.wire.requests import Act, Acted, Attach, Built, Call, Reply, Reset, SetAttr, Step

__all__ = ["Engine"]

_SLOW_EVERY = 256
"""Steps between two checks for slow environments."""


class Engine:
    def __init__(self, state: State, recovery: Recovery, attach: Attach, health: Health) -> None:
        self.collecting = Collecting(state, attach.action_space)
        self.state = state
        self.health = health
        self.failures = Failures(state, recovery, attach)
        self.acted: list[Acted] = []  # what the workers' policy did in the step under way
        self.pace = PaceWatch()
        self._steps = 0  # since the last check for slow environments

    # -- a step of all slots ----------------------------------------------------------------------------------

    def spill(self, done: int, now_s: float) -> None:
        """Turn a step of all slots into requests, because only the first `done` workers have answered it as usual."""
        state = self.state
        state.rows.expect_all()
        for worker in state.workers:
            if worker.index < done:
                state.rows.mark_ready(worker.slots)
            else:
                state.requests.open_step(worker.index)
                worker.asked(now_s)

    # -- requests ---------------------------------------------------------------------------------------------

    def step(self, slots: list[int], actions: list[Any] | None, knobs: dict[str, Any] | None, now_s: float) -> None:
        """Step these slots with the actions in shared memory or with `actions` (objects); given `knobs`, the workers'
        policy chooses the actions."""
        state = self.state
        state.rows.expect(slots)
        place = {slot: i for i, slot in enumerate(slots)}
        if state.is_vector and state.slots:
            for stepped in state.workers:
                united = state.slots.unite(stepped.slots) if stepped.slots[0] in place else []
                if united:  # the rows that report it may be given up before they are delivered
                    state.events.add(Event("env_lost", REBUILT_FOR_OTHERS, tuple(united), stepped.index))
        live: list[list[int]] = [[] for _ in state.workers]
        for slot in slots:
            asked = state.slots.step(slot)
            if asked is None:
                live[state.workers.of_slot(slot).index].append(slot)
            elif asked.first is not None:
                state.rows.first_row(slot, asked.first, asked.loss)
            elif asked.loss is not None:
                state.rows.report_loss(slot, asked.loss)
        for worker, its_slots in enumerate(live):
            if not its_slots:
                continue
            its_slots.sort()
            objects = None if actions is None else [actions[place[slot]] for slot in its_slots]
            act = None
            if knobs is not None:
                own = {name: of_slots(value, its_slots) for name, value in knobs.items()}
                act = Act(own, state.incarnations_of(its_slots))
            message = Step(state.requests.next_number(), its_slots, objects, act)
            state.ask(worker, Kind.STEP, its_slots, message, now_s)

    def reset(self, slots: list[int], seeds: list[int | None], options: dict[str, Any] | None, now_s: float) -> None:
        state = self.state
        state.rows.expect(slots)
        seed_of = dict(zip(slots, seeds, strict=True))
        live: list[list[int]] = [[] for _ in state.workers]
        for slot, seed in seed_of.items():
            state.rows.resetting[slot] = (seed, options)
            if state.slots.reset(slot):
                live[state.workers.of_slot(slot).index].append(slot)
        for worker, its_slots in enumerate(live):
            if its_slots:
                its_seeds = [seed_of[slot] for slot in its_slots]
                message = Reset(state.requests.next_number(), its_slots, its_seeds, options)
                state.ask(worker, Kind.RESET, its_slots, message, now_s)

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], slots: list[int] | None, now_s: float
    ) -> list[Request]:
        """Call a method (or read an attribute) of the environments of these slots (None: all)."""
        state, requests = self.state, []
        for worker in state.workers:
            its = worker.slots if slots is None else [slot for slot in worker.slots if slot in slots]
            if its:
                message = Call(state.requests.next_number(), its, name, args, kwargs)
                requests.append(state.ask(worker.index, Kind.CALL, its, message, now_s))
        return requests

    def set_attr(self, name: str, values: dict[int, Any], now_s: float) -> list[Request]:
        """Set an attribute on those of these slots' environments that exist, and on every later incarnation."""
        state, requests = self.state, []
        state.incarnations.remember_attribute(name, values)
        for worker in state.workers:
            here = [slot for slot in worker.slots if slot in values and self._can_be_set(slot)]
            if here:
                message = SetAttr(state.requests.next_number(), here, name, [values[slot] for slot in here])
                requests.append(state.ask(worker.index, Kind.CALL, here, message, now_s))
        return requests

    def _can_be_set(self, slot: int) -> bool:
        """Return whether the environment exists, or is being rebuilt with the attributes known before."""
        slots = self.state.slots
        return not slots.is_gone(slot) or slots.env(slot) is Env.REBUILDING

    # -- received messages ------------------------------------------------------------------------------------

    def receive(self, worker: int, message: Any, at: Progress, now_s: float) -> None:
        """Process a message from or about a worker; `at` is the progress that it shows."""
        state = self.state
        if isinstance(message, int):
            request = state.requests.get(worker, message)
            assert request is not None, f"worker {worker} answered step {message}, which is not open"
            state.requests.close(request)
            state.rows.mark_ready(request.slots)
        elif isinstance(message, Reply):
            self._replied(worker, message, now_s)
        elif isinstance(message, Exit):
            self.failures.worker_exited(worker, message, at, now_s)
            self.collecting.worker_exited(worker, message.cause is Cause.MOVED)
        elif isinstance(message, Stack):
            event = self.health.long_call(worker, message.text, at, now_s)
            if event is not None:
                state.events.add(event, logging.INFO if event.kind == "stack" else logging.WARNING)
        elif isinstance(message, Built):
            built = state.requests.get(worker, message.request)
            if built is not None:
                state.requests.close(built)
        elif isinstance(message, Placed):
            state.weights.placed(*message)
        elif isinstance(message, (WeightsSent, WeightsHeld, WeightsRefused)):
            self._weights_went(message)

    def _weights_went(self, event: WeightsSent | WeightsHeld | WeightsRefused) -> None:
        again = self.state.weights.heard(event)
        if again is not None:
            reason = f"node {again.machine.node} could not unpack its weights: they are sent again, unpacked"
            self.state.events.add(Event("weights_refused", reason))
            self.state.out.append(PutWeights(again))

    def _replied(self, worker: int, reply: Reply, now_s: float) -> None:
        state = self.state
        request = state.requests.get(worker, reply.request)
        if request is None:
            return  # a late reply: its request is no longer open
        if reply.last:
            state.requests.close(request)
        if request.kind is Kind.CALL:
            request.reply = reply
            return
        in_fragment = request.kind in (Kind.POLICY, Kind.FRAGMENT)
        if in_fragment:
            result = self.collecting.replied(request, reply, now_s)
            if result is not None:
                self.count_steps(result.num_steps)
        elif request.kind is Kind.REBUILD:
            self._rebuilt(reply)
        else:
            self._stepped(request, reply, now_s)
        for fault in reply.faults:
            # A step queued behind an abandoned fragment reports again the environments that failed in the fragment.
            if request.kind is Kind.REBUILD or not state.slots.is_gone(fault.slot):
                self.failures.env_failed(worker, fault, in_fragment, now_s)

    def _rebuilt(self, reply: Reply) -> None:
        self.state.rows.add_objects(reply)
        failed = {fault.slot for fault in reply.faults}
        for slot in reply.slots:
            if slot not in failed:
                columns = info_columns.select(reply.infos, {slot: slot}) if reply.infos else {}
                self.failures.rebuilt(slot, columns)

    def _stepped(self, request: Request, reply: Reply, now_s: float) -> None:
        rows = self.state.rows
        if isinstance(reply.result, Acted):
            self.acted.append(reply.result)
        elif reply.result is not None:  # the policy failed, so nothing was stepped
            rows.awaited[request.slots] = False
            self.collecting.replied(request, reply, now_s)
            return
        failed = {fault.slot for fault in reply.faults}
        rows.mark_ready([slot for slot in reply.slots if slot not in failed] if failed else reply.slots)
        rows.add_rows(reply)

    # -- the passing of time ----------------------------------------------------------------------------------

    def next_due_s(self, now_s: float) -> float | None:
        """Return when the next restart is due; None: none is, or what is due waits for a place to run."""
        state = self.state
        absent = [worker.start_at_s for worker in state.workers.absent()] if state.slots else []
        return min((due_s for due_s in (*state.slots.due_times(), *absent) if due_s > now_s), default=None)

    def delivered(self, slots: Any, ended: Any) -> None:
        """Record a delivery. Under NEXT_STEP the row after an ended episode is a reset row: its slot must come back."""
        state = self.state
        if state.slots and state.slots.mode is AutoresetMode.NEXT_STEP:
            for slot in slots[ended].tolist():
                if state.slots.is_gone(slot):
                    state.slots.bring_back(slot)
        self.count_steps(1)

    def count_steps(self, steps: int) -> None:
        self._steps += steps
        if self._steps >= _SLOW_EVERY:
            self._steps = 0
            state = self.state
            for slot, reason in self.pace.newly_slow(state.rows.buffers.pace_s):
                worker = state.workers.of_slot(slot).index
                state.events.add(Event("slow", reason, (slot,), worker), level=logging.INFO)

    # -- giving up --------------------------------------------------------------------------------------------

    def give_up_rows(self) -> None:
        """Forget every undelivered row; the losses that these rows would have reported are reported later."""
        for slot, loss in self.state.rows.forget().items():
            self.state.slots.not_reported(slot, loss)

    def resume(self, saved: dict[str, Any], now_s: float) -> None:
        """Continue each slot with its next incarnation at the next reset: other seeds, the same sticky attributes."""
        state = self.state
        state.incarnations.load_state_dict(saved)
        for worker in state.workers:
            for slot in worker.slots:
                state.slots.lose_by_error(slot, "resumed", now_s)
