"""Slots without an environment: what the user is still to be told of them, and when they come back. Pure: no I/O.

A slot is *gone* from the failure of its environment (or worker) until its next incarnation is built. Its episode is
*lost* until a row told the user so. A first row of a new incarnation that nobody awaits yet is *held*.
"""

from __future__ import annotations

from typing import NamedTuple

from gymnasium.vector import AutoresetMode

from clusterenv.wire.infos import Columns

__all__ = ["Loss", "Losses", "Seen"]


class Loss(NamedTuple):
    """Why an episode was lost, as `infos` says it."""

    reason: str
    with_worker: bool
    """Its worker process ended; False: the environment itself failed."""


class Seen(NamedTuple):
    """What the user has seen of a slot, and waits for, at the moment of its loss."""

    started: bool
    ended: bool
    """The last row delivered ended an episode."""
    awaited: bool
    resetting: bool
    ready: bool
    """A whole row has arrived, and is not delivered yet."""
    ready_ends: bool
    """That row ends an episode."""
    ready_is_loss: bool
    """That row reports a loss."""


class Losses:
    def __init__(self, mode: AutoresetMode) -> None:
        self.mode = mode
        self.gone: dict[int, float] = {}  # since when
        self.lost: dict[int, Loss] = {}  # not told yet
        self.held: dict[int, Columns] = {}
        self.rebuilding: set[int] = set()  # asked of a worker, not answered yet
        self.respawn: dict[int, float] = {}  # workers to start again, and when
        self._due: dict[int, float] = {}  # slots to rebuild, and when
        self._until: dict[int, float] = {}  # backoff: not before

    def __bool__(self) -> bool:
        return bool(self.gone or self.held)

    @property
    def has_due(self) -> bool:
        return bool(self._due or self.respawn)

    def due_times(self) -> tuple[float, ...]:
        return (*self._due.values(), *self.respawn.values())

    def slot_gone(self, slot: int, now_s: float) -> None:
        self.gone[slot] = self._until[slot] = now_s

    def worker_gone(self, worker: int, slots: list[int], now_s: float) -> None:
        for slot in slots:
            self.gone.setdefault(slot, now_s)
            self._until[slot] = now_s
            self._due.pop(slot, None)
            self.rebuilding.discard(slot)
        self.respawn[worker] = now_s

    def settle(self, slot: int, loss: Loss, until_s: float, now_s: float, seen: Seen) -> bool:
        """Decide what the user sees of a slot that was just lost, and when it comes back.

        True: the awaited row must report the loss.
        """
        self.gone[slot] = now_s
        self._until[slot] = until_s
        was_held = self.held.pop(slot, None) is not None
        if seen.ready:
            # The row arrived whole before the loss and is delivered as it is: nothing may be rebuilt over it before
            # that. The episode that goes on after it is lost; under SAME_STEP an ending row has begun the next one.
            if not seen.ready_is_loss and (not seen.ready_ends or self.mode is AutoresetMode.SAME_STEP):
                self.lost[slot] = loss
            return False
        between = seen.ended and self.mode is AutoresetMode.NEXT_STEP
        if seen.resetting or was_held or (between and seen.started):
            self._due[slot] = until_s
        elif seen.started:
            self.lost[slot] = loss
            if seen.awaited:
                if self.mode is not AutoresetMode.SAME_STEP:
                    return True
                self._due[slot] = until_s
        return False

    def settle_collecting(self, slot: int, until_s: float) -> None:
        """Lost in a fragment, which says itself which of its rows are invalid."""
        self.held.pop(slot, None)
        self._until[slot] = self._due[slot] = until_s

    def not_reported(self, slot: int, loss: Loss) -> None:
        """The row that would have reported this loss was given up before its delivery: report it in the next one."""
        self.lost[slot] = loss
        if slot not in self.gone:  # SAME_STEP: that row was the first of the next incarnation, and is still there
            self.held.setdefault(slot, {})

    def bring_back(self, slot: int) -> None:
        """Somebody waits for this slot: rebuild it as soon as its backoff allows."""
        if slot not in self.rebuilding:
            self._due.setdefault(slot, self._until[slot])

    def reset(self, slot: int) -> bool:
        """The user resets it: losses not told are forgotten. True: it has no environment, and is rebuilt."""
        self.lost.pop(slot, None)
        self.held.pop(slot, None)
        if slot in self.gone:
            self._due[slot] = self._until[slot]
            return True
        return False

    def start_due(self, slots: list[int], now_s: float) -> list[int]:
        """Those of `slots` that are to be rebuilt now."""
        return sorted(slot for slot in slots if self._due.get(slot, now_s + 1.0) <= now_s)

    def rebuild(self, slots: list[int]) -> None:
        for slot in slots:
            self._due.pop(slot, None)
        self.rebuilding |= set(slots)

    def rebuilt(self, slots: list[int], good: list[int]) -> None:
        self.rebuilding -= set(slots)
        for slot in good:
            self.gone.pop(slot, None)

    def late(self, now_s: float, limit_s: float) -> list[int]:
        return [slot for slot, since in self.gone.items() if now_s - since > limit_s]
