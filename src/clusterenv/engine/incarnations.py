"""What each slot's environments have in common over its incarnations: seeds, and attributes to set again. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

from clusterenv.wire.requests import Sticky

__all__ = ["Incarnations"]


class Incarnations:
    def __init__(self, num_envs: int) -> None:
        self._bases: list[int] = [secrets.randbits(128)] * num_envs
        self.numbers = [0] * num_envs
        self.stickies: list[list[Sticky]] = [[] for _ in range(num_envs)]
        self.stickies_epoch = 0
        """Changes with `stickies`."""

    def set_bases(self, bases: Iterable[int | None]) -> None:
        """What later incarnations derive their seeds from; None keeps what was there."""
        self._bases = [old if new is None else new for old, new in zip(self._bases, bases, strict=True)]

    def seed(self, slot: int) -> int:
        """Of the slot's present incarnation."""
        sequence = np.random.SeedSequence((abs(self._bases[slot]), slot, self.numbers[slot]))
        return int(sequence.generate_state(1, np.uint32)[0] >> 1)

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
        self.numbers = list(state["incarnations"])
        self.stickies_epoch += 1
        self.stickies = [[Sticky(*sticky) for sticky in stickies] for stickies in state["stickies"]]
