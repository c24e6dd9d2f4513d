"""Count how often each entry of the engine's transition tables was taken, without changing the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clusterenv.engine import slots
from clusterenv.engine.collecting import fragments
from clusterenv.vector import guard, phases

__all__ = ["Coverage", "counted"]


CALLS = ("reset", "send", *phases.AWAITED, *phases._OF_ALL)


class Coverage:
    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {"after_loss": Counter(), "slot": Counter(), "call": Counter()}
        self.counts["fragment"] = Counter()

    def merge(self, other: dict[str, Counter[str]]) -> None:
        for table, counts in other.items():
            self.counts.setdefault(table, Counter()).update(counts)

    def lines(self) -> list[str]:
        """Return for each table the entries taken, the rarest of them, and the entries never taken."""
        known = {
            "slot": {_move(a, b) for a, after in slots._MOVES.items() for b in after},
            "call": {f"{call} in {phase.name}" for phase in phases.Phase for call in CALLS},
        }
        found = []
        for table, counts in sorted(self.counts.items()):
            rarest = sorted(counts.items(), key=lambda entry: entry[1])[:5]
            found.append(f"{table}: {len(counts)} entries taken, {sum(c >= 100 for c in counts.values())} 100 times")
            found.append("  rarest: " + "; ".join(f"{name} {count}" for name, count in rarest))
            missing = sorted(known.get(table, set()) - set(counts))
            if missing:
                found.append("  never: " + "; ".join(missing))
        return found


def _move(before: Any, after: Any) -> str:
    return f"{before.value} -> {after.value}"


@contextmanager
def counted(coverage: Coverage) -> Iterator[None]:
    """Count within the block."""
    after_loss, move, check = slots.after_loss, slots.Slot.move, guard.CallGuard.check
    arrive = fragments.Fragments._arrive
    losses, moves, calls = (coverage.counts[name] for name in ("after_loss", "slot", "call"))

    def count_loss(mode: Any, row: Any, episode: Any, was_held: bool) -> Any:
        losses[f"{mode.name} {row.name} {episode.name}{' HELD' * was_held}"] += 1
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
