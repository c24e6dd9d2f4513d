"""What one fragment leaves behind: its columns of the arena, what it gathers beside them, its drift sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.memory.fragments import Side
from clusterenv.memory.rows import Leaf, assemble, coerce, flatten
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.wire.requests import DriftSamples, Fault, Finals, RunFragment

__all__ = ["Columns", "Gathered", "Picked", "pack_finals"]


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
        self._only = None if self._nested or not self.obs[0].shape[2:] else self.obs[0]
        if self._only is not None:
            shape = self._only.shape
            self._shapes = [shape[2:]] * shape[1]

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

    def write(self, t: int, block: list[Any]) -> bool:
        """All rows at once, where the space is one array and every observation is what it says."""
        only = self._only
        if only is None:
            return False
        try:
            if [obs.shape for obs in block] != self._shapes or block[0].dtype != only.dtype:
                return False
            row = only[t]
            np.concatenate(block, out=row.reshape(-1, *row.shape[2:]))
        except (AttributeError, TypeError, ValueError):
            return False
        return True

    def check_shape(self, obs: Any) -> None:
        """An episode's last observation is kept beside the rows; what does not fit the space is a fault here too."""
        if self._only is None or obs.__class__ is not np.ndarray or obs.shape != self._only.shape[2:]:
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


class Gathered:
    """What one fragment gathers beside its arrays."""

    def __init__(self, columns: Columns, lengths: Any) -> None:
        self.columns = columns
        self.lengths = lengths
        self.first_lengths = lengths
        """Steps of the running episodes before row 0."""
        self.finals: list[tuple[int, int, Any]] = []
        self.episodes: list[tuple[int, int, float, int, dict[str, Any]]] = []
        self.infos: dict[str, list[tuple[int, int, Any]]] = {}
        self.faults: list[Fault] = []
        self.failed: set[int] = set()

    def note_infos(self, t: int, k: int, info: dict[str, Any], keys: tuple[str, ...]) -> None:
        for key in keys:
            if key in info:
                self.infos.setdefault(key, []).append((t, k, info[key]))

    def call(self, t: int, k: int, is_after: bool) -> int:
        """Number of the `step` call of row t in its episode; 0 where the observation after it is a reset's."""
        columns = self.columns
        if is_after and (columns.terminations[t, k] or columns.truncations[t, k]):
            return 0
        starts = np.flatnonzero(columns.starts[: t + 1, k])
        return t + 1 - int(starts[-1]) if len(starts) else t + 1 + int(self.first_lengths[k])

    def drop_after(self, t: int, k: int) -> None:
        self.finals = [item for item in self.finals if item[1] != k or item[0] < t]
        self.episodes = [item for item in self.episodes if item[1] != k or item[0] < t]


class Picked:
    """The drift sample of one fragment: states chosen beforehand, by each slot's own stream."""

    def __init__(self, streams: Streams, slots: list[int], request: RunFragment) -> None:
        states: list[tuple[int, int]] = []
        if request.sample_every:
            within = min(request.num_steps, request.sample_within or request.num_steps)
            states = streams.pick(slots, request.incarnations, within, request.sample_every)
        self._types = [np.min_scalar_type(limit) for limit in (request.num_steps, len(slots))]  # small: they travel
        self._columns_at: dict[int, list[int]] = {}
        for t, k in states:
            self._columns_at.setdefault(t, []).append(k)
        self._order = iter(self._columns_at)
        self.next_t = next(self._order, -1)
        self._params: list[Any] = []

    def take(self, t: int, params: Any) -> None:
        self._params.append(params[self._columns_at[t]])
        self.next_t = next(self._order, -1)

    def samples(self) -> DriftSamples | None:
        if not self._params:
            return None
        taken = list(self._columns_at.items())[: len(self._params)]
        t = np.array([at for at, columns in taken for _ in columns], self._types[0])
        k = np.array([k for _, columns in taken for k in columns], self._types[1])
        return DriftSamples(t, k, np.concatenate(self._params))


def pack_finals(finals: list[tuple[int, int, Any]], space: Any, leaves: tuple[Leaf, ...]) -> Finals:
    """As one array per leaf: hundreds of small ones would take long to pickle."""
    if len({(t, k) for t, k, _ in finals}) < len(finals):  # an environment that failed after its episode had ended
        finals = list({(t, k): (t, k, obs) for t, k, obs in finals}.values())
    if len(leaves) == 1 and not leaves[0].path:
        columns = [[obs for _, _, obs in finals]]
    else:
        columns = [list(values) for values in zip(*(flatten(space, obs) for _, _, obs in finals), strict=True)]
    arrays = [
        np.array(values, dtype=leaf.dtype).reshape(-1, *leaf.shape)
        for leaf, values in zip(leaves, columns or [[] for _ in leaves], strict=True)
    ]
    t = np.array([t for t, _, _ in finals], dtype=np.int64)
    return Finals(t, np.array([k for _, k, _ in finals], dtype=np.int64), arrays)
