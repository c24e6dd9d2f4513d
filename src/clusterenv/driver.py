"""All slots of a run: requests to workers, answers to rows.

`ClusterEnv` sends steps and resets and collects rows; a crew (`ProcessCrew`, `InlineCrew`, `RemoteCrew`) does the I/O,
`Delivery` hands rows over, `Repairs` brings back what was lost. A slot whose environment is gone is rebuilt in its next
incarnation: the user sees the episode end once, as truncated and invalid, and then the first row of the new one, never
the two spliced.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from clusterenv.engine.agreement import agree
from clusterenv.engine.fragments import FragmentDesk, of_slots
from clusterenv.engine.health import PaceWatch
from clusterenv.engine.incarnations import Lives
from clusterenv.engine.inputs import Exit, Stack
from clusterenv.engine.repairs import Repairs, env_error, last_words
from clusterenv.engine.requests import Kind, Request, Requests
from clusterenv.engine.rows import Delivery, Rows
from clusterenv.engine.slots import Losses
from clusterenv.errors import (
    DeadlineError,
    NotPlainError,
    PolicyError,
    SpecError,
    UsageError,
    WorkerLostError,
)
from clusterenv.events import Event, EventLog
from clusterenv.executors.contract import Crew
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.rows import Buffers, make_layout
from clusterenv.recovery import Recovery
from clusterenv.system.interrupts import held_back
from clusterenv.wire import infos as info_columns
from clusterenv.wire.requests import (
    Act,
    Acted,
    Attach,
    Build,
    Built,
    Call,
    FragmentResult,
    Reply,
    Reset,
    SetAttr,
    Step,
    Sticky,
)

__all__ = ["Pool", "Rows"]

_WATCH_S = 0.25
"""How often a wait looks whether anybody hangs."""

_LOOK_EVERY = 16
"""Steps of the hot loop between two looks at everything, not only at the workers' answers."""

_SLOW_EVERY = 256


class Pool:
    """All slots of a run, on the workers of one machine or of many."""

    def __init__(
        self,
        crew: Crew,
        slots_of: list[list[int]],
        mode: AutoresetMode | None,
        recovery: Recovery,
        *,
        is_vector: bool,
        events: EventLog,
        node_of: list[int] | None = None,
    ) -> None:
        self._crew = crew
        self.slots_of = slots_of
        self.node_of = [0] * len(slots_of) if node_of is None else node_of
        """Worker → the machine that it is on: weights go to each machine once."""
        self.num_envs = sum(map(len, slots_of))
        self._worker_of = [w for w, slots in enumerate(slots_of) for _ in slots]
        self.is_vector = is_vector
        self.events = events
        self._requests = Requests(len(slots_of))
        self._inbox: deque[tuple[int, Any]] = deque()
        self.acted: list[Acted] = []  # what the workers' policy did in the step under way
        self._steps = 0  # since slow environments were looked for
        self._pace = PaceWatch()
        self.desk = FragmentDesk(self)
        self._lives = Lives(self.num_envs)
        self._losses = Losses(mode or AutoresetMode.NEXT_STEP)
        self._repairs = Repairs(self, crew, recovery, self._lives, self._losses)
        try:
            self._start(mode)
        except BaseException:
            crew.close(0.0)
            raise

    # -- starting ---------------------------------------------------------------------------------------------

    def _start(self, mode: AutoresetMode | None) -> None:
        for worker, slots in enumerate(self.slots_of):
            self._crew.start(worker)
            seeds = [self._lives.seed(slot) for slot in slots]
            self.post(worker, Kind.BUILD, slots, Build(self.number(), slots, seeds))
        built: dict[int, Built] = {}
        while len(built) < len(self.slots_of):
            for worker, message in self._wait(None):
                if isinstance(message, Stack):
                    self._repairs.long_call(worker, message.text)
                    continue
                if isinstance(message, Exit):
                    raise WorkerLostError(
                        f"worker {worker} {message.reason} while it made the environment of slot "
                        f"{self._crew.progress(worker)[0]}{last_words(message.tail)}",
                        slots=tuple(self.slots_of[worker]),
                    )
                if message.faults:
                    raise env_error(message.faults[0], self._where(worker))
                self._requests.close_all(worker)
                built[worker] = message
        self._adopt(agree(built, self.slots_of), mode)

    def _adopt(self, built: Built, mode: AutoresetMode | None) -> None:
        self.single_observation_space: Space[Any] = built.observation_space
        self.single_action_space: Space[Any] = built.action_space
        self.render_mode = built.render_mode
        self.metadata = dict(built.metadata)
        self.mode = mode or AutoresetMode.NEXT_STEP
        if self.is_vector and mode is None:
            own = built.metadata.get("autoreset_mode")
            self.mode = own if isinstance(own, AutoresetMode) else AutoresetMode.NEXT_STEP
        self._losses.mode = self.mode
        layout = make_layout(self.single_observation_space, self.single_action_space, self.num_envs)
        if self.is_vector and (not layout.actions_are_shared or any(leaf.dtype is None for leaf in layout.obs)):
            raise SpecError("Vector(fn) takes spaces of a fixed size only (no Text, Sequence, Graph)")
        self.layout = layout
        buffers = Buffers(layout, self._crew.allocate(layout))
        self.rows = Delivery(self.num_envs, self.single_observation_space, buffers)
        for worker in range(len(self.slots_of)):
            self.attach(worker)

    def _where(self, worker: int) -> str:
        return f"node {self.node_of[worker]}" if max(self.node_of) else "the machine of the workers"

    def attach(self, worker: int) -> None:
        attach = Attach(self.layout, self.single_observation_space, self.single_action_space)
        self._crew.send(worker, attach)

    def number(self) -> int:
        return self._requests.next_number()

    def post(self, worker: int, kind: Kind, slots: list[int], message: Any) -> Request:
        """Open a request and send it; `message.request` is its number."""
        request = self._requests.open(worker, kind, slots, message)
        try:
            self._crew.send(worker, message, request)
        except NotPlainError:
            self._requests.close(request)
            raise
        self._repairs.began(worker, time.monotonic())
        return request

    # -- requests ---------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> Buffers:
        return self.rows.buffers

    @property
    def ended(self) -> Any:
        """[N]: the last row delivered ended an episode."""
        return self.rows.ended

    @property
    def in_flight(self) -> bool:
        return self.rows.sent and bool(self.rows.awaited.any())

    @property
    def awaited(self) -> Any:
        return self.rows.awaited

    def step_all(self) -> bool:
        """The hot loop: step every slot with the actions in shared memory. True: `deliver_all` has the rows.

        False, where anything unusual happened: the step is under way, and `collect` and `deliver` go on with it.
        """
        if (
            self._requests.last_number % _LOOK_EVERY == 0
        ):  # workers' output, and whatever else the hot loop does not read
            self._inbox.extend(self._crew.wait(0.0))
        if self._losses or self._inbox or self._requests:
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
                self.rows.expect_all()
                now = time.monotonic()
                for worker, slots in enumerate(self.slots_of):
                    if worker < done:
                        self.rows.mark_ready(slots)
                    else:
                        self._requests.open(worker, Kind.STEP, slots, number)
                        self._repairs.began(worker, now)
        return done == len(self.slots_of)

    def _is_plain(self, message: Any, number: int) -> bool:
        """The answer to a whole step, with nothing wrong in it; its infos and objects are kept."""
        if message == number:
            return True
        if not isinstance(message, Reply) or message.request != number or message.faults:
            return False
        self.rows.take_rows(message)
        return True

    def deliver_all(self, copy: bool) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The rows of a `step_all` that went well."""
        rows = self.rows.all_rows(copy)
        self._count_steps(1)
        return rows

    def send_step(
        self, slots: list[int] | None, actions: list[Any] | None, knobs: dict[str, Any] | None = None
    ) -> None:
        """Step these slots (None: all) with the actions in shared memory, with `actions` as objects, or (`knobs`)
        with what the workers' policy chooses."""
        chosen = list(range(self.num_envs)) if slots is None else slots
        losses = self._losses
        self.rows.expect(chosen)
        whole: list[list[int]] = [[] for _ in self.slots_of]
        place = {slot: i for i, slot in enumerate(chosen)}
        for slot in chosen:
            if slot in losses.lost and self.mode is not AutoresetMode.SAME_STEP:
                self.rows.tell_loss(slot, losses.lost.pop(slot))
            elif slot in losses.held:
                self.rows.begin_again(slot, losses.held.pop(slot), losses.lost.pop(slot, None))
            elif slot in losses.gone:  # awaited: its first row, or the reset row
                losses.bring_back(slot)
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
                self.post(worker, Kind.STEP, its_slots, Step(self.number(), its_slots, objects, act))

    def send_reset(self, slots: list[int], seeds: list[int | None], options: dict[str, Any] | None) -> None:
        self.rows.expect(slots)
        healthy: list[list[int]] = [[] for _ in self.slots_of]
        asked = dict(zip(slots, seeds, strict=True))
        for slot, seed in asked.items():
            self.rows.resetting[slot] = (seed, options)
            if not self._losses.reset(slot):
                healthy[self._worker_of[slot]].append(slot)
        for worker, its_slots in enumerate(healthy):
            if its_slots:
                its_seeds = [asked[slot] for slot in its_slots]
                self.post(worker, Kind.RESET, its_slots, Reset(self.number(), its_slots, its_seeds, options))

    def set_seed_base(self, bases: list[int | None]) -> None:
        self._lives.set_bases(bases)

    def call(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        sticky: bool = False,
        slots: list[int] | None = None,
    ) -> list[Any]:
        """Call a method (or read an attribute) of every environment, or of these slots', in ascending order."""
        if self._losses.gone:
            gone = tuple(sorted(self._losses.gone))
            raise WorkerLostError(
                f"call({name!r}): the environments of slots {list(gone)} failed and are not back yet; "
                "step or reset first",
                slots=gone,
            )
        results: list[Any] = []
        chosen = [[slot for slot in its if slots is None or slot in slots] for its in self.slots_of]
        requests = [
            self.post(w, Kind.CALL, its, Call(self.number(), its, name, args, kwargs))
            for w, its in enumerate(chosen)
            if its
        ]
        for reply in self.replies(requests):
            results += reply.result or []
        if sticky:
            self._lives.remember_call(name, args, kwargs)
        return results

    def set_attr(self, name: str, values: dict[int, Any]) -> None:
        """Set on these slots' environments, as far as they are there, and on every later incarnation."""
        self._lives.remember_attribute(name, values)
        requests = []
        for worker, slots in enumerate(self.slots_of):
            here = [slot for slot in slots if slot in values and slot not in self._losses.gone]
            if here:
                message = SetAttr(self.number(), here, name, [values[slot] for slot in here])
                requests.append(self.post(worker, Kind.CALL, here, message))
        self.replies(requests)

    def replies(self, requests: list[Request]) -> list[Reply]:
        """Wait for the answers to calls; they come in the order of the requests."""
        while not all(request.reply for request in requests):
            lost = [r for r in requests if r.reply is None and not self._requests.is_open(r)]
            if lost:
                slots = tuple(slot for request in lost for slot in self.slots_of[request.worker])
                workers = [request.worker for request in lost]
                raise WorkerLostError(f"workers {workers} died during the call; see events()", slots=slots)
            self.turn(None)
        replies = [request.reply for request in requests if request.reply is not None]
        for reply in replies:
            if reply.faults:
                fault = reply.faults[0]
                if fault.phase == "policy":
                    raise PolicyError(f"{fault.error}\n{fault.traceback}", remote_traceback=fault.traceback)
                raise env_error(fault)
        return replies

    # -- collecting -------------------------------------------------------------------------------------------

    def collect(self, min_rows: int, timeout_s: float | None) -> None:
        """Wait until at least `min_rows` awaited slots have a row."""
        rows = self.rows
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while rows.ready_count < min_rows:
            if deadline is not None and time.monotonic() >= deadline:
                late = np.flatnonzero(rows.awaited & ~rows.ready).tolist()
                workers = sorted({self._worker_of[slot] for slot in late})
                raise DeadlineError(
                    f"{rows.ready_count} of {min_rows} rows within {timeout_s} s; awaited: slots {late} of "
                    f"workers {workers}. Nothing is lost: call recv() again."
                )
            self.turn(deadline)

    def deliver(self, copy: bool) -> Rows:
        """Hand over every row that is ready, ascending by slot."""
        rows = self.rows.rows(copy)
        if self._losses.gone and self.mode is AutoresetMode.NEXT_STEP:
            for slot in rows.slots[rows.terminations | rows.truncations].tolist():
                if slot in self._losses.gone:  # its reset row comes next; begin now
                    self._losses.bring_back(slot)
        self._count_steps(1)
        return rows

    def _count_steps(self, steps: int) -> None:
        self._steps += steps
        if self._steps >= _SLOW_EVERY:
            self._steps = 0
            for slot, reason in self._pace.newly_slow(self.buffers.pace_s):
                self.events.add(Event("slow", reason, (slot,), self._worker_of[slot]), level=logging.INFO)

    def peek_obs(self, slots: Any) -> Any:
        """The observations last delivered for these slots."""
        return self.rows.peek_obs(slots)

    # -- turning messages into state --------------------------------------------------------------------------

    def turn(self, deadline: float | None) -> None:
        """Wait for something, at most a quarter of a second, and take it in."""
        # An answer that was read and not kept would be waited for ever. In this process, a step may take any time.
        with contextlib.nullcontext() if self._crew.is_inline else held_back():
            self._turn(deadline)

    def _turn(self, deadline: float | None) -> None:
        if self._losses.has_due:
            self._repairs.start_due()
        self._inbox.extend(self._wait(deadline))
        while self._inbox:  # kept across calls: taking a message in may raise, and the next must not be lost
            worker, message = self._inbox.popleft()
            if isinstance(message, int):
                request = self._requests.get(worker, message)
                assert request is not None, f"worker {worker} answered step {message}, which is not open"
                self._requests.close(request)
                self.rows.mark_ready(request.slots)
            elif isinstance(message, Reply):
                self._take(worker, message)
            elif isinstance(message, Exit):
                asked = {request.kind for request in self._requests.close_all(worker)}
                self._repairs.worker_gone(worker, message, asked)
            elif isinstance(message, Stack):
                self._repairs.long_call(worker, message.text)
            elif isinstance(message, Built):
                built = self._requests.get(worker, message.request)
                if built is not None:
                    self._requests.close(built)
        if self._losses.gone:
            self._repairs.check()

    def _wait(self, deadline: float | None) -> list[tuple[int, Any]]:
        timeout_s = _WATCH_S
        if deadline is not None or self._losses.has_due:
            now = time.monotonic()
            for when in self._losses.due_times():
                timeout_s = min(timeout_s, max(0.001, when - now))
            if deadline is not None:
                timeout_s = min(timeout_s, max(0.0, deadline - now))
        messages = self._crew.wait(timeout_s)
        if not self._crew.is_inline:  # also while others answer: one that hangs must not go unnoticed in a busy stream
            self._repairs.look_for_hangs(self._requests)
        return messages

    def _take(self, worker: int, reply: Reply) -> None:
        request = self._requests.get(worker, reply.request)
        if request is None:
            return  # a late reply to a request that nobody waits for any more
        if reply.last:
            self._requests.close(request)
        if request.kind is Kind.CALL:
            request.reply = reply
            return
        if request.kind in (Kind.POLICY, Kind.FRAGMENT):
            self.desk.took(worker, request.kind, reply)
            self._take_faults(worker, reply, collecting=True)
            return
        failed = {fault.slot for fault in reply.faults}
        good = [slot for slot in reply.slots if slot not in failed]
        if request.kind is Kind.REBUILD:
            self._losses.rebuilt(reply.slots, good)
            self.rows.take_objects(reply)
            for slot in good:
                self._repairs.rebuilt(slot, info_columns.select(reply.infos, {slot: slot}) if reply.infos else {})
        else:
            if isinstance(reply.result, Acted):
                self.acted.append(reply.result)
            elif reply.result is not None:  # the policy failed, so nothing was stepped
                self.rows.awaited[request.slots] = False
                self.desk.took(worker, Kind.POLICY, reply)
                raise self.desk.policy_error() or AssertionError("a policy error without an error")
            self.rows.mark_ready(good)
            self.rows.take_rows(reply)
        self._take_faults(worker, reply, collecting=False)

    def _take_faults(self, worker: int, reply: Reply, collecting: bool) -> None:
        """Take note of every fault before the first error is raised: all these environments are gone."""
        errors = [self._repairs.env_gone(worker, fault, collecting) for fault in reply.faults]
        for error in errors:
            if error is not None:
                raise error

    # -- what fragments need ----------------------------------------------------------------------------------

    def tell(self, worker: int, message: Any) -> None:
        self._crew.send(worker, message)

    def allocate_arena(self, layout: ArenaLayout) -> Any:
        return self._crew.allocate_arena(layout)

    def put_weights(self, node: int, data: bytes, offset: int, packed: bytes | None = None, keep: bool = False) -> None:
        self._crew.put_weights(node, data, offset, packed, keep)

    def incarnations(self, slots: list[int]) -> list[int]:
        return [self._lives.incarnations[slot] for slot in slots]

    def stickies(self, slots: list[int]) -> tuple[list[list[Sticky]], int]:
        """What is set on every incarnation of these slots, and a number that changes with it."""
        return [self._lives.stickies[slot] for slot in slots], self._lives.stickies_epoch

    def bring_back(self, worker: int) -> bool:
        """Whether all environments of this worker are there; what is missing is asked for."""
        losses = self._losses
        for slot in self.slots_of[worker]:
            if slot in losses.gone:
                losses.bring_back(slot)
            elif slot in losses.held:  # its first row becomes the observation to go on from
                del losses.held[slot]
                losses.lost.pop(slot, None)
                self.rows.adopt(slot)
        return worker not in losses.respawn and not any(slot in losses.gone for slot in self.slots_of[worker])

    def is_leaving(self, worker: int) -> bool:
        return self._crew.is_leaving(worker)

    def collected(self, slots: list[int], stepped: Any, result: FragmentResult) -> None:
        self.rows.collected(slots, stepped)
        if result.step_s is not None:
            self.buffers.pace_s[slots] = result.step_s
        self._count_steps(result.num_steps)

    def info_not_sent(self, worker: int, reason: str) -> None:
        """An info of a fragment could not travel; said once, and counted."""
        level = logging.DEBUG if "info_not_sent" in self.events.counts else logging.WARNING
        self.events.add(Event("info_not_sent", reason, tuple(self.slots_of[worker]), worker), level=level)

    # -- the rest ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Give up every row under way (before a reset): wait for the workers to finish it, then forget it."""
        while any(request.kind is not Kind.CALL for request in self._requests):
            self.turn(None)
        self._give_up_rows()

    def _give_up_rows(self) -> None:
        for slot, reason in self.rows.forget().items():
            self._losses.not_reported(slot, reason)

    def give_up_step(self) -> bool:
        """Some worker's policy failed: wait for the others. True: a slot was stepped, and its row is lost."""
        while self._requests:
            try:
                self.turn(None)
            except PolicyError:
                continue
        stepped = self.rows.ready_count > 0
        self._give_up_rows()
        return stepped

    def state_dict(self) -> dict[str, Any]:
        return self._lives.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """At the next reset every slot goes on as its next incarnation: other seeds, the same sticky attributes."""
        self._lives.load_state_dict(state)
        for slot in range(self.num_envs):
            self._losses.slot_gone(slot, time.monotonic())

    def need_packages(self, names: tuple[str, ...]) -> None:
        self._crew.need_packages(names)

    def scale(self, nodes: int) -> None:
        self._crew.scale(nodes)
        if not self.desk.is_streaming:  # nodes that nothing is under way on leave now, not with the next request
            self._inbox.extend(self._crew.wait(0.0))

    def stats(self) -> dict[str, Any]:
        return {
            "workers": len(self.slots_of),
            "worker_pids": [self._crew.pid(w) for w in range(len(self.slots_of))],
            "events": dict(self.events.counts),
            "slow_slots": sorted(self._pace.slow),
            "step_time_s": self.buffers.pace_s.copy(),
            "incarnations": np.array(self._lives.incarnations),
            **self._crew.stats(),
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
        if hasattr(self, "rows"):
            del self.rows.buffers  # views would keep the shared memory open
        self.desk.close()
        self._crew.close(timeout_s)
