"""Environments that record their seeds outside of the code under test, for runs whose script is killed.

`tools.seed_ledger:LedgerCartPole-v1` is Gymnasium's CartPole; CLUSTERENV_SEED_LEDGER names the file.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym

__all__ = ["WritesSeeds", "read", "repeated"]

VARIABLE = "CLUSTERENV_SEED_LEDGER"


class WritesSeeds(gym.Wrapper[Any, Any, Any, Any]):
    """Writes the seed of every reset to a file, before the reset."""

    def __init__(self, env: gym.Env[Any, Any], ledger: str) -> None:
        super().__init__(env)
        self._ledger = ledger

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            with Path(self._ledger).open("ab", buffering=0) as file:  # one atomic append, as other processes write too
                file.write(b"%d\n" % seed)
        return super().reset(seed=seed, options=options)


def read(ledger: Path) -> list[int]:
    """Return the seeds in the order in which they were used."""
    return [int(line) for line in ledger.read_bytes().split(b"\n")[:-1]] if ledger.exists() else []


def repeated(seeds: list[int]) -> list[int]:
    """Return the seeds that were used more than once."""
    return [seed for seed, times in Counter(seeds).items() if times > 1]


def _make(**kwargs: Any) -> gym.Env[Any, Any]:
    return WritesSeeds(gym.make("CartPole-v1", **kwargs), os.environ[VARIABLE])


gym.register("LedgerCartPole-v1", entry_point=_make)
