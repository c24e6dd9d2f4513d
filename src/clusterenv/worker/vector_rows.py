"""What a vector environment's fragment consists of: the results of its steps, and where they are written.

Used by `vector_fragment.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from clusterenv.rollout import map_arrays, to_numpy
from clusterenv.worker.fragment import Bad, RunningFragment
from clusterenv.worker.vector_env import VectorGroup, is_mask

__all__ = ["Places", "Stepped", "StepsRows", "error_of", "names", "only", "read_step", "row_at", "unplayed"]


@runtime_checkable
class StepsRows(Protocol):
    """A vector environment that can step some of its environments while others are still stepping."""

    def send_rows(self, actions: Any, rows: Any) -> None: ...

    def recv_rows(self) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        """Wait for some of those that were sent: their rows, and the results of `step` for these rows only."""


class Stepped(NamedTuple):
    """The results of a step; row i of each array belongs to column `rows[i]`."""

    rows: Any
    obs: list[Any]
    """One array per leaf."""
    rewards: Any
    terminations: Any
    truncations: Any
    infos: dict[str, Any]

    @property
    def ended(self) -> Any:
        return self.terminations | self.truncations


def read_step(
    group: VectorGroup, rows: Any, obs: Any, rewards: Any, ends: Any, cuts: Any, infos: dict[str, Any]
) -> Stepped:
    """Convert what the vector environment returned to arrays of the right shape; it may be tensors."""
    count = len(rows)
    values = [to_numpy(value) for value in (rewards, ends, cuts)]
    if any(value.shape != (count,) for value in values):
        shapes = [value.shape for value in values]
        raise ValueError(f"rewards, terminations and truncations have shapes {shapes}, expected ({count},)")
    flags = [value.astype(np.bool_, copy=False) for value in values[1:]]
    return Stepped(rows, group.read(obs, count), values[0], flags[0], flags[1], infos)


def error_of(bad: Bad, slots: list[int]) -> ValueError:
    """Return the first of these unusable values as an error."""
    k, (_, text, _) = min(bad.items(), key=lambda item: item[1][0])
    return ValueError(f"slot {slots[k]}: {text}")


class Places:
    """Where the next row of each column is, in arrays of which the first two axes are one: indexed faster than two."""

    def __init__(self, run: RunningFragment, every: Any, has_state: bool) -> None:
        side, columns, count = run.columns.side, run.columns, len(every)
        self.num_envs = side.rewards.shape[1]
        self.shared = run.played * self.num_envs + columns.first + every  # in the arrays of the side
        self.own = run.played * count + every  # in those of this worker
        self.last = len(columns.valid) * count - 1
        self.actions, self.rewards, self.masks = _flat(side.actions), _flat(side.rewards), _flat(side.masks)
        self.terminations, self.truncations = _flat(side.terminations), _flat(side.truncations)
        self.obs = [_flat(leaf) for leaf in side.obs]
        self.noise, self.params = _flat(run.noise), _flat(run.params)
        self.starts = None
        if has_state:
            t = np.minimum(run.played, len(columns.valid) - 1)
            self.starts = columns.starts[t, every] & (run.played < len(columns.valid))


def _flat(array: Any) -> Any:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def unplayed(run: RunningFragment) -> Any:
    """Return which rows [T, K] of a fragment were not played; None: none."""
    num_steps = len(run.columns.valid)
    if int(run.played.min()) == num_steps:
        return None
    return np.arange(num_steps)[:, None] >= run.played


def row_at(values: Any, i: int) -> Any:
    """Return row i of batched values, or of each array in a dict or tuple of them."""
    if isinstance(values, (dict, tuple)):
        return map_arrays(lambda array: array[i], values)
    return values[i]


def only(infos: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {name: infos[name] for key in keys for name in (key, f"_{key}") if name in infos}


def names(infos: dict[str, Any]) -> dict[str, None]:
    """Return the keys of the infos, without Gymnasium's masks."""
    return {key: None for key in infos if not is_mask(infos, key)}
