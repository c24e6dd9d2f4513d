"""Slots whose environment is not live: what the user is still to be told of them, and when they come back. Pure.

A slot without a record is LIVE. A record exists from the failure of the environment (or of its worker) until its next
incarnation has taken its place; it says what has become of the environment (`Env`) and which loss no row has reported
yet. What the user has seen of the slot, and waits for, is the row's state (`Row`), which `rows.py` owns.
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


class Env(enum.Enum):
    """What has become of the environment of a slot."""

    LIVE = "live"
    LOST = "lost"
    """Gone, and no row has reported it."""
    DOWN = "down"
    """Gone; nobody has asked for it again."""
    DUE = "due"
    """To be rebuilt, not before a given time."""
    REBUILDING = "rebuilding"
    """The worker was asked to make it."""
    HELD = "held"
    """Made anew; its first row waits on the undelivered side, because nobody has asked for it."""


_MOVES: dict[Env, set[Env]] = {
    Env.LIVE: {Env.LOST, Env.DOWN, Env.DUE, Env.HELD},
    Env.LOST: {Env.LOST, Env.DOWN, Env.DUE, Env.REBUILDING},
    Env.DOWN: {Env.LOST, Env.DOWN, Env.DUE, Env.REBUILDING},
    Env.DUE: {Env.LOST, Env.DOWN, Env.DUE, Env.REBUILDING},
    Env.REBUILDING: {Env.LIVE, Env.HELD, Env.LOST, Env.DOWN, Env.DUE},
    Env.HELD: {Env.LIVE, Env.LOST, Env.DOWN, Env.DUE, Env.REBUILDING},
}
"""A vector environment is rebuilt whole, so that one of its slots may go from any state but LIVE to REBUILDING."""


class Row(enum.Enum):
    """What the user waits for, or is about to get."""

    IDLE = "nothing is awaited"
    AWAITED = "the row of a step is awaited"
    RESETTING = "the row of a reset is awaited"
    READY = "a row that ends no episode has arrived"
    READY_ENDING = "a row that ends an episode has arrived"
    READY_LOSS = "a row that reports a loss is ready"


class Episode(enum.Enum):
    """What the last row that was delivered says of the slot's episode."""

    NONE = "never started"
    RUNNING = "running"
    ENDED = "ended"


class Loss(NamedTuple):
    """Why an episode was lost, as `infos` says it."""

    reason: str
    with_worker: bool
    """Its worker process ended; False: the environment itself failed."""


class SlotError(AssertionError):
    """A transition that cannot be, with the slot's last ones."""


@dataclass(slots=True)
class Slot:
    """A slot whose environment is not live."""

    number: int
    env: Env = Env.LIVE
    loss: Loss | None = None
    """Of the episode, until a row has reported it."""
    since_s: float = 0.0
    awaited_at_s: float | None = None
    """Since when its row is awaited; None: it is not."""
    not_before_s: float = 0.0
    """Backoff: not rebuilt before."""
    columns: Columns | None = None
    """HELD: the infos of its first row."""
    history: deque[str] = field(default_factory=lambda: deque(maxlen=16))

    def move(self, env: Env, why: str) -> None:
        self.history.append(f"{self.env.value} -> {env.value} ({why})")
        if env not in _MOVES[self.env]:
            raise SlotError(f"slot {self.number}: " + "; ".join(self.history))
        self.env = env


class Asked(NamedTuple):
    """What a step of a slot that has a record comes to."""

    loss: Loss | None = None
    """To be reported in this row."""
    first: Columns | None = None
    """The infos of the first row of the next incarnation, which is this row."""


def after_loss(mode: AutoresetMode, row: Row, episode: Episode, was_held: bool) -> tuple[Env, bool]:
    """Return what becomes of a slot that was just lost, and whether its loss is to be reported by a row."""
    if row is Row.READY_LOSS:
        return Env.DOWN, False
    if row is Row.READY or (row is Row.READY_ENDING and mode is SAME_STEP):
        # That row arrived whole and is delivered as it is: nothing may be rebuilt over it before that. The episode that
        # goes on after it is lost; under SAME_STEP an ending row has begun the next one.
        return Env.LOST, True
    if row is Row.READY_ENDING:
        return Env.DOWN, False
    if row is Row.RESETTING or was_held:
        return Env.DUE, False
    if episode is Episode.NONE:  # nothing to report; where a row is awaited, it is the first of the next incarnation
        return (Env.DUE if row is Row.AWAITED else Env.DOWN), False
    if episode is Episode.ENDED and mode is NEXT_STEP:
        return Env.DUE, False  # its next row is a reset's in any case
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
        """Whether any slot is not live."""
        return bool(self.records)

    def env(self, slot: int) -> Env:
        record = self.records.get(slot)
        return Env.LIVE if record is None else record.env

    def is_gone(self, slot: int) -> bool:
        """Whether there is no environment: calls cannot reach it."""
        return self.env(slot) not in (Env.LIVE, Env.HELD)

    def gone(self) -> list[int]:
        return sorted(slot for slot in self.records if self.is_gone(slot))

    def due_times(self) -> Iterable[float]:
        return (record.not_before_s for record in self.records.values() if record.env is Env.DUE)

    def late(self, awaited: Any, now_s: float, limit_s: float) -> list[int]:
        """Return the slots that are awaited, and were without an environment for longer than `limit_s` meanwhile.

        `awaited`: bools [N]. While nobody waits for a slot, nobody has it brought back either.
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
                record.awaited_at_s = None  # whoever waits again has as long again
                late.append(slot)
        return late

    def _record(self, slot: int) -> Slot:
        return self.records.setdefault(slot, Slot(slot))

    # -- losses -----------------------------------------------------------------------------------------------

    def lose(self, slot: int, loss: Loss, row: Row, episode: Episode, now_s: float, not_before_s: float) -> Loss | None:
        """The environment failed, or its worker did. Returns the loss if the awaited row is to report it."""
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
        """The same within a fragment, which says itself which of its rows are invalid: it comes back at once."""
        record = self._record(slot)
        record.since_s, record.not_before_s = now_s, not_before_s
        record.move(Env.DUE, reason)

    def lose_by_error(self, slot: int, reason: str, now_s: float) -> None:
        """The same where an exception reports it: it comes back when somebody asks for it."""
        record = self._record(slot)
        record.since_s = record.not_before_s = now_s
        record.move(Env.DOWN, reason)

    def not_reported(self, slot: int, loss: Loss) -> None:
        """The row that would have reported this loss was given up before its delivery: report it in the next one."""
        record = self._record(slot)
        record.loss = loss
        if record.env is Env.LIVE:  # SAME_STEP: that row was the first of the next incarnation, and is still there
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

    # -- what is asked of them --------------------------------------------------------------------------------

    def step(self, slot: int) -> Asked | None:
        """The user steps it. None: it is live, and its worker is asked; otherwise its row needs no worker, or (neither
        loss nor first row) comes with its next incarnation."""
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
        """The user resets it: a loss that was not reported is forgotten. Returns whether it is live, and its worker is
        asked; otherwise its row comes with its next incarnation."""
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
        """A fragment begins with it. Returns whether its first row is to become the observation to go on from."""
        record = self.records.get(slot)
        if record is None:
            return False
        if record.env is Env.HELD:
            self._live(record, "fragment")
            return True
        self.bring_back(slot)
        return False

    def bring_back(self, slot: int) -> None:
        """Somebody waits for this slot: rebuild it as soon as its backoff allows."""
        record = self.records[slot]
        if record.env in (Env.LOST, Env.DOWN):
            record.move(Env.DUE, "asked for")

    # -- rebuilding -------------------------------------------------------------------------------------------

    def due(self, slots: list[int], now_s: float) -> list[int]:
        """Return those of `slots` that are to be rebuilt now."""
        found = (self.records.get(slot) for slot in slots)
        return [r.number for r in found if r is not None and r.env is Env.DUE and r.not_before_s <= now_s]

    def rebuild(self, slots: list[int]) -> None:
        for slot in slots:
            self._record(slot).move(Env.REBUILDING, "rebuild")

    def rebuilt(self, slot: int) -> Loss | None:
        """It is live again, and its first row awaited. Returns the loss that this row is to report."""
        record = self.records[slot]
        loss = record.loss
        self._live(record, "rebuilt")
        return loss

    def hold(self, slot: int, columns: Columns) -> None:
        """It is made anew, and nobody has asked for its first row."""
        record = self.records[slot]
        record.columns = columns
        record.move(Env.HELD, "rebuilt")

    def _live(self, record: Slot, why: str) -> None:
        record.move(Env.LIVE, why)
        del self.records[record.number]
