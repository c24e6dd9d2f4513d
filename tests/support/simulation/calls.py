"""Make calls of `ClusterEnv` in a simulated run, and check their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.errors import CrashLoopError, DeadlineError, EnvError, UsageError, WorkerLostError
from clusterenv.vector.phases import Phase
from simulation.environment import ACTIONS
from simulation.invariants import check_size
from simulation.ledger import Ledger
from simulation.world import World

__all__ = ["LOSSES", "Ended", "User"]

MASKED_RESET_IN_FLIGHT = False
"""Whether the user resets some slots while rows of others are in flight, or unknown after an exception. Those rows are
dropped, and their environments continue from states that the user has not seen."""

OWN_FAULTS = ("raise", "die", "hang", "killed", "crash", "nan")
"""Faults that count towards a crash loop; losses of nodes do not."""

LOSSES = (EnvError, WorkerLostError, CrashLoopError)
DECLARED = ("worker_lost", "env_error", "env_lost", "worker_moved")


class Ended(Exception):
    """A call ended with an exception that it may raise, which was handled."""


class User:
    """Makes calls, handles their errors, and passes their results to the ledger."""

    def __init__(self, world: World, envs: Any, recovery: Any) -> None:
        self.world, self.envs = world, envs
        self.n = envs.num_envs
        self.driver = envs._driver
        self.ledger = Ledger(world, envs.autoreset_mode, self.n, self.driver.slots_of if self.driver.is_vector else [])
        self.recovery = recovery
        self.delivered: list[int] = []
        self.actions: dict[int, int | None] = {}
        """Actions of slots in flight."""
        self.weights: list[float] = []
        """By version."""
        self.policy: Any = None
        self.collectors: list[Any] = []
        self.is_always = False
        self.events_seen = 0
        deliver = self.driver.deliver

        def spy(copy: bool) -> Any:
            rows = deliver(copy)
            self.delivered = rows.slots.tolist()
            return rows

        self.driver.deliver = spy

    @property
    def phase(self) -> Phase:
        phase: Phase = self.envs._guard.phase
        return phase

    # -- running ----------------------------------------------------------------------------------------------

    def _do(self, name: str, function: Callable[[], None]) -> None:
        self.world.begin_call(name)
        with contextlib.suppress(Ended):
            function()
        self._read_events()
        check_size(self.world, self.driver)

    def _read_events(self) -> None:
        log = self.envs._events
        total = sum(log.counts.values())
        new = total - self.events_seen
        self.events_seen = total
        for event in log()[-new:] if new else ():
            if event.kind in DECLARED:
                for slot in event.slots:
                    self.ledger.views[slot].declared = len(self.world.envs)

    # -- errors -----------------------------------------------------------------------------------------------

    def _attempt(self, function: Callable[[], Any], *allowed: type[BaseException], is_whole: bool = False) -> Any:
        """Call `function`; record an exception that it may raise, which ends this call of the program.

        `is_whole`: after Ctrl-C the state of the rows is unknown, so that only a reset makes sense.
        """
        world = self.world
        self.delivered = []
        try:
            return function()
        except KeyboardInterrupt as interrupt:
            if not world.counts["interrupt"]:
                world.fail("KeyboardInterrupt, and nobody pressed Ctrl-C")
            world.event("interrupted", world.call)
            was_sent = self.driver.rows.awaited.any() or world.call != "step with a policy"
            if is_whole and was_sent and self.phase is not Phase.INTERRUPTED:
                world.fail(f"Ctrl-C ended {world.call}, and the phase is {self.phase}")
            if isinstance(interrupt.__context__, LOSSES):  # Ctrl-C came together with an error, and reports both
                self._lost_beside()
                self._drop_lost_actions()
            self.ledger.give_up([slot for slot in range(self.n) if slot not in self.actions])
            raise Ended from None
        except allowed as error:
            text = str(error).splitlines()[0]
            world.event("error", f"{type(error).__name__}: {text}")
            own = sum(world.counts[kind] for kind in OWN_FAULTS)
            if own <= self.recovery.max_restarts and isinstance(error, CrashLoopError):
                world.fail(f"{text}, but there were {own} failures that count")
            if not own and "before its first" in text:
                world.fail(f"{text}, but no worker has crashed")
            self._read_events()
            raise

    # -- Gymnasium's calls ------------------------------------------------------------------------------------

    def _draw_seed(self) -> int | None:
        draw = self.world.choices.draw
        seed = draw(1000) * 100 if draw(3) == 0 else None
        if seed is not None:
            self.world.user_seeds.update(range(seed, seed + self.n))
        return seed

    def _draw_mask(self) -> Any:
        """Return some slots, as bools [N]."""
        mask = np.array([self.world.choices.draw(2) == 0 for _ in range(self.n)])
        if not mask.any():
            mask[self.world.choices.draw(self.n)] = True
        return mask

    def reset(self) -> None:
        self.actions = {}
        seed = self._draw_seed()
        try:
            obs, _ = self._attempt(lambda: self.envs.reset(seed=seed), *LOSSES, is_whole=True)
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))
            return
        self.actions = {}
        seeds: list[int | None] = [None if seed is None else seed + slot for slot in range(self.n)]
        self.ledger.reset(list(range(self.n)), obs, seeds)

    def masked_reset(self) -> None:
        mask = self._draw_mask()
        if not MASKED_RESET_IN_FLIGHT:  # leaves only rows that report a loss in flight: the next step delivers them
            mask |= self.driver.rows.awaited & ~self.driver.rows.is_loss
        if not self.envs._guard.was_reset:  # the first reset is of all slots
            mask[:] = True
        self.actions = {}
        slots = np.flatnonzero(mask).tolist()
        others = np.flatnonzero(~mask).tolist()
        if others and self.envs._guard.was_interrupted:
            try:
                self._attempt(lambda: self.envs.reset(options={"reset_mask": mask}), UsageError)
            except UsageError:
                return
            self.world.fail("a reset of some slots hides the rows of others that a call did not deliver")
        if self.phase is Phase.COLLECTING or MASKED_RESET_IN_FLIGHT:
            self.ledger.give_up(others)
        try:
            obs, _ = self._attempt(lambda: self.envs.reset(options={"reset_mask": mask}), *LOSSES, is_whole=True)
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))
            return
        self.actions = {}
        self.ledger.untouched(others, obs)
        self.ledger.reset(slots, obs[slots], None)

    def _draw_actions(self, slots: list[int]) -> Any:
        return np.array([self.world.choices.draw(ACTIONS) for _ in slots], dtype=np.int64)

    def _reset_ended(self) -> bool:
        """In DISABLED mode, reset the slots whose episode has ended; return whether an error ended the reset."""
        if self.envs.autoreset_mode is not AutoresetMode.DISABLED:
            return False
        ended = np.array([view.has_ended for view in self.ledger.views])
        if not ended.any():
            return False
        self.world.event("call", "reset of ended slots")
        try:
            obs, _ = self._attempt(lambda: self.envs.reset(options={"reset_mask": ended}), *LOSSES, is_whole=True)
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))
            return True
        slots = np.flatnonzero(ended).tolist()
        self.ledger.untouched(np.flatnonzero(~ended).tolist(), obs)
        self.ledger.reset(slots, obs[slots], None)
        return False

    def step(self) -> None:
        if self._reset_ended():
            return
        actions = self._draw_actions(list(range(self.n)))
        self._take_step(lambda: self.envs.step(actions), actions)

    def _take_step(self, call: Callable[[], Any], actions: Any, *allowed: type[BaseException]) -> None:
        """Pass the rows of a step of all slots to the ledger; `actions` is None if a policy chose them."""
        slots = list(range(self.n))
        try:
            result = self._attempt(call, *LOSSES, *allowed, is_whole=True)
        except WorkerLostError as error:
            self._after_lost(error, actions)
            return
        except LOSSES:
            self.ledger.give_up(slots)
            return
        self.ledger.step(slots, actions, result)

    def _after_lost(self, error: WorkerLostError, actions: Any) -> None:
        """Check the rows that came with the error; for the other slots, the next row may be a first one."""
        rows = error.rows
        here = self.delivered
        if rows is None or len(rows[1]) != len(here):
            self.world.fail(f"WorkerLostError without its rows: {rows}")
        assert rows is not None
        self.ledger.step(here, None if actions is None else actions[here], rows)
        awaited = np.flatnonzero(self.driver.rows.awaited).tolist()
        self.actions = {slot: None if actions is None else int(actions[slot]) for slot in awaited}
        self.ledger.give_up([s for s in range(self.n) if s in error.slots or (s not in here and s not in awaited)])

    def send(self) -> None:
        if self.phase is Phase.IDLE:
            self.actions = {}
            if self._reset_ended():
                return
        views = self.ledger.views
        is_disabled = self.envs.autoreset_mode is AutoresetMode.DISABLED
        free = [s for s in range(self.n) if s not in self.actions and not (is_disabled and views[s].has_ended)]
        slots = self._draw_slots(free)
        if not slots:
            return
        actions = self._draw_actions(slots)
        try:
            self._attempt(lambda: self.envs.send(actions, slots))
        finally:
            sent = self.driver.rows.awaited
            self.actions |= {slot: int(action) for slot, action in zip(slots, actions, strict=True) if sent[slot]}

    def _draw_slots(self, free: list[int]) -> list[int]:
        """Return some of these slots; of a vector environment all or none."""
        draw = self.world.choices.draw
        if not self.driver.is_vector:
            return [slot for slot in free if draw(2) == 0]
        chosen = [its for its in self.driver.slots_of if set(its) <= set(free) and draw(2) == 0]
        return [slot for its in chosen for slot in its]

    def recv(self) -> None:
        draw = self.world.choices.draw
        least = draw(len(self.actions) + 1) or None
        timeout_s = 0.5 if draw(4) == 3 else None
        try:
            result = self._attempt(lambda: self.envs.recv(least, timeout_s), *LOSSES, DeadlineError)
        except DeadlineError:
            return
        except LOSSES:
            self._lost_beside()
            self._drop_lost_actions()
            return
        slots = result[4]["slot"].tolist()
        if len(slots) < (least or 0):
            self.world.fail(f"recv({least}) returned {len(slots)} rows")
        for slot in slots:
            if slot not in self.actions:
                self.world.fail(f"recv() returned slot {slot}, which is not in flight")
        self.ledger.step(slots, [self.actions.pop(slot) for slot in slots], result)

    # -- calls ------------------------------------------------------------------------------------------------

    def call(self) -> None:
        slots = [slot for slot in range(self.n) if self.world.choices.draw(2) == 0] or None
        if self.driver.is_vector:
            slots = None
        name = ("call", "get_attr")[self.world.choices.draw(2)]
        try:
            if name == "call":
                found = self._attempt(lambda: self.envs.call("identify", slots=slots), *LOSSES, UsageError)
            else:
                found = self._attempt(lambda: self.envs.get_attr("identity", slots=slots), *LOSSES, UsageError)
        except UsageError:
            self._refused_when_loaded()
            return
        except LOSSES:
            self._lost_beside()
            return
        self._check_answers(slots or list(range(self.n)), found)

    def _refused_when_loaded(self) -> None:
        guard = self.envs._guard
        if guard.was_reset or not guard.is_resumed:
            self.world.fail(f"{self.world.call} was refused in {self.phase}")

    def _check_answers(self, slots: list[int], found: Any) -> None:
        for slot, (said, env) in zip(slots, found, strict=True):
            last = self.ledger.views[slot].last
            if said != slot or self.world.envs[env].slot != slot:
                self.world.fail(f"call(): slot {slot} answered as slot {said}")
            if last is not None and env < last.env:
                self.world.fail(f"call(): slot {slot} answered by environment {env}, after {last.env}")

    def set_attr(self) -> None:
        value = self.world.choices.draw(1000) + 1
        self.world.marked_from = None
        try:
            self._attempt(lambda: self.envs.set_attr("mark", value), *LOSSES)
        except LOSSES:
            self._lost_beside()
            return
        self.world.mark, self.world.marked_from = value, len(self.world.produced)

    def _drop_lost_actions(self) -> None:
        """Drop the actions of rows in flight that an error reported as lost: they are no longer awaited."""
        awaited = set(np.flatnonzero(self.driver.rows.awaited).tolist())
        self.ledger.give_up([slot for slot in self.actions if slot not in awaited])
        self.actions = {slot: action for slot, action in self.actions.items() if slot in awaited}

    def _lost_beside(self) -> None:
        """Note losses of environments that the error of a call without steps may have reported."""
        envs = self.world.envs
        views = enumerate(self.ledger.views)
        self.ledger.give_up([slot for slot, view in views if view.last and not envs[view.last.env].is_alive])

    def scale(self) -> None:
        nodes = self.driver.executor.nodes
        if nodes is not None:
            self._attempt(lambda: self.envs.scale(1 + self.world.choices.draw(len(nodes._nodes))))

    def pause(self) -> None:
        self.driver.executor.background()
        self.world.clock.now_s += (0.0, 0.3, 3.0, 70.0)[self.world.choices.draw(4)]
