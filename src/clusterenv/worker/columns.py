"""A worker's own columns of the arena, into which one fragment is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.memory.fragments import Side
from clusterenv.memory.rows import Leaf, assemble, blocks_of, coerce, flatten

__all__ = ["Columns"]


class Columns:
    """This worker's columns of one side of the arena."""

    def __init__(self, side: Side, rows: slice, num_steps: int, space: Any, leaves: tuple[Leaf, ...]) -> None:
        steps = slice(0, num_steps)
        self.actions, self.rewards = side.actions[steps, rows], side.rewards[steps, rows]
        self.logprobs, self.starts = side.logprobs[steps, rows], side.starts[steps, rows]
        self.terminations, self.truncations = side.terminations[steps, rows], side.truncations[steps, rows]
        self.valid, self.masks = side.valid[steps, rows], side.masks[steps, rows]
        self.obs = [leaf[: num_steps + 1, rows] for leaf in side.obs]
        self._space = space
        self._leaves = leaves
        self._nested = len(leaves) != 1 or bool(leaves[0].path)
        self.blocks = blocks_of(leaves, self.obs[0])  # [T + 1, ...], for `write_block`
        self.shapes = [leaves[0].shape] * self.obs[0].shape[1]

    def clear(self) -> None:
        for array in (self.terminations, self.truncations, self.starts):
            array.fill(False)
        self.valid.fill(True)

    def obs_at(self, t: int) -> Any:
        """[K, ...] in the structure of the space; views."""
        if not self._nested:
            return self.obs[0][t]
        return assemble(self._space, iter([leaf[t] for leaf in self.obs]))

    def row(self, t: int, k: int) -> Any:
        return assemble(self._space, iter([leaf[t, k].copy() for leaf in self.obs]))

    def check_shape(self, obs: Any) -> None:
        """An episode's last observation is kept beside the rows; what does not fit the space is a fault here too."""
        if self.blocks is None or obs.__class__ is not np.ndarray or obs.shape != self.shapes[0]:
            for leaf, value in zip(self._leaves, flatten(self._space, obs), strict=True):
                coerce(value, leaf, "observation")

    def write_row(self, t: int, k: int, obs: Any) -> None:
        for out, leaf, value in zip(self.obs, self._leaves, flatten(self._space, obs), strict=True):
            out[t, k] = coerce(value, leaf, "observation")

    def check_row(self, t: int, k: int) -> None:
        """Raise ValueError for an observation that is not finite or outside a Discrete space."""
        for leaf, values in zip(self._leaves, self.obs, strict=True):
            value = values[t, k]
            if value.dtype.kind in "fc" and not np.isfinite(value).all():
                raise ValueError(f"observation{leaf.name} is not finite: {value!r}")
            if leaf.low is not None and not leaf.low <= value < leaf.high:
                raise ValueError(f"observation{leaf.name} is {value}, its space says {leaf.low}..{leaf.high}")

    def lose(self, t: int, k: int) -> None:
        if t < len(self.valid):
            self.valid[t:, k] = False
            self.rewards[t:, k] = 0.0
            self.terminations[t:, k] = False
            self.truncations[t:, k] = False
            self.truncations[t, k] = True

    def lose_all(self, t: int) -> None:
        for k in range(self.valid.shape[1]):
            self.lose(t, k)

    def frozen(self, t: int, k: int) -> Callable[[Any], Any]:
        """A stand-in for the step of an environment that is gone: its last observation, again and again."""
        obs = self.row(t, k)
        return lambda action: (obs, 0.0, False, False, {})

    def find_bad(self, done: int) -> dict[int, tuple[int, str, bool]]:
        """Column → (first step whose outcome is not usable, why, whether it is the observation after that step)."""
        bad: dict[int, tuple[int, str, bool]] = {}

        def note(wrong: Any, what: str, is_after: bool = True) -> None:  # wrong: [done, K]
            for t, k in np.argwhere(wrong & self.valid[:done]):
                if int(k) not in bad or bad[int(k)][0] > int(t):
                    bad[int(k)] = (int(t), what, is_after)

        for leaf, values in zip(self._leaves, self.obs, strict=True):
            after = values[1 : done + 1]
            if after.dtype.kind in "fc":
                finite = np.isfinite(after)
                if not finite.all():
                    note(~finite.reshape(*after.shape[:2], -1).all(axis=2), f"observation{leaf.name} is not finite")
            elif leaf.low is not None:
                outside = (after < leaf.low) | (after >= leaf.high)
                if outside.any():
                    note(outside, f"observation{leaf.name} is outside {leaf.low}..{leaf.high}")
        finite = np.isfinite(self.rewards[:done])
        if not finite.all():
            note(~finite, "reward is not finite", False)
        return bad
