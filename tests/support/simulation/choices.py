"""Draw a schedule's decisions from a seed, or replay recorded draws; shrink a failing list of draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

__all__ = ["Choices", "shrink", "trimmed"]


class Choices:
    """Makes every decision of a schedule. 0 is always the usual case: recorded draws continue with zeros at the end."""

    def __init__(self, seed: int = 0, recorded: Sequence[int] | None = None) -> None:
        self._random = Random(seed)
        self._recorded = recorded
        self.taken: list[int] = []

    def draw(self, count: int) -> int:
        """Return a number below `count`, each equally likely."""
        if self._recorded is None:
            value = int(self._random.random() * count)
        else:
            value = self._next() % count
        self.taken.append(value)
        return value

    def chance(self, rate: float) -> bool:
        """Return True at this rate. Nothing is drawn if the rate is 0."""
        if rate <= 0.0:
            return False
        value = int(self._random.random() < rate) if self._recorded is None else self._next() & 1
        self.taken.append(value)
        return bool(value)

    def _next(self) -> int:
        at = len(self.taken)
        assert self._recorded is not None
        return self._recorded[at] if at < len(self._recorded) else 0


def shrink(choices: Sequence[int], fails: Callable[[list[int]], bool], attempts: int = 1500) -> list[int]:
    """Return a shorter list of draws that still fails, by dropping or zeroing runs of draws, then single draws."""
    best = trimmed(choices)
    left = attempts
    size = max(1, len(best) // 2)
    while left > 0:
        is_shorter = False
        at = 0
        while at < len(best) and left > 0:
            for candidate in _without(best, at, size):
                left -= 1
                if fails(candidate):
                    best, is_shorter = trimmed(candidate), True
                    break
            else:
                at += size
        if not is_shorter and size == 1:
            break
        size = max(1, size // 2) if not is_shorter else min(size, max(1, len(best) // 2))
    return best


def _without(choices: list[int], at: int, size: int) -> list[list[int]]:
    before, run, after = choices[:at], choices[at : at + size], choices[at + size :]
    candidates = [before + after]
    if any(run):
        candidates.append([*before, *[0] * len(run), *after])
        if size == 1 and run[0] > 1:
            candidates.append([*before, 1, *after])
    return candidates


def trimmed(choices: Sequence[int]) -> list[int]:
    """Return the list without trailing zeros."""
    end = len(choices)
    while end and not choices[end - 1]:
        end -= 1
    return list(choices[:end])
