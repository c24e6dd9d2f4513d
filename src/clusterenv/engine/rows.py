"""Rows on their way to the user: which are awaited, which have arrived, and how they are delivered."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from clusterenv.engine.slots import Episode, Loss, Row
from clusterenv.memory.rows import Buffers, assemble, flatten
from clusterenv.wire import infos as info_columns
from clusterenv.wire.infos import Columns
from clusterenv.wire.requests import Reply

__all__ = ["Delivery", "Rows"]


class Rows(NamedTuple):
    """One delivery. Arrays have one row per entry of `slots`, ascending."""

    slots: Any  # [n] ints
    obs: Any
    rewards: Any
    terminations: Any
    truncations: Any
    infos: dict[str, Any]
    lost: dict[int, Loss]
    """Row number → why its episode was lost."""


class Delivery:
    """The head's view of the rows in shared memory. Only this class switches their sides."""

    def __init__(self, num_envs: int, space: Space[Any], buffers: Buffers) -> None:
        self._space = space
        self._everyone = np.arange(num_envs)
        self.num_envs = num_envs
        self.buffers = buffers
        leaves = buffers.layout.obs
        self._only = buffers.obs[0] if len(leaves) == 1 and not leaves[0].path else None
        """The observations, if the space is a single array."""
        # Rows that the user asked for and has not received yet.
        self.awaited = np.zeros(num_envs, dtype=np.bool_)
        self.ready = np.zeros(num_envs, dtype=np.bool_)
        self.is_loss = np.zeros(num_envs, dtype=np.bool_)
        """Ready rows that report a loss. They are not in shared memory: the undelivered side is free."""
        self.sent = False  # something was sent outside the hot loop, and may still be awaited
        self.resetting: dict[int, tuple[int | None, Any]] = {}  # awaited resets: seed, options
        self._columns: list[Columns] = []
        self._objects: list[list[Any]] = [[] for _ in range(num_envs)]  # last delivered
        self._next_objects: dict[int, list[Any]] = {}  # of rows not delivered yet
        self._lost_rows: dict[int, Loss] = {}  # reported by the next delivery
        self._before_adopted: dict[int, list[Any]] = {}  # last delivered observations, while a fragment runs
        self.deliveries = 0
        """Number of times that rows were delivered or collected: what was known of episodes before may have changed."""
        self.transitions = 0
        """Number of rows that were delivered, and of valid rows in fragments that have arrived."""
        self._side: int | None = 0  # the side that was delivered last, if it is the same for all
        # State of each slot's episode.
        self.started = np.zeros(num_envs, dtype=np.bool_)
        self.ended = np.zeros(num_envs, dtype=np.bool_)
        self._had_ended = np.zeros(num_envs, dtype=np.bool_)  # `ended` before the newest row
        self._is_fresh = np.zeros(num_envs, dtype=np.bool_)  # the newest row is of a reset, or begins a fragment's next
        self.proven = np.zeros(num_envs, dtype=np.bool_)
        self._all_proven = False

    def close(self) -> None:
        """Release the memory: views would keep it open."""
        self._only = None
        del self.buffers

    # -- arrivals ---------------------------------------------------------------------------------------------

    def expect(self, slots: list[int]) -> None:
        self.awaited[slots] = self.sent = True

    def expect_all(self) -> None:
        self.awaited[:] = self.sent = True

    def mark_ready(self, slots: list[int]) -> None:
        if slots:
            # Mostly consecutive: setting a slice is faster than a list of indices.
            whole = slots[-1] - slots[0] + 1 == len(slots)
            self.ready[slice(slots[0], slots[-1] + 1) if whole else slots] = True

    @property
    def is_in_flight(self) -> bool:
        """Whether a row is awaited that was requested outside the hot loop."""
        return self.sent and bool(self.awaited.any())

    @property
    def ready_count(self) -> int:
        return int(np.count_nonzero(self.ready))

    def has_ended(self, slot: int) -> bool:
        """Return whether the newest row of this slot, delivered or not, ended an episode."""
        if self.ready[slot] and not self.is_loss[slot]:
            return bool(self.buffers.terminated[slot] or self.buffers.truncated[slot])
        return bool(self.ended[slot])

    def at_start(self, resets_in_same_step: bool) -> Any:
        """Return [N] whether the last delivered observation is the first of an episode."""
        return self._is_fresh | (self.ended if resets_in_same_step else self._had_ended)

    def has_row(self, slots: list[int]) -> bool:
        """Return whether the undelivered side of any of these slots holds a row that waits for delivery."""
        return bool((self.ready[slots] & ~self.is_loss[slots]).any())

    def row(self, slot: int, together: list[int]) -> Row:
        """Return the state of this slot's row; `together`: the slots that step and end with it."""
        if self.is_loss[slot]:
            return Row.READY_LOSS
        if self.ready[slot]:
            return Row.READY_ENDING if all(map(self.has_ended, together)) else Row.READY
        if slot in self.resetting:
            return Row.RESETTING
        return Row.AWAITED if self.awaited[slot] else Row.IDLE

    def episode(self, slot: int, together: list[int]) -> Episode:
        if not self.started[slot]:
            return Episode.NONE
        return Episode.ENDED if all(map(self.has_ended, together)) else Episode.RUNNING

    def stop_waiting(self, slots: list[int]) -> None:
        """Do not wait for the rows of these slots any more, which have not arrived."""
        self.awaited[slots] = False
        for slot in slots:
            self.resetting.pop(slot, None)

    def give_up(self, slot: int) -> None:
        """Stop waiting for this slot's row: an exception reports the loss."""
        self.awaited[slot] = self.started[slot] = self.ready[slot] = self.is_loss[slot] = False
        self._lost_rows.pop(slot, None)
        self.resetting.pop(slot, None)
        others = {other: other for other in range(self.num_envs) if other != slot}
        self._columns = [info_columns.select(columns, others) for columns in self._columns]

    def add_rows(self, reply: Reply) -> None:
        """Add what a reply carries besides the rows in shared memory: objects and infos."""
        self.add_objects(reply)
        if reply.infos:
            self._columns.append(reply.infos)

    def add_objects(self, reply: Reply) -> None:
        self._next_objects.update(reply.objects or ())

    def report_loss(self, slot: int, loss: Loss) -> None:
        """Report that the episode was lost: reward 0, truncated, the last delivered observation again."""
        self._lost_rows[slot] = loss
        self.is_loss[slot] = True
        self.mark_ready([slot])

    def first_row(self, slot: int, columns: Columns, lost: Loss | None) -> None:
        """Use the first row of a new incarnation as the awaited row; under SAME_STEP it also reports the loss."""
        if lost is not None:
            last = self.peek_obs(np.array([slot]))
            final = {"final_obs": _first(self._space, last), "final_info": {}}
            self._columns.append(info_columns.pack([(slot, final)]))
            self._lost_rows[slot] = lost
            self.buffers.truncated[slot] = True
        self._columns.append(columns)
        self.mark_ready([slot])

    def adopt(self, slot: int) -> None:
        """Start the next fragment from the first row of a new incarnation."""
        self._before_adopted.setdefault(slot, [values[0] for values in self.last_obs([slot])])
        self.buffers.side[slot] ^= 1
        self._find_side()
        self._keep_objects([slot])
        self.ended[slot], self._is_fresh[slot] = False, True

    def restore_last_obs(self, slots: list[int]) -> None:
        """Make the last delivered observations of these slots the last ones again: their fragment never arrived."""
        for slot in slots:
            for shared, values in zip(self.buffers.obs, self._before_adopted.pop(slot, ()), strict=False):
                shared[self.buffers.side[slot], slot] = values

    def keep_last_obs(self, slots: list[int], last: list[Any]) -> None:
        """Let `step` continue from the last observation of a fragment; `last`: [N, ...] per leaf."""
        rows, side = slice(slots[0], slots[-1] + 1), self.buffers.side
        for shared, collected in zip(self.buffers.obs, last, strict=True):
            shared[side[rows], np.arange(rows.start, rows.stop)] = collected[rows]
        for slot in slots:
            self._before_adopted.pop(slot, None)

    def last_obs(self, slots: list[int]) -> list[Any]:
        """Return the last observations of these slots, [N, ...] per leaf."""
        return [array[self.buffers.side[slots], slots] for array in self.buffers.obs]

    def collected(self, slots: list[int], stepped: Any, at_start: Any, over: Any) -> None:
        """Record that a fragment of these slots arrived.

        Args:
            stepped: [N], its first row.
            at_start: [K] whether its last observation is the first of an episode; None: of none.
            over: [K] whether that one ended an episode, which was not reset yet; None: of none.
        """
        self.deliveries += 1
        self.started[slots] = True
        self.ended[slots] = False if over is None else over
        self._had_ended[slots] = False
        self._is_fresh[slots] = False if at_start is None else at_start
        self.proven[slots] |= stepped[slots]

    def forget(self) -> dict[int, Loss]:
        """Drop every undelivered row. Return the losses that these rows would have reported."""
        self.awaited[:] = False
        self.ready[:] = False
        self.is_loss[:] = False
        not_reported = self._lost_rows
        self._columns, self._lost_rows, self.resetting = [], {}, {}
        return not_reported

    # -- delivering -------------------------------------------------------------------------------------------

    def all_rows(self, copy: bool) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Deliver a whole step in which nothing unusual happened, for the hot loop."""
        self.deliveries += 1
        self.transitions += self.num_envs
        buffers = self.buffers
        if self._side is None:
            buffers.side ^= 1
            self._find_side()
        else:
            self._side = 1 - self._side
            buffers.side.fill(self._side)
        if self._next_objects:
            self._keep_objects(list(self._next_objects))
        if self._only is None or self._side is None:
            obs = self._gather(self._everyone, True, copy)
        else:
            obs = self._only[self._side].copy() if copy else self._only[self._side]
        terminations, truncations = buffers.terminated.copy(), buffers.truncated.copy()
        self._had_ended[:] = self.ended
        self._is_fresh[:] = False
        np.logical_or(terminations, truncations, out=self.ended)
        infos = {}
        if self._columns:
            infos = info_columns.batch(self._columns, self.num_envs)
            self._columns = []
        if not self._all_proven:
            self.proven[:] = True
            self._all_proven = True
        return obs, buffers.reward.copy(), terminations, truncations, infos

    def rows(self, copy: bool) -> Rows:
        """Deliver every row that is ready, ascending by slot."""
        self.deliveries += 1
        ready, buffers = self.ready, self.buffers
        everyone = self.ready_count == self.num_envs
        slots = self._everyone if everyone else np.flatnonzero(ready)
        self.transitions += len(slots)
        rows: Any = slice(None) if everyone else slots
        lost = {}
        if self._lost_rows or self._columns:
            row_of = {int(slot): i for i, slot in enumerate(slots)}
            lost = {row_of[slot]: loss for slot, loss in self._lost_rows.items()}
            if everyone:
                infos = info_columns.batch(self._columns, self.num_envs)
            else:
                parts = [info_columns.select(columns, row_of) for columns in self._columns]
                infos = info_columns.batch(parts, len(slots))
        else:
            infos = {}
        rewards, terminations = buffers.reward[rows].copy(), buffers.terminated[rows].copy()
        truncations = buffers.truncated[rows].copy()
        is_loss = self.is_loss[rows]
        rewards[is_loss], terminations[is_loss], truncations[is_loss] = 0.0, False, True
        written = slots[~is_loss]
        if len(written) == self.num_envs and self._side is not None:
            self._side = 1 - self._side
            buffers.side[:] = self._side
        else:
            buffers.side[written] ^= 1
            self._find_side()
        if self._next_objects:
            self._keep_objects(written.tolist())
        obs = self._gather(slots, everyone, copy)
        was_reset = [slot for slot in slots.tolist() if slot in self.resetting] if self.resetting else []
        self.started[rows] = True
        if not self._all_proven and not was_reset and not self._lost_rows:
            self.proven[rows] = True
            self._all_proven = bool(self.proven.all())
        self._had_ended[rows] = self.ended[rows]
        self._is_fresh[rows] = False
        self._is_fresh[was_reset] = True
        self.ended[rows] = terminations | truncations
        self.awaited[rows] = False
        self.ready[rows] = False
        self.is_loss[rows] = False
        self.sent = bool(self.awaited.any())
        for slot in was_reset:
            del self.resetting[slot]
        self._columns, self._lost_rows = [], {}
        return Rows(slots, obs, rewards, terminations, truncations, infos, lost)

    def peek_obs(self, slots: Any) -> Any:
        """Return a copy of the observations last delivered for these slots."""
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
        return assemble(self._space, iter(values))

    def _keep_objects(self, slots: list[int]) -> None:
        for slot in slots:
            if slot in self._next_objects:
                self._objects[slot] = self._next_objects.pop(slot)

    def _find_side(self) -> None:
        side = self.buffers.side
        self._side = int(side[0]) if (side == side[0]).all() else None


def _first(space: Space[Any], batch: Any) -> Any:
    return assemble(space, iter([values[0] for values in flatten(space, batch)]))
