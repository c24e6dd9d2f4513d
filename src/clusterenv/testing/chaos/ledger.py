"""`Ledger`: checks that each transition of `Numbered` environments arrived exactly once or was declared lost.

It takes every row that the learner gets, and every event, and raises at the first row that is not the expected next
one. At the end it compares with the counts that the environments kept themselves.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clusterenv.events import Event
from clusterenv.rollout import Rollout
from clusterenv.testing.chaos.numbered import Seen, lives, read_record

__all__ = ["Balance", "Ledger", "LedgerError"]

LOSSES = ("env_error", "env_lost", "worker_lost", "worker_moved")
"""Events that declare a slot's undelivered transitions as lost."""


class LedgerError(AssertionError):
    """A transition came twice, out of order or altered, or is missing without having been declared lost."""


class Balance(NamedTuple):
    """Transitions, of all slots together: `produced` = `delivered` + `dropped` + `lost`."""

    produced: int
    delivered: int
    dropped: int
    """Dropped when a stream was left, and counted by the collector."""
    lost: int
    """Lost with lives that ended in a declared loss."""
    lives: int
    """Environments that were created."""


@dataclass(slots=True)
class _Slot:
    """What the learner has received from one slot."""

    seen: Seen | None = None
    """The last observation."""
    has_ended: bool = False
    """The last row ended the episode, so a reset must follow."""
    is_cut: bool = False
    """The system, not the environment, ended the episode, so another life must follow."""
    is_reported: bool = False
    """The last row said that the environment was lost."""
    may_change: bool = True
    """A new life needs no row that reports the loss, because a reset or a new fragment comes first."""
    incarnation: tuple[int, int] | None = None
    """The last incarnation that a batch named, and its life."""
    gap: int = 0
    """Number of transitions that may be missing before the next one, without a new life."""
    changes: int = field(default=0, init=False)
    delivered: Counter[int] = field(default_factory=Counter, init=False)
    """By life."""
    dropped: Counter[int] = field(default_factory=Counter, init=False)


class Ledger:
    """Checks the rows of `Numbered` environments, autoreset mode NEXT_STEP.

    Args:
        folder: the folder of the environments.
        num_envs: the number of environments.
        expected_action: returns the action that a policy version takes; None: actions are not checked.

    Example:
        >>> import tempfile, clusterenv as ce
        >>> from clusterenv.testing import chaos
        >>> folder = tempfile.TemporaryDirectory()
        >>> ledger = chaos.Ledger(folder.name, num_envs=2)
        >>> with ce.ClusterEnv(chaos.numbered(folder.name, 2), backend=ce.Local(workers=2)) as envs:
        ...     ledger.reset(envs.reset(seed=1)[0])
        ...     for t in range(50):
        ...         if t == 20:
        ...             chaos.ask(folder.name, 1, chaos.Trouble.RAISE)
        ...         actions = envs.action_space.sample()
        ...         ledger.step(actions, envs.step(actions), envs.events())
        >>> balance = ledger.check()
        >>> balance.produced - balance.delivered, balance.lost, balance.lives
        (1, 1, 3)
        >>> folder.cleanup()
    """

    def __init__(
        self, folder: str | os.PathLike[str], num_envs: int, expected_action: Callable[[int], int] | None = None
    ) -> None:
        self._folder = Path(folder)
        self._expected_action = expected_action
        self._slots = [_Slot() for _ in range(num_envs)]
        self._declared: Counter[int] = Counter()
        self._last_event: Event | None = None
        self._allowed = 0
        """Rows that the collector has counted as dropped."""

    # -- what the learner receives ----------------------------------------------------------------------------

    def reset(self, obs: Any) -> None:
        """Take in the observations of `envs.reset()`."""
        for slot, row in enumerate(obs):
            of, seen = self._slots[slot], Seen.read(row)
            of.may_change = True
            self._first(slot, seen)
            of.may_change = False

    def step(self, actions: Any, result: Any, events: Sequence[Event]) -> None:
        """Take in the result of `envs.step(actions)`, or of `envs.recv()`, and `envs.events()`.

        `actions`: row i belongs to row i of the result.
        """
        self.note(events)
        obs, rewards, terminations, truncations, infos = result
        valid = infos.get("transition_valid")
        columns = (obs, actions, rewards, terminations, truncations)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        slots = infos["slot"].tolist() if "slot" in infos else range(len(self._slots))
        for i, (slot, (row, action, reward, is_terminated, is_truncated)) in enumerate(zip(slots, rows, strict=True)):
            of = self._slots[slot]
            if valid is not None and not valid[i]:
                if is_terminated or not is_truncated or reward:
                    self._fail(slot, "a row that reports a loss is truncated, not terminated, and without reward")
                of.has_ended = of.is_reported = True
                continue
            seen, last = Seen.read(row), of.seen
            if of.gap and last is not None and seen.t and (seen.life, seen.number) != (last.life, last.number + 1):
                last = seen._replace(t=seen.t - 1, number=seen.number - 1)  # continues after the dropped rows
                self._first(slot, last)
            elif of.has_ended or last is None or seen.life != last.life:
                last = None
                self._first(slot, seen)
            if last is not None:
                self._transition(slot, last, action, reward, seen)
                self._end(slot, seen, is_terminated, is_truncated)
            elif reward or is_terminated or is_truncated:
                self._fail(slot, f"a reset has a reward or an end: {seen}")
            of.may_change = False

    def batch(self, batch: Rollout, events: Sequence[Event]) -> None:
        """Take in the batch of a rollout or stream, and `envs.events()`."""
        self.note(events)
        following = batch.next_obs()
        for column, slot in enumerate(batch.slots.tolist()):
            of = self._slots[slot]
            of.may_change = True
            rows = (batch.obs, following, batch.actions, batch.rewards, batch.terminations, batch.truncations)
            flags = (batch.valid, batch.episode_starts, batch.versions)
            for t, row in enumerate(zip(*(values[:, column].tolist() for values in rows + flags), strict=True)):
                obs, after, action, reward, is_terminated, is_truncated, is_valid, is_start, version = row
                if not is_valid:
                    of.has_ended = of.is_reported = True
                    continue
                before = Seen.read(obs)
                if t == 0:
                    self._incarnation(slot, int(batch.incarnations[column]), before.life)
                if before != of.seen or of.has_ended:
                    self._first(slot, before)
                if is_start != (before.t == 0):
                    self._fail(slot, f"episode_starts is {is_start} at {before}")
                if self._expected_action is not None and action != self._expected_action(version):
                    self._fail(slot, f"action {action} is not that of version {version}, at {before}")
                self._transition(slot, before, action, reward, Seen.read(after))
                self._end(slot, Seen.read(after), is_terminated, is_truncated)
            if of.has_ended and not of.is_cut and not of.is_reported:  # the same step began the next episode
                self._first(slot, Seen.read(batch.last_obs[column]))

    def left_stream(self, num_steps: int, queue: int, dropped_rows: int) -> None:
        """Note that a stream was left, and that its collector counted `dropped_rows` during it."""
        self._allowed += dropped_rows
        for of in self._slots:
            of.gap, of.may_change = min(dropped_rows, (queue + 1) * num_steps), True

    def note(self, events: Iterable[Event]) -> None:
        """Count the losses that these events declare; events that were already counted are skipped."""
        new: list[Event] = []
        for event in reversed(tuple(events)):
            if event is self._last_event:
                break
            new.append(event)
        if new:
            self._last_event = new[0]
        for event in new:
            if event.kind in LOSSES:
                self._declared.update(event.slots)

    # -- one row ----------------------------------------------------------------------------------------------

    def _first(self, slot: int, seen: Seen) -> None:
        """Check an observation that does not follow from the last one by a step."""
        of, last = self._slots[slot], self._slots[slot].seen
        if seen.slot != slot:
            self._fail(slot, f"a row of another slot: {seen}")
        if last is not None and seen.life == last.life:
            self._skip(slot, last, seen)
        elif last is not None:
            if seen.life < last.life:
                self._fail(slot, f"a row of an earlier life: {seen}")
            if not (of.has_ended or of.may_change):
                self._fail(slot, f"another life without a row that reports the loss: {seen}")
            of.changes += 1
            if self._declared[slot] < of.changes:
                self._fail(slot, f"{of.changes} lives ended, {self._declared[slot]} losses were declared: {seen}")
        elif seen.number:
            self._fail(slot, f"the first row is not a life's first: {seen}")
        if last is None or seen.life != last.life:
            if seen.number > of.gap or (seen.t and not seen.number):
                self._fail(slot, f"a life does not begin with its first observation: {seen}")
            of.dropped[seen.life] += seen.number
        of.seen, of.has_ended, of.is_cut, of.is_reported, of.gap = seen, False, False, False, 0

    def _skip(self, slot: int, last: Seen, seen: Seen) -> None:
        of = self._slots[slot]
        missing = seen.number - last.number
        if of.is_cut or (of.is_reported and not missing):
            self._fail(slot, f"a life goes on that was declared lost: {seen}")
        if not 0 <= missing <= of.gap:
            self._fail(slot, f"{missing} transitions are missing, {of.gap} may be: {seen}")
        if not missing and (seen.t or seen.episode != last.episode + 1 or not (of.has_ended or of.may_change)):
            self._fail(slot, f"neither the next step nor a reset: {seen}")
        of.dropped[seen.life] += missing

    def _transition(self, slot: int, before: Seen, action: int, reward: float, after: Seen) -> None:
        expected = Seen(slot, before.life, before.episode, before.t + 1, before.number + 1, action)
        if after != expected or reward != expected.number:
            self._fail(slot, f"{before}, action {action} led to {after} with reward {reward}")
        self._slots[slot].delivered[after.life] += 1

    def _end(self, slot: int, seen: Seen, is_terminated: bool, is_truncated: bool) -> None:
        of = self._slots[slot]
        of.seen, of.has_ended = seen, is_terminated or is_truncated
        of.is_cut = is_truncated and not (seen.is_terminated or seen.is_truncated)
        if is_terminated != seen.is_terminated or (is_truncated != seen.is_truncated and not of.is_cut):
            self._fail(slot, f"terminated {is_terminated}, truncated {is_truncated} at {seen}")

    def _incarnation(self, slot: int, number: int, life: int) -> None:
        of = self._slots[slot]
        if of.incarnation is not None:
            last_number, last_life = of.incarnation
            if number < last_number or (number == last_number) != (life == last_life):
                self._fail(slot, f"life {life} as incarnation {number}, and life {last_life} as {last_number}")
        of.incarnation = number, life

    def _fail(self, slot: int, text: str) -> None:
        of = self._slots[slot]
        raise LedgerError(f"slot {slot}: {text}; before: {of.seen}, ended {of.has_ended}, cut {of.is_cut}")

    # -- the end ----------------------------------------------------------------------------------------------

    def check(self) -> Balance:
        """Compare with the environments' own counts. Call this after the last row of a `step` was taken in."""
        total = Balance(0, 0, 0, 0, 0)
        for slot, of in enumerate(self._slots):
            for life in lives(self._folder, slot):
                produced = read_record(self._folder, slot, life).produced
                delivered, dropped = of.delivered[life], of.dropped[life]
                lost = produced - delivered - dropped
                if lost < 0:
                    self._fail(slot, f"life {life} made {produced}; {delivered} came, {dropped} were dropped")
                if lost and of.seen is not None and life == of.seen.life and not of.is_reported:
                    self._fail(slot, f"{lost} transitions of the running life are missing")
                total = Balance(*map(sum, zip(total, (produced, delivered, dropped, lost, 1), strict=True)))
        if total.dropped > self._allowed:
            raise LedgerError(f"{total.dropped} transitions were dropped, {self._allowed} were counted as dropped")
        return total
