"""Count how often each entry of the engine's transition tables was taken, without changing the engine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.engine import slots
from clusterenv.engine.collecting import fragments
from clusterenv.vector import guard, phases

__all__ = ["Coverage", "counted"]


LEAST = 100
"""How often a complete search takes every entry that can be reached."""

CALLS = ("reset", "send", *phases.AWAITED, *phases._OF_ALL)


def _losses() -> dict[str, str]:
    """Return each entry of `after_loss`, with the reason if it cannot be reached."""
    entries = {}
    for mode, row, episode, is_held in itertools.product(AutoresetMode, slots.Row, slots.Episode, (False, True)):
        entries[_loss(mode, row, episode, is_held)] = _why_never(mode, row, episode, is_held)
    return entries


def _why_never(mode: AutoresetMode, row: slots.Row, episode: slots.Episode, is_held: bool) -> str:
    if row is slots.Row.READY_LOSS and mode is AutoresetMode.SAME_STEP:
        return "the first row of the next incarnation reports the loss, and is READY_ENDING"
    if is_held and row not in (slots.Row.IDLE, slots.Row.READY_LOSS):
        return "a slot that is held becomes live when its row is asked for; only a row that reports a loss leaves it"
    if (row, episode) in (
        (slots.Row.READY, slots.Episode.ENDED),
        (slots.Row.READY_ENDING, slots.Episode.RUNNING),
    ):
        return "the row that has arrived is the newest one, which determines the state of the episode"
    if (row, episode) == (slots.Row.READY_LOSS, slots.Episode.ENDED):
        return "a loss is recorded within an episode only, and the row that reports it ends the episode"
    if (row, episode) == (slots.Row.READY_ENDING, slots.Episode.NONE) and mode is not AutoresetMode.SAME_STEP:
        return "the first row of a slot ends no episode; reached only with MASKED_RESET_IN_FLIGHT, which drops that row"
    if (mode, row, episode) == (AutoresetMode.DISABLED, slots.Row.AWAITED, slots.Episode.ENDED):
        return "a step past the end of an episode is refused (CallGuard.check_not_ended)"
    return ""


def known() -> dict[str, dict[str, str]]:
    """Return the entries of each table, each with the reason if it cannot be reached."""
    return {
        "after_loss": _losses(),
        "slot": {_move(a, b): "" for a, after in slots._MOVES.items() for b in after},
        "call": {f"{call} in {phase.name}": "" for phase in phases.Phase for call in CALLS},
        "fragment": {f"arrived in {name}": "" for name in ("ROLLOUT", "ROLLOUT lost", "STREAM")},
    }


class Coverage:
    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {table: Counter() for table in known()}

    def merge(self, other: dict[str, Counter[str]]) -> None:
        for table, counts in other.items():
            self.counts[table].update(counts)

    def rare(self) -> list[str]:
        """Return the entries that were taken too rarely, and those that were taken though they cannot be reached."""
        found = []
        for table, entries in known().items():
            for name, why_never in entries.items():
                count = self.counts[table][name]
                if why_never and count:
                    found.append(f"{table}: {name} was taken {count} times, though {why_never}")
                elif not why_never and count < LEAST:
                    found.append(f"{table}: {name} was taken {count} times")
        return found

    def lines(self) -> list[str]:
        """Return for each table how many entries were taken, and the rarest of those that can be reached."""
        found = []
        for table, entries in known().items():
            counts = self.counts[table]
            possible = sorted((counts[name], name) for name, why_never in entries.items() if not why_never)
            often = sum(count >= LEAST for count, _ in possible)
            found.append(f"{table}: {often} of {len(possible)} entries taken {LEAST} times or more")
            found.append("  rarest: " + "; ".join(f"{name} {count}" for count, name in possible[:5]))
        return found


def _loss(mode: AutoresetMode, row: slots.Row, episode: slots.Episode, is_held: bool) -> str:
    return f"{mode.name} {row.name} {episode.name}{' HELD' * is_held}"


def _move(before: Any, after: Any) -> str:
    return f"{before.value} -> {after.value}"


@contextmanager
def counted(coverage: Coverage) -> Iterator[None]:
    """Count within the block."""
    after_loss, move, check = slots.after_loss, slots.Slot.move, guard.CallGuard.check
    arrive = fragments.Fragments._arrive
    losses, moves, calls = (coverage.counts[name] for name in ("after_loss", "slot", "call"))

    def count_loss(mode: Any, row: Any, episode: Any, was_held: bool) -> Any:
        losses[_loss(mode, row, episode, was_held)] += 1
        return after_loss(mode, row, episode, was_held)

    def count_move(self: Any, env: Any, why: str) -> None:
        moves[_move(self.env, env)] += 1
        move(self, env, why)

    def count_call(self: Any, call: str) -> None:
        calls[f"{call} in {self.phase.name}"] += 1
        check(self, call)

    def count_fragment(self: Any, fragment: Any, result: Any) -> None:
        coverage.counts["fragment"][f"arrived in {self.mode.name}{' lost' * (result is None)}"] += 1
        arrive(self, fragment, result)

    slots.after_loss, slots.Slot.move = count_loss, count_move  # type: ignore[method-assign]
    guard.CallGuard.check = count_call  # type: ignore[method-assign]
    fragments.Fragments._arrive = count_fragment  # type: ignore[method-assign]
    try:
        yield
    finally:
        slots.after_loss, slots.Slot.move = after_loss, move  # type: ignore[method-assign]
        guard.CallGuard.check = check  # type: ignore[method-assign]
        fragments.Fragments._arrive = arrive  # type: ignore[method-assign]
