"""Slots whose environment is not live: which loss a row still has to report, and when each is rebuilt. Pure.

A slot without a record is LIVE. A record exists from the failure of the environment (or of its worker) until its next
incarnation is live; it holds the state of the environment (`Env`) and a loss that no row has reported yet. What the
user has seen of the slot, and waits for, is the state of its row (`Row`), which `rows.py` owns.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode

from clusterenv.wire.infos import Columns

__all__ = ["Env", "Episode", "Loss", "Row", "Slot", "SlotError", "Slots", "after_loss"]

SAME_STEP, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP

REBUILT_FOR_OTHERS = "its vector environment was rebuilt for a reset of other slots"


class Env(enum.Enum):
    """State of a slot's environment."""

    LIVE = "live"
    LOST = "lost"
    """Gone; no row has reported the loss yet."""
    DOWN = "down"
    """Gone; not requested again yet."""
    DUE = "due"
    """To be rebuilt, not before a given time."""
    REBUILDING = "rebuilding"
    """Its worker has been asked to rebuild it."""
    HELD = "held"
    """Rebuilt; its first row stays on the undelivered side until it is requested."""


_MOVES: dict[Env, set[Env]] = {
    Env.LIVE: {Env.LOST, Env.DOWN, Env.DUE, Env.HELD},
    Env.LOST: {Env.LOST, Env.DOWN, Env.DUE, Env.REBUILDING},
    Env.DOWN: {Env.LOST, Env.DOWN, Env.DUE, Env.REBUILDING},
    Env.DUE: {Env.LOST, Env.DOWN, Env.DUE, Env.REBUILDING},
    Env.REBUILDING: {Env.LIVE, Env.HELD, Env.LOST, Env.DOWN, Env.DUE},
    Env.HELD: {Env.LIVE, Env.LOST, Env.DOWN, Env.DUE},
}
"""A vector environment is rebuilt as a whole, so its slots may go to REBUILDING from any state without environment."""


class Row(enum.Enum):
    """State of the row that the user waits for or is about to receive."""

    IDLE = "nothing is awaited"
    AWAITED = "the row of a step is awaited"
    RESETTING = "the row of a reset is awaited"
    READY = "a row that ends no episode has arrived"
    READY_ENDING = "a row that ends an episode has arrived"
    READY_LOSS = "a row that reports a loss is ready"


class Episode(enum.Enum):
    """State of a slot's episode after its newest row."""

    NONE = "never started"
    RUNNING = "running"
    ENDED = "ended"


class Loss(NamedTuple):
    """Why an episode was lost, as reported in `infos`."""

    reason: str
    with_worker: bool
    """True: its worker process ended; False: the environment itself failed."""


class SlotError(AssertionError):
    """Raised for an illegal transition; lists the slot's last transitions."""


@dataclass(slots=True)
class Slot:
    """A slot whose environment is not live."""

    number: int
    env: Env = Env.LIVE
    loss: Loss | None = None
    """The loss of the episode, until a row has reported it."""
    since_s: float = 0.0
    awaited_at_s: float | None = None
    """Since when its row has been awaited; None: it is not awaited."""
    not_before_s: float = 0.0
    """Backoff: the earliest time to rebuild it."""
    columns: Columns | None = None
    """HELD: the infos of its first row."""
    history: deque[str] = field(default_factory=lambda: deque(maxlen=16))

    def move(self, env: Env, why: str) -> None:
        self.history.append(f"{self.env.value} -> {env.value} ({why})")
        if env not in _MOVES[self.env]:
            raise SlotError(f"slot {self.number}: " + "; ".join(self.history))
        self.env = env


class Asked(NamedTuple):
    """Result of stepping a slot that has a record."""

    loss: Loss | None = None
    """The loss that this row reports."""
    first: Columns | None = None
    """The infos of this row, if it is the first of the next incarnation."""


def after_loss(mode: AutoresetMode, row: Row, episode: Episode, was_held: bool) -> tuple[Env, bool]:
    """Return the new state of a slot that was just lost, and whether a row has to report the loss."""
    if row is Row.READY_LOSS:
        return Env.DOWN, False
    if row is Row.READY or (row is Row.READY_ENDING and mode is SAME_STEP):
        # That row arrived complete and is delivered unchanged: nothing may be rebuilt over it before. The episode that
        # continues after it is lost; under SAME_STEP an ending row has already begun the next one.
        return Env.LOST, True
    if row is Row.READY_ENDING:
        return Env.DOWN, False
    if row is Row.RESETTING or was_held:
        return Env.DUE, False
    if episode is Episode.NONE:  # nothing to report: an awaited row is the first of the next incarnation
        return (Env.DUE if row is Row.AWAITED else Env.DOWN), False
    if episode is Episode.ENDED and mode is NEXT_STEP:
        return Env.DUE, False  # its next row is a reset row in any case
    if row is Row.AWAITED:
        return (Env.DUE if mode is SAME_STEP else Env.LOST), True
    if episode is Episode.ENDED and mode is AutoresetMode.DISABLED:
        return Env.DOWN, False  # it has to be reset in any case
    return Env.LOST, True


class Slots:
    """The records of all slots whose environment is not live."""

    def __init__(self, mode: AutoresetMode) -> None:
        self.mode = mode
        self.records: dict[int, Slot] = {}

    def __bool__(self) -> bool:
        """Return whether any slot is not live."""
        return bool(self.records)

    def env(self, slot: int) -> Env:
        record = self.records.get(slot)
        return Env.LIVE if record is None else record.env

    def is_gone(self, slot: int) -> bool:
        """Return whether the slot has no environment that calls could reach."""
        return self.env(slot) not in (Env.LIVE, Env.HELD)

    def gone(self) -> list[int]:
        return sorted(slot for slot in self.records if self.is_gone(slot))

    def due_times(self) -> Iterable[float]:
        return (record.not_before_s for record in self.records.values() if record.env is Env.DUE)

    def late(self, awaited: Any, now_s: float, limit_s: float) -> list[int]:
        """Return the slots that have been awaited, and without an environment, for longer than `limit_s`.

        `awaited`: bools [N]. Time while a slot is not awaited does not count: it is not rebuilt then either.
        """
        late = []
        for slot in self.gone():
            record = self.records[slot]
            if not awaited[slot]:
                record.awaited_at_s = None
                continue
            if record.awaited_at_s is None:
                record.awaited_at_s = now_s
            if now_s - max(record.since_s, record.awaited_at_s) > limit_s:
                record.awaited_at_s = None  # the next wait gets the full limit again
                late.append(slot)
        return late

    def _record(self, slot: int) -> Slot:
        return self.records.setdefault(slot, Slot(slot))

    # -- losses -----------------------------------------------------------------------------------------------

    def lose(self, slot: int, loss: Loss, row: Row, episode: Episode, now_s: float, not_before_s: float) -> Loss | None:
        """Record that the environment or its worker failed. Return the loss if the awaited row has to report it."""
        record = self._record(slot)
        record.since_s, record.not_before_s = now_s, not_before_s
        env, is_reported = after_loss(self.mode, row, episode, record.env is Env.HELD)
        record.move(env, loss.reason)
        if is_reported:
            record.loss = loss
        if row is Row.AWAITED and env is Env.LOST:
            return self._report(record)
        return None

    def lose_in_fragment(self, slot: int, reason: str, now_s: float, not_before_s: float) -> None:
        """Record a failure within a fragment, which flags its invalid rows itself: the slot is due at once."""
        record = self._record(slot)
        record.since_s, record.not_before_s = now_s, not_before_s
        record.move(Env.DUE, reason)

    def lose_by_error(self, slot: int, reason: str, now_s: float) -> None:
        """Record a failure that an exception reports: the slot is rebuilt when it is next requested."""
        record = self._record(slot)
        record.since_s = record.not_before_s = now_s
        record.move(Env.DOWN, reason)

    def not_reported(self, slot: int, loss: Loss) -> None:
        """Report this loss in the next row: the row that would have reported it was given up before delivery."""
        record = self._record(slot)
        record.loss = loss
        if record.env is Env.LIVE:  # SAME_STEP: that row is the first of the next incarnation, and still in memory
            record.columns = {}
            record.move(Env.HELD, "row given up")
        elif record.env is Env.DOWN:
            record.move(Env.LOST, "row given up")

    def _report(self, record: Slot) -> Loss:
        loss, record.loss = record.loss, None
        assert loss is not None
        if record.env is Env.LOST:
            record.move(Env.DOWN, "reported")
        return loss

    # -- requests ---------------------------------------------------------------------------------------------

    def unite(self, slots: list[int]) -> list[int]:
        """Make the slots of a vector environment alike before they step together: if one has a loss to report, or waits
        with a first row while others are within an episode, all of them report a loss, and the environment is rebuilt.

        A reset of only some of them does that: it rebuilds an environment that was lost for all of them. Returns the
        slots that lose an episode by this.
        """
        records = [self.records[slot] for slot in slots if slot in self.records]
        losses = [record.loss for record in records if record.loss is not None]
        if len(losses) == len(slots) or (not losses and len(records) in (0, len(slots))):
            return []
        loss = losses[0] if losses else Loss(REBUILT_FOR_OTHERS, False)
        united = []
        for slot in slots:
            record = self._record(slot)
            if record.loss is None:
                record.loss = loss
                united.append(slot)
            if record.env is not Env.REBUILDING:  # then the environment that is being made is a new one for all
                record.move(Env.LOST, "steps with others")
        return united

    def step(self, slot: int) -> Asked | None:
        """Step the slot. Return None if it is live, so that its worker has to be asked. Otherwise its row needs no
        worker, or (neither loss nor first row) comes with its next incarnation."""
        record = self.records.get(slot)
        if record is None:
            return None
        if record.loss is not None and self.mode is not SAME_STEP:
            return Asked(loss=self._report(record))
        if record.env is Env.HELD:
            columns, loss = record.columns, record.loss
            self._live(record, "stepped")
            return Asked(loss, columns)
        self.bring_back(slot)
        return Asked()

    def reset(self, slot: int) -> bool:
        """Reset the slot, and forget an unreported loss. Return whether it is live, so that its worker has to be asked;
        otherwise its row comes with its next incarnation."""
        record = self.records.get(slot)
        if record is None:
            return True
        record.loss = None
        if record.env is Env.HELD:
            self._live(record, "reset")
            return True
        self.bring_back(slot)
        return False

    def start_fragment(self, slot: int) -> bool:
        """Begin a fragment with the slot. Return whether the fragment starts from the slot's held first row."""
        record = self.records.get(slot)
        if record is None:
            return False
        if record.env is Env.HELD:
            self._live(record, "fragment")
            return True
        self.bring_back(slot)
        return False

    def bring_back(self, slot: int) -> None:
        """Rebuild this slot as soon as its backoff allows."""
        record = self.records[slot]
        if record.env in (Env.LOST, Env.DOWN):
            record.move(Env.DUE, "asked for")

    # -- rebuilding -------------------------------------------------------------------------------------------

    def due(self, slots: list[int], now_s: float) -> list[int]:
        """Return those of `slots` that have to be rebuilt now."""
        found = (self.records.get(slot) for slot in slots)
        return [r.number for r in found if r is not None and r.env is Env.DUE and r.not_before_s <= now_s]

    def rebuild(self, slots: list[int]) -> None:
        for slot in slots:
            self._record(slot).move(Env.REBUILDING, "rebuild")

    def rebuilt(self, slot: int) -> Loss | None:
        """Mark the slot as live; its first row is awaited. Return the loss that this row has to report."""
        record = self.records[slot]
        loss = record.loss
        self._live(record, "rebuilt")
        return loss

    def hold(self, slot: int, columns: Columns) -> None:
        """Hold the rebuilt environment's first row until it is requested."""
        record = self.records[slot]
        record.columns = columns
        record.move(Env.HELD, "rebuilt")

    def _live(self, record: Slot, why: str) -> None:
        record.move(Env.LIVE, why)
        del self.records[record.number]
