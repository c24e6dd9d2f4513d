"""Refuse calls that are not possible in the present phase. Every call of `ClusterEnv` checks this first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode

from clusterenv.driver import Driver
from clusterenv.engine.collecting.fragments import Mode
from clusterenv.engine.requests import Request
from clusterenv.errors import ClosedError, DeadlineError, UsageError
from clusterenv.system.teardown import Teardown
from clusterenv.vector.parameters import ResetArguments
from clusterenv.vector.phases import AWAITED, PENDING, Phase, refusal, refused

__all__ = ["CallGuard", "Pending"]


@dataclass(frozen=True)
class Pending:
    """A call between its `_async` and its `_wait`."""

    phase: Phase
    reset: ResetArguments | None = None
    requests: Sequence[Request] = ()
    """The requests of `call_async`."""


class CallGuard:
    """Track the phase of the environments, and refuse calls that it does not allow."""

    def __init__(self, driver: Driver, teardown: Teardown) -> None:
        self._driver = driver
        self._rows, self._fragments = driver.rows, driver.collecting.fragments
        self._teardown = teardown  # begins when the environments are closed
        self.may_end = driver.mode is AutoresetMode.DISABLED
        self.was_reset = False
        self.is_interrupted = False
        """A step or reset is in progress, or was ended by an exception: its rows are unknown."""
        self.is_resumed = False
        """Whether the state of another run was loaded, which determines the seeds of the slots."""
        self.pending: Pending | None = None

    @property
    def phase(self) -> Phase:
        if self.pending is not None:
            return self.pending.phase
        if self.was_interrupted:
            return Phase.INTERRUPTED
        if not self.was_reset:
            return Phase.NEW
        mode = self._fragments.mode
        if mode is not Mode.IDLE:
            return Phase.STREAMING if mode is Mode.STREAM else Phase.COLLECTING
        return Phase.PARTIAL if self._rows.is_in_flight else Phase.IDLE

    @property
    def was_interrupted(self) -> bool:
        """Whether an exception ended the last step or reset, so that its rows are unknown until the next full reset."""
        return self.is_interrupted and (self.pending is None or self.pending.phase is Phase.CALLING)

    def check(self, call: str) -> None:
        """Raise if this call is not possible now."""
        if (  # the hot path: nothing is pending, so everything is allowed but waiting for results
            self.was_reset
            and not self.is_interrupted
            and self.pending is None
            and not self._rows.sent
            and self._fragments.mode is Mode.IDLE
            and not self._teardown.has_begun
            and call not in AWAITED
        ):
            return
        self.check_open(call)
        phase = self.phase
        text = refusal(call, phase)
        if text is not None:
            slots = np.flatnonzero(self._rows.awaited).tolist()
            raise refused(call, phase, text, slots, self._fragments.num_steps)

    @contextmanager
    def waiting(self) -> Iterator[Pending]:
        """Wait for the pending call in the `with` block; it stays pending only if the block raises DeadlineError."""
        pending, self.pending = self.pending, None
        assert pending is not None
        try:
            yield pending
        except DeadlineError:
            self.pending = pending
            raise

    def warn_of_pending(self) -> None:
        """Warn, as Gymnasium does, that `close` abandons a pending call."""
        if self.pending is not None:
            name, self.pending = PENDING[self.pending.phase], None
            logger.warn(f"Calling `close` while waiting for a pending call to `{name}` to complete.")

    def check_open(self, call: str) -> None:
        if self._teardown.has_begun:
            raise ClosedError(f"{call}(): these environments were closed; make a new ClusterEnv")

    def check_not_loaded(self, call: str, name: str) -> None:
        """Raise if the next reset replaces the environments that this call would reach."""
        if self.is_resumed and not self.was_reset:
            raise UsageError(
                f"{call}({name!r}) after load_state_dict(): the next reset() creates new environments, "
                "with the attributes of the loaded state; call reset() first"
            )

    def check_not_ended(self, slots: list[int] | None) -> None:
        """Raise if one of these slots (None: all) would be stepped past the end of its episode."""
        if not self.may_end:
            return
        ended = self._rows.ended
        if ended.any() if slots is None else ended[slots].any():
            over = np.flatnonzero(ended).tolist()
            raise UsageError(
                f"the episodes of slots {over} ended, and autoreset is DISABLED: "
                "reset(options={'reset_mask': terminations | truncations}) first"
            )

    def check_whole_vectors(self, slots: list[int]) -> None:
        """Raise if only some slots of a vector environment would be stepped."""
        for its in self._driver.slots_of if self._driver.is_vector else ():
            chosen = set(its) & set(slots)
            if chosen and len(chosen) < len(its):
                raise UsageError(
                    f"Vector(fn) environments step together: slots {its[0]}-{its[-1]} share a worker, "
                    f"but only {sorted(chosen)} were sent"
                )
