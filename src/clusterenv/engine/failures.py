"""Failures of environments and workers: report them, back off, start again. Pure.

The engine reports what happened; `Slots` decides what the user sees of it, `RestartBook` how soon to try again and when
to give up. The results are instructions and errors in the `State`.
"""

from __future__ import annotations

import logging

from clusterenv.code.missing import missing_package
from clusterenv.engine.inputs import Cause, Exit
from clusterenv.engine.instructions import Start
from clusterenv.engine.requests import Kind
from clusterenv.engine.slots import Loss
from clusterenv.engine.state import State
from clusterenv.engine.workers import Progress
from clusterenv.errors import CrashLoopError, EnvError, WorkerLostError
from clusterenv.events import Event
from clusterenv.memory.progress import PHASES
from clusterenv.recovery import Recovery, RestartBook
from clusterenv.wire.infos import Columns
from clusterenv.wire.requests import Attach, Build, Fault, Rebuild

__all__ = ["Failures", "env_error", "last_words"]


class Failures:
    def __init__(self, state: State, recovery: Recovery, attach: Attach) -> None:
        self._state = state
        self._recovery = recovery
        self._attach = attach
        """Sent to a new worker process after its `Build`."""
        self._book = RestartBook(recovery)

    # -- losses -----------------------------------------------------------------------------------------------

    def env_failed(self, worker: int, fault: Fault, in_fragment: bool, now_s: float) -> None:
        """Handle an environment that raised, or returned an invalid observation or reward."""
        state, slot = self._state, fault.slot
        state.events.add(
            Event(
                "env_error",
                fault.error,
                (slot,),
                worker,
                fault.phase,
                fault.seed,
                fault.incarnation,
                fault.step,
                fault.traceback,
            )
        )
        if self._recovery.on_error == "raise" or not state.rows.proven[slot]:
            self._raise_for(slot, env_error(fault), now_s)
            return
        try:
            not_before_s = self._book.failed(f"slot {slot}", f"{fault.phase}: {fault.error}", now_s)
        except CrashLoopError as error:
            self._raise_for(slot, error, now_s)
            return
        self._lose(slot, Loss(fault.error, False), in_fragment, now_s, not_before_s)

    def _raise_for(self, slot: int, error: Exception, now_s: float) -> None:
        """Report this loss by an exception, not by a row."""
        self._state.rows.give_up(slot)
        self._state.slots.lose_by_error(slot, str(error).partition("\n")[0], now_s)
        self._state.errors.append(error)

    def worker_exited(self, index: int, exit: Exit, at: Progress, now_s: float) -> set[Kind]:
        """Handle the end of a worker process; `at` is its last progress. Return the kinds of its open requests."""
        state, worker = self._state, self._state.workers[index]
        asked = {request.kind for request in state.requests.close_all(index)}
        slot, phase, _ = at
        reason = f"worker {index} {worker.exited(now_s) or exit.reason}"
        at_fault = slot if asked and slot in worker.slots else None
        place = f" in {PHASES[phase]}() of slot {slot}"
        event = Event(
            "worker_moved" if exit.cause is Cause.MOVED else "worker_lost",
            reason + (place if at_fault is not None else ""),
            tuple(worker.slots),
            index,
            PHASES[phase] if at_fault is not None else None,
            None,
            state.incarnations.numbers[slot] if at_fault is not None else None,
            None,
            exit.tail,
        )
        state.events.add(event, level=logging.INFO if exit.cause is Cause.MOVED else logging.WARNING)
        error: Exception | None = None
        if exit.cause is Cause.CRASHED:
            if at_fault is not None and not state.rows.proven[at_fault]:
                text = f"{reason}{place}, before its first successful step{last_words(exit.tail)}"
                error = WorkerLostError(text, slots=tuple(worker.slots))
                self._raise_for(at_fault, error, now_s)
            else:
                try:
                    subject = f"worker {index} (slots {worker.slots[0]}-{worker.slots[-1]})"
                    worker.start_at_s = self._book.failed(subject, reason, now_s)
                except CrashLoopError as crash_loop:
                    state.errors.append(crash_loop)
        if Kind.FRAGMENT in asked:
            state.rows.restore_last_obs(worker.slots)
        for its in worker.slots:
            if error is None or its != at_fault:
                self._lose(its, Loss(reason, True), Kind.FRAGMENT in asked, now_s, worker.start_at_s)
        return asked

    def _lose(self, slot: int, loss: Loss, in_fragment: bool, now_s: float, not_before_s: float) -> None:
        state = self._state
        if in_fragment:
            state.slots.lose_in_fragment(slot, loss.reason, now_s, not_before_s)
            return
        # The slots of a vector environment step together, so all of them report a loss if one has to.
        together = state.workers.of_slot(slot).slots if state.is_vector else [slot]
        row, episode = state.rows.row(slot, together), state.rows.episode(slot, together)
        reported = state.slots.lose(slot, loss, row, episode, now_s, not_before_s)
        if reported is not None:
            state.rows.report_loss(slot, reported)

    # -- coming back ------------------------------------------------------------------------------------------

    def due_workers(self, now_s: float) -> list[int]:
        """Return the workers that may be started now."""
        return [worker.index for worker in self._state.workers.absent() if worker.start_at_s <= now_s]

    def start_worker(self, index: int, now_s: float) -> None:
        state, worker = self._state, self._state.workers[index]
        worker.started()
        state.out.append(Start(index))
        build = Build(state.requests.next_number(), worker.slots, [0] * len(worker.slots), make=False)
        state.ask(index, Kind.BUILD, worker.slots, build, now_s)
        state.send(index, self._attach)
        event = Event("worker_replaced", f"worker {index} started again", tuple(worker.slots), index)
        state.events.add(event, level=logging.INFO)

    def rebuild_due(self, now_s: float) -> None:
        """Rebuild the environments that are due, on workers that run."""
        state = self._state
        for worker in state.workers:
            due = [] if worker.is_absent else state.slots.due(worker.slots, now_s)
            if due and state.is_vector:
                # The rows of its other slots may have arrived: nothing is rebuilt over them before they are delivered.
                due = [] if state.rows.has_row(worker.slots) else worker.slots
            if due:
                self._rebuild(worker.index, due, now_s)

    def _rebuild(self, worker: int, slots: list[int], now_s: float) -> None:
        state, incarnations = self._state, self._state.incarnations
        assert not state.rows.has_row(slots), f"slots {slots} have rows that were not delivered"
        seeds: list[int | None] = []
        options = None
        reserve = incarnations.begin_next(slots)
        if reserve is not None:
            state.out.append(reserve)
        for slot in slots:
            seed, options = state.rows.resetting.get(slot, (None, None))
            seeds.append(incarnations.seed(slot) if seed is None else seed)
        stickies = [incarnations.stickies[slot] for slot in slots]
        state.slots.rebuild(slots)
        number = state.requests.next_number()
        message = Rebuild(number, slots, state.incarnations_of(slots), seeds, options, stickies)
        state.ask(worker, Kind.REBUILD, slots, message, now_s)

    def rebuilt(self, slot: int, columns: Columns) -> None:
        """Record that a slot's next incarnation exists; its first row is on the undelivered side."""
        state = self._state
        event = Event("env_rebuilt", "started again", (slot,), incarnation=state.incarnations.numbers[slot])
        state.events.add(event, level=logging.DEBUG)
        if state.rows.awaited[slot] and not state.rows.ready[slot]:
            state.rows.first_row(slot, columns, state.slots.rebuilt(slot))
        else:
            state.slots.hold(slot, columns)

    def check_late(self, now_s: float) -> None:
        """Report awaited slots that have been gone for too long as an error."""
        limit_s, rows = self._recovery.recovery_timeout_s, self._state.rows
        late = self._state.slots.late(rows.awaited & ~rows.ready, now_s, limit_s)
        if late:
            rows.stop_waiting(late)
            text = (
                f"the environments of slots {late} did not come back within recovery_timeout_s={limit_s}; see events()"
            )
            self._state.errors.append(WorkerLostError(text, slots=tuple(late)))


def env_error(fault: Fault, where: str = "") -> EnvError:
    advice = missing_package(fault.traceback, where) if where else ""
    return EnvError(
        f"the environment of slot {fault.slot} failed in {fault.phase}: {fault.error} "
        f"(seed {fault.seed}, incarnation {fault.incarnation}, step {fault.step}){': ' * bool(advice)}{advice}"
        f"\n{fault.traceback}",
        slot=fault.slot,
        phase=fault.phase,
        remote_traceback=fault.traceback,
    )


def last_words(tail: str) -> str:
    return f"; its last output:\n{tail.rstrip()}" if tail.strip() else ""
