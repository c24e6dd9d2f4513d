"""The user's program of a simulated run: drawn calls of `ClusterEnv` and `Collector`, and what each may answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from simulation.environment import ACTIONS
from simulation.invariants import check_size
from simulation.ledger import Ledger, logits, logprob
from simulation.world import World

import clusterenv as ce
from clusterenv.errors import CrashLoopError, DeadlineError, EnvError, UsageError, WorkerLostError
from clusterenv.vector.phases import Phase, refusal

__all__ = ["Program"]

MASKED_RESET_IN_FLIGHT = False
"""Whether the user resets some slots while rows of others are under way, or unknown after an exception. They are given
up, and the environments of those slots go on from states that the user has not seen."""

OWN_FAULTS = ("raise", "die", "hang", "killed", "crash", "nan")
"""What counts towards a crash loop: not the losses of nodes."""

LOSSES = (EnvError, WorkerLostError, CrashLoopError)
DECLARED = ("worker_lost", "env_error", "worker_moved")


class Ended(Exception):  # noqa: N818
    """A call ended by an exception that it may raise; it is dealt with."""


class Program:
    def __init__(self, world: World, envs: Any, recovery: Any) -> None:
        self.world, self.envs = world, envs
        self.n = envs.num_envs
        self.driver = envs._driver
        self.ledger = Ledger(world, envs.autoreset_mode, self.n)
        self.recovery = recovery
        self.delivered: list[int] = []
        self.actions: dict[int, int | None] = {}
        """Of slots in flight."""
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

    def run(self, num_events: int) -> None:
        world = self.world
        self._do("reset", self.reset)
        while world.num_events < num_events:
            name, function = self._next()
            self._do(name, function)
        world.calm = True
        self._finish()

    def _next(self) -> tuple[str, Callable[[], None]]:
        phase, draw = self.phase, self.world.choices.draw
        options: list[tuple[str, Callable[[], None]]]
        if phase is Phase.IDLE:
            options = [
                ("step", self.step),
                ("step", self.step),
                ("step", self.step),
                ("step", self.step),
                ("send", self.send),
                ("send", self.send),
                ("rollout", self.rollout),
                ("rollout", self.rollout),
                ("stream", self.stream),
                ("reset", self.reset),
                ("masked reset", self.masked_reset),
                ("masked reset", self.masked_reset),
                ("call", self.call),
                ("set_attr", self.set_attr),
                ("evaluate", self.evaluate),
                ("pause", self.pause),
                ("step with a policy", self.step_with_policy),
                ("scale", self.scale),
            ]
        elif phase is Phase.PARTIAL:
            options = [
                ("recv", self.recv),
                ("recv", self.recv),
                ("recv", self.recv),
                ("recv", self.recv),
                ("send", self.send),
                ("send", self.send),
                ("pause", self.pause),
                ("masked reset", self.masked_reset),
                ("reset", self.reset),
            ]
        elif phase is Phase.COLLECTING:
            options = [
                ("rollout", self.rollout),
                ("rollout", self.rollout),
                ("rollout", self.rollout),
                ("pause", self.pause),
                ("evaluate", self.evaluate),
                ("call", self.call),
                ("masked reset", self.masked_reset),
                ("reset", self.reset),
            ]
        else:
            options = [("reset", self.reset)]
            if self.envs._guard.was_reset and MASKED_RESET_IN_FLIGHT:
                options.append(("masked reset", self.masked_reset))
        options.append(("misuse", self.misuse))
        return options[draw(len(options))]

    def _do(self, name: str, function: Callable[[], None]) -> None:
        self.world.begin_call(name)
        try:
            function()
        except Ended:
            pass
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

    def _finish(self) -> None:
        """Nothing goes wrong any more: a reset brings all environments back, and every one steps."""
        for _ in range(3):
            self._do("last reset", self.reset)
            if self.phase is Phase.IDLE:
                break
        else:
            self.world.fail("reset() does not succeed, though nothing fails any more")
        for _ in range(2):
            self._do("last step", self.step)
        if self.driver._slots.records or self.driver.rows.awaited.any():
            self.world.fail("slots are not live after a whole step without faults")

    # -- errors -----------------------------------------------------------------------------------------------

    def _attempt(self, function: Callable[[], Any], *allowed: type[BaseException], is_whole: bool = False) -> Any:
        """Call it; an exception that it may raise is noted, and ends this call of the program.

        `is_whole`: what it does to the rows is unknown after Ctrl-C, so that nothing but a reset makes sense.
        """
        world = self.world
        self.delivered = []
        try:
            return function()
        except KeyboardInterrupt:
            if not world.counts["interrupt"]:
                world.fail("KeyboardInterrupt, and nobody pressed Ctrl-C")
            world.event("interrupted", world.call)
            if is_whole and self.phase is not Phase.INTERRUPTED:
                world.fail(f"Ctrl-C ended {world.call}, and the phase is {self.phase}")
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

    def reset(self) -> None:
        self.actions = {}
        draw = self.world.choices.draw
        seed = draw(1000) * 100 if draw(3) == 0 else None
        if seed is not None:
            self.world.user_seeds.update(range(seed, seed + self.n))
        try:
            obs, _ = self._attempt(lambda: self.envs.reset(seed=seed), *LOSSES, is_whole=True)
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))
            return
        self.actions = {}
        seeds: list[int | None] = [None if seed is None else seed + slot for slot in range(self.n)]
        self.ledger.reset(list(range(self.n)), obs, seeds)

    def masked_reset(self) -> None:
        mask = np.array([self.world.choices.draw(2) == 0 for _ in range(self.n)])
        if not mask.any():
            mask[self.world.choices.draw(self.n)] = True
        if not MASKED_RESET_IN_FLIGHT:  # of others, only rows that report a loss are under way: the next step has them
            mask |= self.driver.rows.awaited & ~self.driver.rows.is_loss
        self.actions = {}
        slots = np.flatnonzero(mask).tolist()
        others = np.flatnonzero(~mask).tolist()
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
        """DISABLED: who has ended must be reset first."""
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
        slots = list(range(self.n))
        actions = self._draw_actions(slots)
        try:
            result = self._attempt(lambda: self.envs.step(actions), *LOSSES, is_whole=True)
        except WorkerLostError as error:
            self._after_lost(error, actions)
            return
        except LOSSES:
            self.ledger.give_up(slots)
            return
        self.ledger.step(slots, actions, result)

    def _after_lost(self, error: WorkerLostError, actions: Any) -> None:
        """Rows that were there came with the error; of the others, the next row may be a first one."""
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
        slots = [slot for slot in free if self.world.choices.draw(2) == 0]
        if not slots:
            return
        actions = self._draw_actions(slots)
        try:
            self._attempt(lambda: self.envs.send(actions, slots))
        finally:
            sent = self.driver.rows.awaited
            self.actions |= {slot: int(action) for slot, action in zip(slots, actions, strict=True) if sent[slot]}

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
            awaited = set(np.flatnonzero(self.driver.rows.awaited).tolist())
            self.ledger.give_up([slot for slot in self.actions if slot not in awaited])
            self.actions = {slot: action for slot, action in self.actions.items() if slot in awaited}
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
        try:
            found = self._attempt(lambda: self.envs.call("identify", slots=slots), *LOSSES)
        except LOSSES:
            self._lost_beside()
            return
        for slot, (said, env) in zip(slots or range(self.n), found, strict=True):
            last = self.ledger.views[slot].last
            if said != slot or not self.world.envs[env].slot == slot:
                self.world.fail(f"call(): slot {slot} answered as slot {said}")
            if last is not None and env < last.env:
                self.world.fail(f"call(): slot {slot} answered by environment {env}, after {last.env}")

    def set_attr(self) -> None:
        value = self.world.choices.draw(1000) + 1
        try:
            self._attempt(lambda: self.envs.set_attr("mark", value), *LOSSES)
        except LOSSES:
            self._lost_beside()
        self.world.mark, self.world.marked_from = value, len(self.world.produced)

    def _lost_beside(self) -> None:
        """The error of a call that steps nothing may have reported the loss of environments."""
        envs = self.world.envs
        views = enumerate(self.ledger.views)
        self.ledger.give_up([slot for slot, view in views if view.last and not envs[view.last.env].is_alive])

    def scale(self) -> None:
        nodes = self.driver.executor.nodes
        if nodes is not None:
            self._attempt(lambda: self.envs.scale(1 + self.world.choices.draw(len(nodes._nodes))))

    def misuse(self) -> None:
        """A call that makes no sense now is refused, and changes nothing."""
        phase = self.phase
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: self.envs.step(np.zeros(self.n, np.int64)),
            "send": lambda: self.envs.send(np.zeros(self.n, np.int64)),
            "recv": self.envs.recv,
            "call": lambda: self.envs.call("identify"),
            "get_attr": lambda: self.envs.get_attr("slot"),
            "set_attr": lambda: self.envs.set_attr("mark", 1),
            "rollout": lambda: self._collector().rollout(1),
            "stream": lambda: next(self._collector().stream(1)),
            "evaluate": lambda: self._collector().evaluate(episodes=1),
            "reset": self.envs.reset,
        }
        names = [name for name in calls if refusal(name, phase) is not None]
        if not names:
            return
        name = names[self.world.choices.draw(len(names))]
        try:
            calls[name]()
        except UsageError:
            if self.phase is not phase:
                self.world.fail(f"{name}() was refused in {phase}, which is {self.phase} now")
            return
        self.world.fail(f"{name}() was not refused in {phase}")

    def pause(self) -> None:
        self.driver.executor.background()
        self.world.clock.now_s += (0.0, 0.3, 3.0, 70.0)[self.world.choices.draw(4)]

    # -- collecting -------------------------------------------------------------------------------------------

    def _collector(self) -> Any:
        if self.policy is None:
            self.policy = ce.NumpyPolicy(_forward, {"w": np.zeros(1, np.float32)})
            draw = self.world.choices.draw
            on_loss, prefetch, sync = ("rerun", "mask")[draw(2)], draw(4) == 3, (None, ce.Every(2))[draw(2)]
            self.is_always = sync is None and not prefetch
            self.collectors = [
                self.envs.collector(self.policy, seed=1, on_loss=on_loss, prefetch=prefetch, sync=sync)
            ]
        return self.collectors[0]

    def _learn(self) -> None:
        """The agent changes, or not."""
        if self.world.choices.draw(3):
            weight = round(0.1 + 0.01 * self.world.choices.draw(200), 2)
            self.policy.values = {"w": np.array([weight], np.float32)}

    def _note_version(self, collector: Any) -> None:
        version = collector._sync.publisher.version
        weight = float(self.policy.values["w"][0])
        while len(self.weights) <= version:
            self.weights.append(weight)

    def rollout(self) -> None:
        draw, phase = self.world.choices.draw, self.phase
        collector = self._collector()
        num_steps = 1 + draw(4)
        if phase is Phase.COLLECTING:
            num_steps = collector._collection.fragments.num_steps
        else:
            self._learn()
        timeout_s = 0.5 if draw(5) == 4 else None
        is_newest = phase is Phase.IDLE and self.is_always and self.driver.executor.nodes is None
        try:
            batch = self._attempt(lambda: collector.rollout(num_steps, timeout_s), *LOSSES, DeadlineError)
        except DeadlineError:
            self._note_version(collector)
            return
        except LOSSES:
            self._note_version(collector)
            self.ledger.give_up(list(range(self.n)))
            return
        except Ended:
            self._note_version(collector)
            raise
        self._note_version(collector)
        self._read_events()
        if is_newest and (batch.versions[batch.valid] != len(self.weights) - 1).any():
            self.world.fail(f"rollout() acted by versions {set(batch.versions[batch.valid].tolist())}, not the newest")
        if batch.slots.tolist() != list(range(self.n)):
            self.world.fail(f"rollout() returned slots {batch.slots.tolist()}")
        self._check_batch(batch, False)

    def _check_batch(self, batch: Any, is_stream: bool) -> None:
        self.ledger.fragment(batch, is_stream)
        newest = len(self.weights) - 1
        for t, column in np.argwhere(batch.valid):
            version = int(batch.versions[t, column])
            if not 0 <= version <= newest:
                self.world.fail(f"{self.world.call}: acted by version {version}, the newest is {newest}")
            expected = logprob(self.weights[version], batch.obs[t, column], int(batch.actions[t, column]))
            if abs(expected - batch.logprobs[t, column]) > 1e-4:
                self.world.fail(
                    f"{self.world.call}: log-probability {batch.logprobs[t, column]:.4f} in row {t} of slot "
                    f"{batch.slots[column]}, version {version} gives {expected:.4f}"
                )

    def stream(self) -> None:
        draw = self.world.choices.draw
        collector = self._collector()
        num_steps, queue = 1 + draw(3), 1 + draw(3)
        least = 1 + draw(self.n)
        stale = (None, 1)[draw(2)]
        before = collector.stats()["dropped_fragments"]
        items = collector.stream(num_steps, least, max_staleness=stale, queue=queue)
        try:
            for _ in range(1 + draw(5)):
                if draw(8) == 7:
                    self.misuse()
                batch = self._attempt(lambda: next(items), *LOSSES)
                self._note_version(collector)
                self._read_events()
                dropped = collector.stats()["dropped_fragments"]
                if dropped > before:
                    self.ledger.give_up(list(range(self.n)))
                    before = dropped
                if len(batch.slots) < least:
                    self.world.fail(f"stream(min_envs={least}) returned slots {batch.slots}")
                self._check_batch(batch, True)
                self._learn()
                self._attempt(collector.publish)
                self._note_version(collector)
                if draw(3) == 0:
                    self.pause()
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))
        finally:
            self._note_version(collector)
            self._close(items)
            if collector.stats()["dropped_fragments"] > before:
                self.ledger.give_up(list(range(self.n)))

    def _close(self, items: Any) -> None:
        try:
            self._attempt(items.close, CrashLoopError)
        except CrashLoopError:
            self.ledger.give_up(list(range(self.n)))

    def evaluate(self) -> None:
        collector, episodes = self._collector(), 1 + self.world.choices.draw(4)
        try:
            found = self._attempt(lambda: collector.evaluate(episodes=episodes, seed=7), *LOSSES)
        except (*LOSSES, Ended):
            self._note_version(collector)
            self._lost_beside()
            return
        self._note_version(collector)
        if found.lengths.tolist() != [2] * episodes:
            self.world.fail(f"evaluate({episodes}) played {found.lengths.tolist()}")

    def step_with_policy(self) -> None:
        if self._reset_ended():
            return
        self._collector()
        self._learn()
        slots = list(range(self.n))
        try:
            result = self._attempt(lambda: self.envs.step(self.policy), *LOSSES, is_whole=True)
        except WorkerLostError as error:
            self._after_lost(error, None)
            return
        except LOSSES:
            self.ledger.give_up(slots)
            return
        self.ledger.step(slots, None, result)


def _forward(weights: Any, obs: Any) -> Any:
    return logits(float(weights["w"][0]), obs)

