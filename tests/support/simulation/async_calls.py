"""Make the calls of `AsyncVectorEnv` in a simulated run, save and load states, and check that misuse is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.errors import DeadlineError, UsageError
from clusterenv.vector.phases import Phase
from simulation.calls import LOSSES, User
from simulation.world import World

__all__ = ["AsyncUser"]


_OF_ENVS = ("call", "get_attr", "set_attr")
_ANY = ("reset", "reset_async", "call_async", "load_state_dict", *_OF_ENVS)
_COLLECT = ("rollout", "stream", "evaluate")

_ALLOWED: dict[Phase, tuple[str, ...]] = {
    Phase.NEW: (*_ANY, *_COLLECT),
    Phase.IDLE: (*_ANY, *_COLLECT, "step", "send", "step_async"),
    Phase.PARTIAL: ("reset", "send", "recv"),
    Phase.RESETTING: ("reset", "reset_wait"),
    Phase.STEPPING: ("reset", "step_wait"),
    Phase.CALLING: ("reset", "call_wait"),
    Phase.COLLECTING: ("reset", "rollout", "evaluate", *_OF_ENVS),
    Phase.STREAMING: _OF_ENVS,
    Phase.INTERRUPTED: _ANY,
}
"""The calls that are possible in each phase, stated apart from the table that is tested."""


class AsyncUser(User):
    """Makes the `_async` and `_wait` halves of calls, which the user may also abandon by a reset."""

    def __init__(self, world: World, envs: Any, recovery: Any) -> None:
        super().__init__(world, envs, recovery)
        self._resets: tuple[list[int], list[int | None] | None] = ([], None)
        """Slots and seeds of the reset that is pending."""
        self._pending_actions: Any = None

    def _timeout_s(self) -> float | None:
        return (None, None, 0.0, 0.5)[self.world.choices.draw(4)]

    def _still_pending(self, phase: Phase) -> None:
        if self.phase is not phase:
            self.world.fail(f"{self.world.call} timed out, and the phase is {self.phase}")

    # -- reset ------------------------------------------------------------------------------------------------

    def reset_async(self) -> None:
        self.actions = {}
        slots, options, seed = list(range(self.n)), None, self._draw_seed()
        if self.envs._guard.was_reset and self.phase is Phase.IDLE and self.world.choices.draw(2):
            mask = self._draw_mask()
            slots, options, seed = np.flatnonzero(mask).tolist(), {"reset_mask": mask}, None
        seeds: list[int | None] | None = None if seed is None else [seed + slot for slot in range(self.n)]
        self._resets = (slots, seeds)
        try:
            self._attempt(lambda: self.envs.reset_async(seed=seed, options=options), *LOSSES)
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))

    def reset_wait(self) -> None:
        timeout_s = self._timeout_s()
        try:
            obs, _ = self._attempt(lambda: self.envs.reset_wait(timeout_s), *LOSSES, DeadlineError, is_whole=True)
        except DeadlineError:
            self._still_pending(Phase.RESETTING)
            return
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))
            return
        slots, seeds = self._resets
        self.ledger.untouched([slot for slot in range(self.n) if slot not in slots], obs)
        self.ledger.reset(slots, obs[slots], seeds)

    # -- step -------------------------------------------------------------------------------------------------

    def step_async(self) -> None:
        if self._reset_ended():
            return
        actions = self._pending_actions = self._draw_actions(list(range(self.n)))
        self._attempt(lambda: self.envs.step_async(actions))

    def step_wait(self) -> None:
        timeout_s = self._timeout_s()
        try:
            self._take_step(lambda: self.envs.step_wait(timeout_s), self._pending_actions, DeadlineError)
        except DeadlineError:
            self._still_pending(Phase.STEPPING)

    # -- calls ------------------------------------------------------------------------------------------------

    def call_async(self) -> None:
        try:
            self._attempt(lambda: self.envs.call_async("identify"), *LOSSES, UsageError)
        except UsageError:
            self._refused_when_loaded()
        except LOSSES:
            self._lost_beside()

    def call_wait(self) -> None:
        timeout_s = self._timeout_s()
        try:
            found = self._attempt(lambda: self.envs.call_wait(timeout_s), *LOSSES, DeadlineError)
        except DeadlineError:
            self._still_pending(Phase.CALLING)
            return
        except LOSSES:
            self._lost_beside()
            return
        self._check_answers(list(range(self.n)), found)

    # -- resuming ---------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Resume from the present state: every slot continues with its next incarnation."""
        self.actions = {}
        self.ledger.give_up(list(range(self.n)))
        state = self.envs.state_dict()
        try:
            self._attempt(lambda: self.envs.load_state_dict(state), *LOSSES)
        except LOSSES:
            return
        # The environments that came back before the state was loaded had later incarnations, which are used again.
        self.world.incarnations = dict(enumerate(state["pool"]["incarnations"]))
        self.world.seeds.clear()
        if self.phase is not Phase.NEW:
            self.world.fail(f"load_state_dict() leaves the phase {self.phase}")

    # -- misuse -----------------------------------------------------------------------------------------------

    def _collector(self) -> Any:
        raise NotImplementedError

    def misuse(self) -> None:
        """Check that a call that is invalid in this phase is refused, and changes nothing."""
        phase, envs, actions = self.phase, self.envs, np.zeros(self.n, np.int64)
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: envs.step(actions),
            "send": lambda: envs.send(actions),
            "recv": envs.recv,
            "call": lambda: envs.call("identify"),
            "get_attr": lambda: envs.get_attr("slot"),
            "set_attr": lambda: envs.set_attr("mark", 1),
            "rollout": lambda: self._collector().rollout(1),
            "stream": lambda: next(self._collector().stream(1)),
            "evaluate": lambda: self._collector().evaluate(episodes=1),
            "reset": envs.reset,
            "reset_async": envs.reset_async,
            "reset_wait": envs.reset_wait,
            "step_async": lambda: envs.step_async(actions),
            "step_wait": envs.step_wait,
            "call_async": lambda: envs.call_async("identify"),
            "call_wait": envs.call_wait,
            "load_state_dict": lambda: envs.load_state_dict(envs.state_dict()),
        }
        names = [name for name in calls if name not in _ALLOWED[phase]]
        name = names[self.world.choices.draw(len(names))]
        try:
            calls[name]()
        except UsageError:
            if self.phase is not phase:
                self.world.fail(f"{name}() was refused in {phase}, which is {self.phase} now")
            return
        self.world.fail(f"{name}() was not refused in {phase}")
