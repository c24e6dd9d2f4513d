"""The environments of one machine: which slot is where, what the user awaits, and what happens when one fails.

`ClusterEnv` sends steps and resets and collects rows; a crew (`ProcessCrew`, `InlineCrew`) does the I/O. A slot whose
environment is gone is rebuilt in its next incarnation: the user sees the episode end once, as truncated and invalid,
and then the first row of the new episode, never the two spliced.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from clusterenv import infos as info_columns
from clusterenv.errors import DeadlineError, EnvError, PolicyError, SpecError, UsageError, WorkerLostError
from clusterenv.events import Event, EventLog
from clusterenv.infos import Columns
from clusterenv.pool.collecting import FragmentDesk, of_slots
from clusterenv.pool.group import PHASES
from clusterenv.pool.inline import InlineCrew
from clusterenv.pool.layout import Buffers, assemble, flatten, make_layout
from clusterenv.pool.messages import (
    Act,
    Acted,
    Attach,
    Build,
    Built,
    Call,
    Fault,
    Rebuild,
    Reply,
    Reset,
    SetAttr,
    Step,
    Sticky,
)
from clusterenv.pool.processes import Exit, ProcessCrew
from clusterenv.recovery import Recovery, RestartBook

__all__ = ["Pool", "Rows"]

_WATCH_S = 0.25
"""How often a wait looks whether anybody hangs."""

_LOOK_EVERY = 16
"""Steps of the hot loop between two looks at everything, not only at the workers' answers."""

_SLOW_FACTOR = 5.0
_SLOW_S = 0.001
"""Below this a step's time is the scheduler's noise, not the environment's."""
_SLOW_EVERY = 256


class Rows(NamedTuple):
    """One delivery. Arrays have one row per entry of `slots`, ascending."""

    slots: Any  # [n] ints
    obs: Any
    rewards: Any
    terminations: Any
    truncations: Any
    infos: dict[str, Any]
    lost: dict[int, str]
    """Rows whose episode was lost, by row number, with the reason."""


class _Ticket(NamedTuple):
    kind: str  # "step", "reset", "rebuild", "call" or "build"
    slots: list[int]


class Pool:
    """A member: the slots of one machine."""

    def __init__(
        self,
        crew: ProcessCrew | InlineCrew,
        slots_of: list[list[int]],
        mode: AutoresetMode | None,
        recovery: Recovery,
        *,
        is_vector: bool,
        events: EventLog,
    ) -> None:
        n = sum(map(len, slots_of))
        self._crew = crew
        self.slots_of = slots_of
        self._worker_of = [w for w, slots in enumerate(slots_of) for _ in slots]
        self._recovery = recovery
        self.is_vector = is_vector
        self._book = RestartBook(recovery)
        self.events = events
        self.num_envs = n
        self._everyone = np.arange(n)
        self._request = 0
        self._open: list[dict[int, _Ticket]] = [{} for _ in slots_of]
        self._watch: list[tuple[Any, float]] = [((), 0.0) for _ in slots_of]
        self._hang: dict[int, str] = {}
        self._entropy = int(np.random.SeedSequence().entropy)  # type: ignore[arg-type]
        self._seed_base: list[int] = [self._entropy] * n
        self._incarnation = [0] * n
        self._stickies: list[list[Sticky]] = [[] for _ in range(n)]
        # What the user asked for and has not got yet.
        self._awaited = np.zeros(n, dtype=np.bool_)
        self._ready = np.zeros(n, dtype=np.bool_)
        self._ready_count = 0
        self._sent = False  # something was sent outside the hot loop, and may be awaited still
        self._resetting: dict[int, tuple[int | None, Any]] = {}  # awaited resets: seed, options
        self._columns: list[Columns] = []
        self._objects: list[list[Any]] = [[] for _ in range(n)]
        # What is known of each slot's episode.
        self.started = np.zeros(n, dtype=np.bool_)
        self.ended = np.zeros(n, dtype=np.bool_)
        self._proven = np.zeros(n, dtype=np.bool_)
        self._all_proven = False
        # Trouble: empty in the normal case.
        self._gone: dict[int, float] = {}  # slots without an environment, since when
        self._lost: dict[int, str] = {}  # episodes that ended with them, not yet told to the user
        self._lost_rows: dict[int, str] = {}  # told in the coming delivery
        self._held: dict[int, Columns] = {}  # first rows of new incarnations that nobody awaits yet
        self._due: dict[int, float] = {}  # slots to rebuild, and when
        self._rebuilding: set[int] = set()  # asked of a worker, not answered yet
        self._until: dict[int, float] = {}  # backoff: not before
        self._respawn: dict[int, float] = {}  # workers to start again, and when
        self._called: dict[int, Reply] = {}
        self.acted: list[Acted] = []  # what the workers' policy did in the step under way
        self._inbox: deque[tuple[int, Any]] = deque()
        self._slow: set[int] = set()
        self._deliveries = 0
        self.desk = FragmentDesk(self)
        self.mode = mode or AutoresetMode.NEXT_STEP
        try:
            self._start(mode)
        except BaseException:
            crew.close(0.0)
            raise

    # -- starting ---------------------------------------------------------------------------------------------

    def _start(self, mode: AutoresetMode | None) -> None:
        builds: dict[int, int] = {}
        for worker, slots in enumerate(self.slots_of):
            self._crew.start(worker)
            seeds = [self._incarnation_seed(slot) for slot in slots]
            builds[worker] = self.post(worker, "build", slots, Build(self.number(), slots, seeds))
        built: dict[int, Built] = {}
        while len(built) < len(builds):
            for worker, message in self._wait(None):
                if isinstance(message, Exit):
                    raise WorkerLostError(
                        f"worker {worker} {message.reason} while it made the environment of slot "
                        f"{self._crew.progress(worker)[0]}{_quote(message.tail)}",
                        slots=tuple(self.slots_of[worker]),
                    )
                if message.faults:
                    raise _env_error(message.faults[0])
                self._open[worker].clear()
                built[worker] = message
        self._adopt(built, mode)

    def _adopt(self, built: dict[int, Built], mode: AutoresetMode | None) -> None:
        first = built[0]
        for worker in sorted(built):
            other = built[worker]
            odd_slot, odd = other.odd_slot, other.odd_spaces
            if odd_slot is None and (
                other.observation_space != first.observation_space or other.action_space != first.action_space
            ):
                odd_slot, odd = self.slots_of[worker][0], (other.observation_space, other.action_space)
            if odd_slot is not None:
                raise SpecError(
                    "all environments must have the same spaces: slot 0 has "
                    f"{first.observation_space} and {first.action_space}, slot {odd_slot} has {odd[0]} and {odd[1]}"
                )
        for name, space in (("observation", first.observation_space), ("action", first.action_space)):
            if not isinstance(space, Space):
                raise SpecError(f"the environment's {name}_space is {space!r}: expected a gymnasium Space")
        self.single_observation_space: Space[Any] = first.observation_space
        self.single_action_space: Space[Any] = first.action_space
        self.render_mode = first.render_mode
        self.metadata = dict(first.metadata)
        if self.is_vector and mode is None:
            own = first.metadata.get("autoreset_mode")
            self.mode = own if isinstance(own, AutoresetMode) else AutoresetMode.NEXT_STEP
        layout = make_layout(self.single_observation_space, self.single_action_space, self.num_envs)
        if self.is_vector and (not layout.actions_are_shared or any(leaf.dtype is None for leaf in layout.obs)):
            raise SpecError("Vector(fn) takes spaces of a fixed size only (no Text, Sequence, Graph)")
        self.layout = layout
        self.buffers = Buffers(layout, self._crew.allocate(layout.size))
        self._side: int | None = 0  # which side of the observations was delivered last, if it is the same for all
        for worker in built:
            self._attach(worker)

    def _attach(self, worker: int) -> None:
        attach = Attach(self.layout, self.single_observation_space, self.single_action_space)
        self._crew.send(worker, attach)

    def number(self) -> int:
        self._request = self._request % 0xFFFF_FFFF + 1
        return self._request

    def post(self, worker: int, kind: str, slots: list[int], message: Any) -> int:
        """Open a ticket and send; `message.request` is its number."""
        self._open[worker][message.request] = _Ticket(kind, slots)
        self._crew.send(worker, message)
        self._watch[worker] = ((), time.monotonic())
        number: int = message.request
        return number

    # -- requests ---------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return self._sent and bool(self._awaited.any())

    @property
    def awaited(self) -> Any:
        return self._awaited

    def step_all(self) -> bool:
        """The hot loop: step every slot with the actions in shared memory. True: `deliver_all` has the rows.

        False, where anything unusual happened: the step is under way, and `collect` and `deliver` go on with it.
        """
        if self._request % _LOOK_EVERY == 0:  # workers' output, and whatever else the hot loop does not read
            self._inbox.extend(self._crew.wait(0.0))
        if self._gone or self._held or self._inbox or any(self._open):
            self.send_step(None, None)
            return False
        number = self.number()
        crew, done = self._crew, 0
        try:
            crew.ring(number)
            for worker in range(len(self.slots_of)):
                messages = crew.take(worker)
                if len(messages) != 1 or not self._is_plain(messages[0], number):
                    self._inbox.extend((worker, message) for message in messages)
                    break
                done += 1
        finally:
            if done < len(self.slots_of):
                self._awaited[:] = self._sent = True
                now = time.monotonic()
                for worker, slots in enumerate(self.slots_of):
                    if worker < done:
                        self._mark_ready(slots)
                    else:
                        self._open[worker][number] = _Ticket("step", slots)
                        self._watch[worker] = ((), now)
        return done == len(self.slots_of)

    def _is_plain(self, message: Any, number: int) -> bool:
        """The answer to a whole step, with nothing wrong in it; its infos and objects are kept."""
        if message == number:
            return True
        if not isinstance(message, Reply) or message.request != number or message.faults:
            return False
        self._take_rows(message)
        return True

    def deliver_all(self, copy: bool) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The rows of a `step_all` that went well."""
        buffers = self.buffers
        if self._side is None:
            buffers.side ^= 1
            self._find_side()
        else:
            self._side = 1 - self._side
            buffers.side.fill(self._side)
        obs = self._gather(self._everyone, True, copy)
        terminations, truncations = buffers.terminated.copy(), buffers.truncated.copy()
        np.logical_or(terminations, truncations, out=self.ended)
        infos = {}
        if self._columns:
            infos = info_columns.batch(self._columns, self.num_envs)
            self._columns = []
        if not self._all_proven:
            self._proven[:] = True
            self._all_proven = True
        self._deliveries += 1
        if self._deliveries % _SLOW_EVERY == 0:
            self._name_slow()
        return obs, buffers.reward.copy(), terminations, truncations, infos

    def _find_side(self) -> None:
        side = self.buffers.side
        self._side = int(side[0]) if (side == side[0]).all() else None

    def send_step(
        self, slots: list[int] | None, actions: list[Any] | None, knobs: dict[str, Any] | None = None
    ) -> None:
        """Step these slots (None: all) with the actions in shared memory, with `actions` as objects, or (`knobs`)
        with what the workers' policy chooses."""
        chosen = list(range(self.num_envs)) if slots is None else slots
        self._awaited[chosen] = self._sent = True
        whole: list[list[int]] = [[] for _ in self.slots_of]
        place = {slot: i for i, slot in enumerate(chosen)}
        for slot in chosen:
            if slot in self._held:
                self._finish_rebuilt(slot, self._held.pop(slot))
            elif slot in self._lost and self.mode is not AutoresetMode.SAME_STEP:
                self._tell_loss(slot)
            elif slot in self._gone:  # awaited: its first row, or the reset row
                if slot not in self._rebuilding:
                    self._due.setdefault(slot, self._until[slot])
            else:
                whole[self._worker_of[slot]].append(slot)
        for worker, its_slots in enumerate(whole):
            if its_slots:
                its_slots.sort()
                objects = None if actions is None else [actions[place[slot]] for slot in its_slots]
                act = None
                if knobs is not None:
                    own = {name: of_slots(value, its_slots) for name, value in knobs.items()}
                    act = Act(own, self.incarnations(its_slots))
                self.post(worker, "step", its_slots, Step(self.number(), its_slots, objects, act))

    def send_reset(self, slots: list[int], seeds: list[int | None], options: dict[str, Any] | None) -> None:
        self._awaited[slots] = self._sent = True
        healthy: list[list[int]] = [[] for _ in self.slots_of]
        for slot, seed in zip(slots, seeds, strict=True):
            self._resetting[slot] = (seed, options)
            self._lost.pop(slot, None)
            self._held.pop(slot, None)
            if slot in self._gone:
                self._due[slot] = self._until[slot]
            else:
                healthy[self._worker_of[slot]].append(slot)
        asked = dict(zip(slots, seeds, strict=True))
        for worker, its_slots in enumerate(healthy):
            if its_slots:
                its_seeds = [asked[slot] for slot in its_slots]
                self.post(worker, "reset", its_slots, Reset(self.number(), its_slots, its_seeds, options))

    def set_seed_base(self, bases: Iterable[int | None]) -> None:
        """What later incarnations derive their seeds from; None keeps what was there."""
        self._seed_base = [old if new is None else new for old, new in zip(self._seed_base, bases, strict=True)]

    def _incarnation_seed(self, slot: int) -> int:
        sequence = np.random.SeedSequence((abs(self._seed_base[slot]), slot, self._incarnation[slot]))
        return int(sequence.generate_state(1, np.uint32)[0] >> 1)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, sticky: bool) -> list[Any]:
        self._refuse_gone(f"call({name!r})")
        results: list[Any] = []
        requests = {
            w: self.post(w, "call", slots, Call(self.number(), slots, name, args, kwargs))
            for w, slots in enumerate(self.slots_of)
        }
        for reply in self.replies(requests):
            results += reply.result or []
        if sticky:
            for stickies in self._stickies:
                stickies.append(Sticky(name, args, kwargs, True))
        return results

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Set on every environment that is there, and on every later incarnation."""
        for slot, value in enumerate(values):
            kept = [s for s in self._stickies[slot] if s.is_call or s.name != name]
            self._stickies[slot] = [*kept, Sticky(name, (value,), {}, False)]
        requests = {}
        for worker, slots in enumerate(self.slots_of):
            here = [slot for slot in slots if slot not in self._gone]
            if here:
                message = SetAttr(self.number(), here, name, [values[slot] for slot in here])
                requests[worker] = self.post(worker, "call", here, message)
        self.replies(requests)

    def _refuse_gone(self, what: str) -> None:
        if self._gone:
            slots = tuple(sorted(self._gone))
            raise WorkerLostError(
                f"{what}: the environments of slots {list(slots)} failed and are not back yet; step or reset first",
                slots=slots,
            )

    def replies(self, requests: dict[int, int]) -> list[Reply]:
        while not set(requests.values()) <= self._called.keys():
            lost = [w for w, number in requests.items() if number not in self._called | self._open[w]]
            if lost:
                slots = tuple(slot for w in lost for slot in self.slots_of[w])
                raise WorkerLostError(f"workers {lost} died during the call; see events()", slots=slots)
            self.turn(None)
        replies = [self._called.pop(number) for number in requests.values()]
        for reply in replies:
            if reply.faults:
                raise _env_error(reply.faults[0])
        return replies

    # -- collecting -------------------------------------------------------------------------------------------

    def collect(self, min_rows: int, timeout_s: float | None) -> None:
        """Wait until at least `min_rows` awaited slots have a row."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._ready_count < min_rows:
            if deadline is not None and time.monotonic() >= deadline:
                late = np.flatnonzero(self._awaited & ~self._ready).tolist()
                workers = sorted({self._worker_of[slot] for slot in late})
                raise DeadlineError(
                    f"{self._ready_count} of {min_rows} rows within {timeout_s} s; awaited: slots {late} of "
                    f"workers {workers}. Nothing is lost: call recv() again."
                )
            self.turn(deadline)

    def _mark_ready(self, slots: list[int]) -> None:
        if slots:
            # Consecutive, mostly: a slice is set faster than a list of indices.
            whole = slots[-1] - slots[0] + 1 == len(slots)
            self._ready[slice(slots[0], slots[-1] + 1) if whole else slots] = True
            self._ready_count += len(slots)

    def deliver(self, copy: bool) -> Rows:
        """Hand over every row that is ready, ascending by slot."""
        ready, buffers = self._ready, self.buffers
        everyone = self._ready_count == self.num_envs
        slots = self._everyone if everyone else np.flatnonzero(ready)
        rows: Any = slice(None) if everyone else slots
        lost = {}
        if self._lost_rows or self._columns:
            row_of = {int(slot): i for i, slot in enumerate(slots)}
            lost = {row_of[slot]: reason for slot, reason in self._lost_rows.items()}
            if everyone:
                infos = info_columns.batch(self._columns, self.num_envs)
            else:
                parts = [info_columns.select(columns, row_of) for columns in self._columns]
                infos = info_columns.batch(parts, len(slots))
        else:
            infos = {}
        if everyone and self._side is not None:
            self._side = 1 - self._side
            buffers.side[:] = self._side
        else:
            buffers.side[rows] ^= 1
            self._find_side()
        rewards, terminations = buffers.reward[rows].copy(), buffers.terminated[rows].copy()
        truncations = buffers.truncated[rows].copy()
        obs = self._gather(slots, everyone, copy)
        was_reset = [slot for slot in slots.tolist() if slot in self._resetting] if self._resetting else []
        self.started[rows] = True
        if not self._all_proven and not was_reset and not self._lost_rows:
            self._proven[rows] = True
            self._all_proven = bool(self._proven.all())
        self.ended[rows] = terminations | truncations
        self._awaited[rows] = False
        self._ready[rows] = False
        self._ready_count = 0
        self._sent = bool(self._awaited.any())
        for slot in was_reset:
            del self._resetting[slot]
        self._columns = []
        told, self._lost_rows = self._lost_rows, {}
        if told and self.mode is AutoresetMode.NEXT_STEP:
            for slot in told:  # its reset row comes next; begin now
                self._due.setdefault(slot, self._until[slot])
        self._deliveries += 1
        if self._deliveries % _SLOW_EVERY == 0:
            self._name_slow()
        return Rows(slots, obs, rewards, terminations, truncations, infos, lost)

    def peek_obs(self, slots: Any) -> Any:
        """The observations last delivered for these slots."""
        return self._gather(slots, len(slots) == self.num_envs, True)

    def _gather(self, slots: Any, everyone: bool, copy: bool) -> Any:
        side = self.buffers.side
        values: list[Any] = []
        place = -1
        for array in self.buffers.obs:
            if array is None:
                place += 1
                values.append(tuple(self._objects[slot][place] for slot in slots.tolist()))
            elif everyone and self._side is not None:
                values.append(array[self._side].copy() if copy else array[self._side])
            else:
                values.append(array[side[slots], slots])
        return assemble(self.single_observation_space, iter(values))

    # -- turning events into state ----------------------------------------------------------------------------

    def turn(self, deadline: float | None) -> None:
        """Wait for something, and take it in."""
        if self._due or self._respawn:
            self._pump()
        self._inbox.extend(self._wait(deadline))
        while self._inbox:  # kept across calls: taking a message in may raise, and the next must not be lost
            worker, message = self._inbox.popleft()
            if isinstance(message, int):
                self._mark_ready(self._open[worker].pop(message).slots)
            elif isinstance(message, Reply):
                self._take(worker, message)
            elif isinstance(message, Exit):
                self._worker_gone(worker, message)
            elif isinstance(message, Built):
                self._open[worker].pop(message.request, None)
        if self._gone:
            self._check_recovery()

    def _wait(self, deadline: float | None) -> list[tuple[int, Any]]:
        timeout_s = _WATCH_S
        if deadline is not None or self._due or self._respawn:
            now = time.monotonic()
            for when in (*self._due.values(), *self._respawn.values()):
                timeout_s = min(timeout_s, max(0.001, when - now))
            if deadline is not None:
                timeout_s = min(timeout_s, max(0.0, deadline - now))
        messages = self._crew.wait(timeout_s)
        if not messages and not self._crew.is_inline:
            self._look_for_hangs()
        return messages

    def _take(self, worker: int, reply: Reply) -> None:
        ticket = self._open[worker].get(reply.request)
        if ticket is None:
            return  # a late reply to a request that nobody waits for any more
        if reply.last:
            del self._open[worker][reply.request]
        if ticket.kind == "call":
            self._called[reply.request] = reply
            return
        if ticket.kind in ("policy", "fragment"):
            self.desk.took(worker, ticket.kind, reply)
            for fault in reply.faults:
                self._env_gone(worker, fault, collecting=True)
            return
        failed = {fault.slot for fault in reply.faults}
        good = [slot for slot in reply.slots if slot not in failed]
        if ticket.kind == "rebuild":
            self._rebuilding -= set(reply.slots)
            for slot in good:
                self._gone.pop(slot, None)
                columns = info_columns.select(reply.infos, {slot: slot}) if reply.infos else {}
                self._rebuilt(slot, columns)
            for slot, objects in reply.objects or ():
                self._objects[slot] = objects
        else:
            if isinstance(reply.result, Acted):
                self.acted.append(reply.result)
            elif reply.result is not None:  # the policy failed, so nothing was stepped
                self._awaited[ticket.slots] = False
                self.desk.took(worker, "policy", reply)
                raise self.desk.policy_error() or AssertionError("a policy error without an error")
            self._mark_ready(good)
            self._take_rows(reply)
        for fault in reply.faults:
            self._env_gone(worker, fault)

    def _take_rows(self, reply: Reply) -> None:
        for slot, objects in reply.objects or ():
            self._objects[slot] = objects
        if reply.infos:
            self._columns.append(reply.infos)

    def _env_gone(self, worker: int, fault: Fault, collecting: bool = False) -> None:
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
        self.events.add(event)
        self._gone[slot] = self._until[slot] = time.monotonic()
        if self._recovery.on_error == "raise" or not self._proven[slot]:
            self._awaited[slot] = False
            self._resetting.pop(slot, None)
            self.started[slot] = False
            raise _env_error(fault)
        until = self._book.failed(f"slot {slot}", f"{fault.phase}: {fault.error}", time.monotonic())
        if collecting:  # the fragment itself says which of its rows are invalid
            self._until[slot] = self._due[slot] = until
        else:
            self._after_loss(slot, fault.error, until)

    def _worker_gone(self, worker: int, exit: Exit) -> None:
        slot, phase, _ = self._crew.progress(worker)
        busy = bool(self._open[worker])
        hang = self._hang.pop(worker, None)
        reason = f"worker {worker} {hang or exit.reason}"
        slots = self.slots_of[worker]
        at_fault = slot if busy and slot in slots else None
        self.events.add(
            Event(
                "worker_lost",
                reason + (f" in {PHASES[phase]}() of slot {slot}" if at_fault is not None else ""),
                tuple(slots),
                worker,
                PHASES[phase] if at_fault is not None else None,
                None,
                self._incarnation[slot] if at_fault is not None else None,
                None,
                exit.tail,
            )
        )
        tickets = list(self._open[worker].values())
        self._open[worker].clear()
        now = time.monotonic()
        for its in slots:
            self._gone.setdefault(its, now)
            self._until[its] = now
            self._due.pop(its, None)
            self._rebuilding.discard(its)
        self._respawn[worker] = now  # whatever is raised below, a later reset() finds the worker
        self.desk.lost(worker)
        if at_fault is not None and not self._proven[at_fault]:
            self._awaited[slots] = False
            self.started[slots] = False
            raise WorkerLostError(
                f"{reason} in {PHASES[phase]}() of slot {at_fault}, before its first successful step"
                f"{_quote(exit.tail)}",
                slots=tuple(slots),
            )
        collecting = any(ticket.kind == "fragment" for ticket in tickets)
        until = self._book.failed(f"worker {worker} (slots {slots[0]}-{slots[-1]})", reason, now)
        self._respawn[worker] = until
        for its in slots:
            if collecting:
                self._held.pop(its, None)
                self._until[its] = self._due[its] = until
            else:
                self._after_loss(its, reason, until)

    def _after_loss(self, slot: int, reason: str, until: float) -> None:
        """The slot has no environment. Decide what the user sees of it, and when it comes back."""
        self._gone[slot] = time.monotonic()
        self._until[slot] = until
        was_held = self._held.pop(slot, None) is not None
        if self._ready[slot]:
            # Its row arrived whole before the loss, and is delivered; what follows it is lost.
            if not (self.buffers.terminated[slot] or self.buffers.truncated[slot]):
                self._lost[slot] = reason
            elif self.mode is AutoresetMode.NEXT_STEP:
                self._due[slot] = until
            return
        between = bool(self.ended[slot]) and self.mode is AutoresetMode.NEXT_STEP
        if slot in self._resetting or was_held or (between and self.started[slot]):
            self._due[slot] = until
        elif self.started[slot]:
            self._lost[slot] = reason
            if self._awaited[slot]:
                if self.mode is AutoresetMode.SAME_STEP:
                    self._due[slot] = until
                else:
                    self._tell_loss(slot)

    def _tell_loss(self, slot: int) -> None:
        """Make the row that says: this episode was lost. Its observation is the last one delivered."""
        buffers = self.buffers
        self._lost_rows[slot] = self._lost.pop(slot)
        for array in buffers.obs:
            if array is not None:
                side = buffers.side[slot]
                array[1 - side, slot] = array[side, slot]
        buffers.reward[slot] = 0.0
        buffers.terminated[slot] = False
        buffers.truncated[slot] = True
        self._mark_ready([slot])

    def _rebuilt(self, slot: int, columns: Columns) -> None:
        event = Event("env_rebuilt", "started again", (slot,), incarnation=self._incarnation[slot])
        self.events.add(event, level=logging.DEBUG)
        if self._awaited[slot]:
            self._finish_rebuilt(slot, columns)
        else:
            self._held[slot] = columns

    def _finish_rebuilt(self, slot: int, columns: Columns) -> None:
        """The first row of the new incarnation becomes the row that the user awaits."""
        if slot in self._lost:  # SAME_STEP: the loss and the new episode share a row
            last = self.peek_obs(np.array([slot]))
            final = {"final_obs": _first(self.single_observation_space, last), "final_info": {}}
            self._columns.append(info_columns.pack([(slot, final)]))
            self._lost_rows[slot] = self._lost.pop(slot)
            self.buffers.truncated[slot] = True
        self._columns.append(columns)
        self._mark_ready([slot])

    # -- bringing back ----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start what is due: workers first, then the environments of running workers."""
        now = time.monotonic()
        for worker, when in list(self._respawn.items()):
            if when <= now:
                del self._respawn[worker]
                self._crew.start(worker)
                slots = self.slots_of[worker]
                build = Build(self.number(), slots, [0] * len(slots), make=False)
                self.post(worker, "build", slots, build)
                self._attach(worker)
                event = Event("worker_replaced", f"worker {worker} started again", tuple(slots), worker)
                self.events.add(event, level=logging.INFO)
        due: dict[int, list[int]] = {}
        for slot, when in self._due.items():
            worker = self._worker_of[slot]
            if when <= now and worker not in self._respawn and self._crew.is_running(worker):
                due.setdefault(worker, []).append(slot)
        for worker, slots in due.items():
            slots.sort()
            if self.is_vector:
                slots = self.slots_of[worker]
            seeds: list[int | None] = []
            options = None
            for slot in slots:
                self._due.pop(slot, None)
                self._incarnation[slot] += 1
                seed, options = self._resetting.get(slot, (None, None))
                seeds.append(self._incarnation_seed(slot) if seed is None else seed)
            message = Rebuild(
                self.number(),
                slots,
                [self._incarnation[slot] for slot in slots],
                seeds,
                options,
                [self._stickies[slot] for slot in slots],
            )
            self._rebuilding |= set(slots)
            self.post(worker, "rebuild", slots, message)

    def _check_recovery(self) -> None:
        now = time.monotonic()
        late = [
            slot
            for slot, since in self._gone.items()
            if self._awaited[slot] and not self._ready[slot] and now - since > self._recovery.recovery_timeout_s
        ]
        if late:
            self._awaited[late] = False
            raise WorkerLostError(
                f"the environments of slots {late} did not come back within "
                f"recovery_timeout_s={self._recovery.recovery_timeout_s}; see events()",
                slots=tuple(late),
            )

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        for worker, tickets in enumerate(self._open):
            if not tickets or worker in self._hang or worker in self._respawn:
                continue
            seen, since = self._watch[worker]
            at = self._crew.progress(worker)
            if at != seen:
                self._watch[worker] = (at, now)
                continue
            phase = PHASES[at[1]]
            limit = self._recovery.timeout_s(phase)
            if limit is not None and now - since > limit:
                self._hang[worker] = f"hung for {now - since:.1f} s ({phase}_timeout_s={limit})"
                self._crew.kill(worker)

    def _name_slow(self) -> None:
        """An environment much slower than its peers is named, never declared dead."""
        pace = self.buffers.pace_s
        known = pace > 0
        if known.sum() < 3:
            return
        median = float(np.median(pace[known]))
        for slot in np.flatnonzero(pace > max(_SLOW_FACTOR * median, _SLOW_S)).tolist():
            if slot not in self._slow:
                self._slow.add(slot)
                ms = pace[slot] * 1000
                reason = f"a step takes {ms:.2f} ms, {pace[slot] / median:.0f}x the median"
                self.events.add(Event("slow", reason, (slot,), self._worker_of[slot]), level=logging.INFO)

    # -- what fragments need ----------------------------------------------------------------------------------

    def tell(self, worker: int, message: Any) -> None:
        self._crew.send(worker, message)

    def allocate_arena(self, size: int) -> Any:
        return self._crew.allocate_arena(size)

    def put_weights(self, data: bytes, version: int) -> int:
        return self._crew.put_weights(data, version)

    def incarnations(self, slots: list[int]) -> list[int]:
        return [self._incarnation[slot] for slot in slots]

    def bring_back(self, worker: int) -> bool:
        """Whether all environments of this worker are there; what is missing is asked for."""
        for slot in self.slots_of[worker]:
            if slot in self._gone:
                if slot not in self._rebuilding:
                    self._due.setdefault(slot, self._until[slot])
            elif slot in self._held:
                del self._held[slot]  # its first row becomes the observation to go on from
                self._lost.pop(slot, None)
                self.buffers.side[slot] ^= 1
                self._find_side()
                self.ended[slot] = False
        return not any(slot in self._gone for slot in self.slots_of[worker]) and worker not in self._respawn

    def collected(self, slots: list[int], stepped: Any) -> None:
        """A fragment of these slots arrived: they are in the middle of an episode. `stepped`: [N], its first row."""
        self.started[slots] = True
        self.ended[slots] = False
        self._proven[slots] |= stepped[slots]

    # -- resuming ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed_base": list(self._seed_base),
            "incarnations": list(self._incarnation),
            "stickies": [[tuple(sticky) for sticky in stickies] for stickies in self._stickies],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """At the next reset every slot goes on as its next incarnation: other seeds, the same sticky attributes."""
        self._seed_base = list(state["seed_base"])
        self._incarnation = list(state["incarnations"])
        self._stickies = [[Sticky(*sticky) for sticky in stickies] for stickies in state["stickies"]]
        for slot in range(self.num_envs):
            self._gone[slot] = self._until[slot] = time.monotonic()

    # -- the rest ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Give up every row under way (before a reset): wait for the workers to finish it, then forget it."""
        while any(t.kind != "call" for tickets in self._open for t in tickets.values()):
            self.turn(None)
        self.forget()

    def give_up_step(self) -> bool:
        """Some worker's policy failed: wait for the others. True: a slot was stepped, and its row is lost."""
        while any(self._open):
            try:
                self.turn(None)
            except PolicyError:
                continue
        stepped = self._ready_count > 0
        self.forget()
        return stepped

    def forget(self) -> None:
        self._awaited[:] = False
        self._ready[:] = False
        self._ready_count = 0
        self._columns, self._lost_rows, self._resetting = [], {}, {}

    def stats(self) -> dict[str, Any]:
        return {
            "workers": len(self.slots_of),
            "worker_pids": [self._crew.pid(w) for w in range(len(self.slots_of))],
            "events": dict(self.events.counts),
            "slow_slots": sorted(self._slow),
            "step_time_s": self.buffers.pace_s.copy(),
            "incarnations": np.array(self._incarnation),
        }

    def refuse_partial_vector(self, slots: list[int]) -> None:
        if not self.is_vector:
            return
        for its in self.slots_of:
            chosen = set(its) & set(slots)
            if chosen and len(chosen) < len(its):
                raise UsageError(
                    f"Vector(fn) environments step together: slots {its[0]}-{its[-1]} share a worker, "
                    f"but only {sorted(chosen)} were sent"
                )

    def close(self, timeout_s: float) -> None:
        if hasattr(self, "buffers"):
            del self.buffers  # views would keep the shared memory open
        self._crew.close(timeout_s)


def _first(space: Space[Any], batch: Any) -> Any:
    return assemble(space, iter([values[0] for values in flatten(space, batch)]))


def _env_error(fault: Fault) -> EnvError:
    return EnvError(
        f"the environment of slot {fault.slot} failed in {fault.phase}: {fault.error} "
        f"(seed {fault.seed}, incarnation {fault.incarnation}, step {fault.step})\n{fault.traceback}",
        slot=fault.slot,
        phase=fault.phase,
        remote_traceback=fault.traceback,
    )


def _quote(tail: str) -> str:
    return f"; its last words:\n{tail.rstrip()}" if tail.strip() else ""
