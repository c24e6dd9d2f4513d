"""Incarnations of each slot: their numbers, their seeds, and the attributes to set again on each. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

from clusterenv.engine.instructions import Reserve
from clusterenv.wire.requests import Sticky

__all__ = ["Incarnations"]


_BLOCK = 64
"""Number of incarnations to reserve at once."""


class Incarnations:
    """Count the incarnations of each slot, and keep what they have in common.

    Args:
        first: number of each slot's first incarnation; earlier heads of the run may have used lower ones.
        reserved: no later head uses incarnations up to this one (`Reserve`); None: there is no later head.
    """

    def __init__(self, num_envs: int, first: int = 0, reserved: int | None = None) -> None:
        self._bases: list[int] = [secrets.randbits(128)] * num_envs
        self.numbers = [first] * num_envs
        self._reserved = reserved
        self.stickies: list[list[Sticky]] = [[] for _ in range(num_envs)]
        self.stickies_epoch = 0
        """Changes with `stickies`."""

    def set_bases(self, bases: Iterable[int | None]) -> None:
        """Set what later incarnations derive their seeds from; None keeps a slot's present base."""
        self._bases = [old if new is None else new for old, new in zip(self._bases, bases, strict=True)]

    def seed(self, slot: int) -> int:
        """Return the seed of the slot's present incarnation."""
        sequence = np.random.SeedSequence((abs(self._bases[slot]), slot, self.numbers[slot]))
        return int(sequence.generate_state(1, np.uint32)[0] >> 1)

    def begin_next(self, slots: Iterable[int]) -> Reserve | None:
        """Begin the next incarnation of these slots. The returned instruction must be carried out before its use."""
        for slot in slots:
            self.numbers[slot] += 1
        if self._reserved is None or max(self.numbers) <= self._reserved:
            return None
        self._reserved = max(self.numbers) + _BLOCK
        return Reserve(self._reserved)

    def remember_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Iterable[int]) -> None:
        self.stickies_epoch += 1
        for slot in slots:
            self.stickies[slot].append(Sticky(name, args, kwargs, True))

    def remember_attribute(self, name: str, values: dict[int, Any]) -> None:
        self.stickies_epoch += 1
        for slot, value in values.items():
            kept = [sticky for sticky in self.stickies[slot] if sticky.is_call or sticky.name != name]
            self.stickies[slot] = [*kept, Sticky(name, (value,), {}, False)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed_base": list(self._bases),
            "incarnations": list(self.numbers),
            "stickies": [[tuple(sticky) for sticky in stickies] for stickies in self.stickies],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bases = list(state["seed_base"])
        saved = state["incarnations"]
        # Where incarnations are reserved, none is used twice: this head, or an earlier one, may have advanced further.
        self.numbers = saved[:] if self._reserved is None else list(map(max, saved, self.numbers))
        self.stickies_epoch += 1
        self.stickies = [[Sticky(*sticky) for sticky in stickies] for stickies in state["stickies"]]
