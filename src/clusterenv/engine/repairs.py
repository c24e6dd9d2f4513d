"""What becomes of environments and workers that fail: told of, waited for, started again.

The pool says what happened; `Losses` decides what the user sees of it, `RestartBook` how soon to try again and when to
give up. What has to be asked of workers goes through the pool.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Protocol

from clusterenv.code.missing import missing_package
from clusterenv.engine.fragments import FragmentDesk
from clusterenv.engine.health import HangWatch, LongCalls
from clusterenv.engine.incarnations import Lives
from clusterenv.engine.inputs import Cause, Exit
from clusterenv.engine.requests import Kind, Request, Requests
from clusterenv.engine.rows import Delivery
from clusterenv.engine.slots import Loss, Losses, Seen
from clusterenv.errors import ClusterEnvError, CrashLoopError, EnvError, WorkerLostError
from clusterenv.events import Event, EventLog
from clusterenv.executors.contract import Crew
from clusterenv.recovery import Recovery, RestartBook
from clusterenv.wire import infos as info_columns
from clusterenv.wire.requests import Build, Fault, Rebuild
from clusterenv.worker.envs import PHASES

__all__ = ["Repairs", "env_error", "innermost_line", "last_words"]

_LOOK_S = 0.2
"""How often hangs are looked for."""


class Host(Protocol):
    """What is needed of the pool."""

    slots_of: list[list[int]]
    is_vector: bool
    events: EventLog
    desk: FragmentDesk
    rows: Delivery

    def number(self) -> int: ...
    def post(self, worker: int, kind: Kind, slots: list[int], message: Any) -> Request: ...
    def attach(self, worker: int) -> None: ...
    def incarnations(self, slots: list[int]) -> list[int]: ...


class Repairs:
    def __init__(self, host: Host, crew: Crew, recovery: Recovery, lives: Lives, losses: Losses) -> None:
        self._host = host
        self._crew = crew
        self._recovery = recovery
        self._lives = lives
        self._losses = losses
        self._book = RestartBook(recovery)
        self._hangs = HangWatch(len(host.slots_of))
        self._hung: dict[int, str] = {}  # killed for it; why
        self._long_calls = LongCalls(len(host.slots_of), recovery.warn_after_s)
        self._looked_at = 0.0

    def began(self, worker: int, now: float) -> None:
        """It was asked for something."""
        self._hangs.began(worker, now)

    def env_gone(self, worker: int, fault: Fault, collecting: bool = False) -> ClusterEnvError | None:
        """Record the failure of one environment. Returns what the caller has to raise, if it is not to be repaired."""
        slot = fault.slot
        event = Event(
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
        self._host.events.add(event)
        self._losses.slot_gone(slot, time.monotonic())
        if self._recovery.on_error == "raise" or not self._host.rows.proven[slot]:
            self._give_up(slot)
            return env_error(fault)
        try:
            until = self._book.failed(f"slot {slot}", f"{fault.phase}: {fault.error}", time.monotonic())
        except CrashLoopError as error:
            self._give_up(slot)
            return error
        self._settle(worker, slot, Loss(fault.error, False), until, collecting)
        return None

    def _give_up(self, slot: int) -> None:
        """Its loss is reported by an exception, not by a row."""
        rows = self._host.rows
        rows.awaited[slot] = rows.started[slot] = False
        rows.resetting.pop(slot, None)

    def worker_gone(self, worker: int, exit: Exit, asked: set[Kind]) -> None:
        """`asked`: the kinds of what it had to do."""
        slot, phase, _ = self._crew.progress(worker)
        slots, rows = self._host.slots_of[worker], self._host.rows
        reason = f"worker {worker} {self._hung.pop(worker, None) or exit.reason}"
        at_fault = slot if asked and slot in slots else None
        place = f" in {PHASES[phase]}() of slot {slot}"
        event = Event(
            "worker_moved" if exit.cause is Cause.MOVED else "worker_lost",
            reason + (place if at_fault is not None else ""),
            tuple(slots),
            worker,
            PHASES[phase] if at_fault is not None else None,
            None,
            self._lives.incarnations[slot] if at_fault is not None else None,
            None,
            exit.tail,
        )
        self._host.events.add(event, level=logging.INFO if exit.cause is Cause.MOVED else logging.WARNING)
        now = time.monotonic()
        self._losses.worker_gone(worker, slots, now)  # whatever is raised below, a later reset() finds the worker
        (self._host.desk.moved if exit.cause is Cause.MOVED else self._host.desk.lost)(worker)
        until, error = now, None
        has_crashed = exit.cause is Cause.CRASHED
        if at_fault is not None and has_crashed and not rows.proven[at_fault]:
            self._give_up(at_fault)
            error = WorkerLostError(
                f"{reason}{place}, before its first successful step{last_words(exit.tail)}", slots=tuple(slots)
            )
        elif has_crashed:
            until = self._book.failed(f"worker {worker} (slots {slots[0]}-{slots[-1]})", reason, now)
        self._losses.respawn[worker] = until
        collecting = Kind.FRAGMENT in asked
        for its in slots:
            if error is None or its != at_fault:
                self._settle(worker, its, Loss(reason, True), until, collecting)
        if error is not None:
            raise error

    def _settle(self, worker: int, slot: int, loss: Loss, until: float, collecting: bool) -> None:
        if collecting:
            self._losses.settle_collecting(slot, until)
            return
        rows = self._host.rows
        # The slots of a vector environment step together, and so all report a loss if one of them has to.
        together = self._host.slots_of[worker] if self._host.is_vector else [slot]
        has_ended = all(rows.has_ended(other) for other in together)
        seen = Seen(
            started=bool(rows.started[slot]),
            ended=has_ended,
            awaited=bool(rows.awaited[slot]),
            resetting=slot in rows.resetting,
            ready=bool(rows.ready[slot]),
            ready_ends=has_ended,
            ready_is_loss=bool(rows.is_loss[slot]),
        )
        if self._losses.settle(slot, loss, until, time.monotonic(), seen):
            rows.tell_loss(slot, self._losses.lost.pop(slot))

    def rebuilt(self, slot: int, columns: info_columns.Columns) -> None:
        event = Event("env_rebuilt", "started again", (slot,), incarnation=self._lives.incarnations[slot])
        self._host.events.add(event, level=logging.DEBUG)
        if self._host.rows.awaited[slot] and not self._host.rows.ready[slot]:
            self._host.rows.begin_again(slot, columns, self._losses.lost.pop(slot, None))
        else:
            self._losses.held[slot] = columns

    def start_due(self) -> None:
        """Start what is due: workers first, then the environments of running workers."""
        now, losses = time.monotonic(), self._losses
        for worker, when in list(losses.respawn.items()):
            if when <= now and self._crew.can_start(worker):
                del losses.respawn[worker]
                self._crew.start(worker)
                slots = self._host.slots_of[worker]
                build = Build(self._host.number(), slots, [0] * len(slots), make=False)
                self._host.post(worker, Kind.BUILD, slots, build)
                self._host.attach(worker)
                event = Event("worker_replaced", f"worker {worker} started again", tuple(slots), worker)
                self._host.events.add(event, level=logging.INFO)
        for worker, slots in enumerate(self._host.slots_of):
            if worker not in losses.respawn and self._crew.is_running(worker):
                due = losses.start_due(slots, now)
                if due:
                    self._rebuild(worker, slots if self._host.is_vector else due)

    def _rebuild(self, worker: int, slots: list[int]) -> None:
        lives = self._lives
        assert not self._host.rows.has_row(slots), f"slots {slots} have rows that were not delivered"
        seeds: list[int | None] = []
        options = None
        for slot in slots:
            lives.incarnations[slot] += 1
            seed, options = self._host.rows.resetting.get(slot, (None, None))
            seeds.append(lives.seed(slot) if seed is None else seed)
        stickies = [lives.stickies[slot] for slot in slots]
        self._losses.rebuild(slots)
        message = Rebuild(self._host.number(), slots, self._host.incarnations(slots), seeds, options, stickies)
        self._host.post(worker, Kind.REBUILD, slots, message)

    def check(self) -> None:
        """Raise for what is waited for, and was gone for too long."""
        limit_s, rows = self._recovery.recovery_timeout_s, self._host.rows
        late = [
            slot for slot in self._losses.late(time.monotonic(), limit_s) if rows.awaited[slot] and not rows.ready[slot]
        ]
        if late:
            rows.awaited[late] = False
            raise WorkerLostError(
                f"the environments of slots {late} did not come back within recovery_timeout_s={limit_s}; see events()",
                slots=tuple(late),
            )

    def look_for_hangs(self, requests: Requests) -> None:
        """Kill workers that have something to do and have not moved for too long; warn of them before."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for worker in range(len(self._host.slots_of)):
            if not requests.is_busy(worker) or worker in self._hung or worker in self._losses.respawn:
                continue
            at = self._crew.progress(worker)
            phase = PHASES[at[1]]
            stuck_s, limit_s = self._hangs.stuck_s(worker, at, now), self._recovery.timeout_s(phase)
            if limit_s is not None and stuck_s > limit_s:
                self._hung[worker] = f"hung for {stuck_s:.1f} s ({phase}_timeout_s={limit_s})"
                self._crew.kill(worker)
            elif at[0] >= 0 and self._long_calls.is_due(worker, stuck_s):
                self._crew.stack(worker)

    def long_call(self, worker: int, stack: str) -> None:
        """Warn of a worker that has been in one call for long; `stack` says where."""
        slot, phase, _ = at = self._crew.progress(worker)
        stuck_s, limit_s = self._hangs.stuck_s(worker, at, time.monotonic()), self._recovery.timeout_s(PHASES[phase])
        if stuck_s == 0.0:
            return  # it went on meanwhile
        limit = "no limit" if limit_s is None else f"{PHASES[phase]}_timeout_s={limit_s:g}"
        place = innermost_line(stack)
        reason = f"worker {worker} has been in one call for {stuck_s:.0f} s ({limit}){' at ' * bool(place)}{place}"
        self._host.events.add(Event("long_call", reason, (slot,), worker, PHASES[phase], detail=stack))


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


def innermost_line(stack: str) -> str:
    """The line of a faulthandler text in which the main thread is: "env.py:12 in step"; empty where there is none."""
    _, _, current = stack.partition("Current thread ")
    found = re.search(r'File "(.*)", line (\d+) in (.*)', current)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else ""


def last_words(tail: str) -> str:
    return f"; its last words:\n{tail.rstrip()}" if tail.strip() else ""
