"""Define `Rollout`, which a collector returns: arrays `[T, N, ...]`, versions, validity, true final observations.

Made by `engine/collecting/assembly.py` from fragments; read by learners and by `learning.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from clusterenv.errors import UsageError


def _no_ints() -> Any:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, repr=False)
class Episodes:
    """The episodes that ended in a rollout, in the order of (t, slot).

    Has no episode whose beginning was stepped by the user: its return is not known.

    Attributes:
        slots: [E] slot of each episode.
        t: [E] row in which it ended.
        returns: [E] sum of its rewards, or the environment's own `info["episode"]["r"]`.
        lengths: [E] number of its steps, or the environment's own `info["episode"]["l"]`.
        infos: the info of its last step, one dict per episode; from another machine, only what is plain data.
    """

    slots: Any = field(default_factory=_no_ints)
    t: Any = field(default_factory=_no_ints)
    returns: Any = field(default_factory=lambda: np.zeros(0))
    lengths: Any = field(default_factory=_no_ints)
    infos: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        if not len(self):
            return "Episodes(none ended)"
        return f"Episodes({len(self)} ended, mean return {self.returns.mean():.4g}, length {self.lengths.mean():.4g})"


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The results of complete episodes, in the order of their seeds.

    Attributes:
        returns: [E] sum of each episode's rewards.
        lengths: [E] number of its steps.
        seeds: [E] seed that its environment was reset with.
        frames: images of each recorded episode.
        infos: the info of its last step, one dict per episode; from another machine, only what is plain data.
    """

    returns: Any
    lengths: Any
    seeds: Any
    frames: list[list[Any]]
    infos: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        return float(self.returns.std())

    @property
    def success_rate(self) -> float | None:
        """Mean of `is_success` (or else `success`) in the last infos; None if none has it.

        Where some infos have it, an episode without it is no success.
        """
        found = [_success(info) for info in self.infos]
        if all(value is None for value in found):
            return None
        return sum(value or 0.0 for value in found) / len(found)

    def __repr__(self) -> str:
        rate = self.success_rate
        success = "" if rate is None else f", success rate {rate:.3g}"
        recorded = f", {len(self.frames)} recorded" if self.frames else ""
        return f"Evaluation({len(self.returns)} episodes, return {self.mean:.4g} ± {self.std:.4g}{success}{recorded})"

    def save_gif(self, path: str | os.PathLike[str], episode: int = 0, fps: int = 30) -> None:
        """Write a recorded episode as an animated GIF (needs Pillow)."""
        from PIL import Image

        if not self.frames:
            raise UsageError("no episode was recorded: call evaluate(..., record=1)")
        first, *rest = [Image.fromarray(frame) for frame in self.frames[episode]]
        first.save(path, save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)


class Receipt(NamedTuple):
    """How stale one worker's columns are.

    Attributes:
        worker: number of the worker.
        slots: its slots.
        version: of the policy that acted.
        lag: versions between that one and the newest, when the fragment was delivered.
        drift: mean divergence of the acting policy from the newest at delivery; None if the rule does not measure it.
        drift_se: standard error of that mean.
    """

    worker: int
    slots: tuple[int, ...]
    version: int
    lag: int
    drift: float | None
    drift_se: float | None


class Transitions(NamedTuple):
    """Valid transitions only, flattened: row i of every array is one transition."""

    obs: Any
    actions: Any
    rewards: Any
    next_obs: Any
    terminations: Any

    def __repr__(self) -> str:
        return f"Transitions({', '.join(f'{name}: {shape_of(getattr(self, name))}' for name in self._fields)})"


@dataclass(frozen=True, repr=False)
class Rollout:
    """T steps of N environments, acted by the workers.

    There are no reset rows: an environment whose episode ends is reset in the same step, `obs[t + 1]` is the first
    observation of the next episode, and the true last observation is in `final_obs`.

    `obs` (and `last_obs`, `final_obs`) have the structure of the observation space: an array, a dict, a tuple.

    Attributes:
        obs: [T, N, ...] observations; `actions[t]` was chosen for `obs[t]`.
        actions: [T, N, ...] as sampled: continuous ones are clipped only for the environment.
        rewards: [T, N] float64.
        terminations: [T, N] bool.
        truncations: [T, N] bool.
        logprobs: [T, N] float32, log-probability with which the action was sampled.
        versions: [T, N] int64, version of the acting policy.
        valid: [T, N] bool; False where an environment was lost, or no row was collected: do not learn from those rows.
        episode_starts: [T, N] bool; `obs[t]` is the first of its episode.
        last_obs: [N, ...] observation after row T-1, of the current episode.
        final_obs: [K, ...] the true last observation of each episode that ended.
        final_at: [K, 2] int, its (t, n).
        slots: [N] int, ascending.
        infos: key → [T, N, ...], with `_key` masks as in Gymnasium; the keys of `collector(info_keys=...)`.
        episodes: the episodes that ended, see `Episodes`.
        action_masks: [T, N, actions] bool; None if the policy has no masks.
        initial_state: recurrent state before row 0, [N, ...] each; None if the policy has none.
        receipts: version, lag and drift of each worker's columns, see `Receipt`.
        incarnations: [N] int; increases when a slot's environment is lost.
        sequence: [N] int, number of earlier fragments of this slot.
    """

    obs: Any
    actions: Any
    rewards: Any
    terminations: Any
    truncations: Any
    logprobs: Any
    versions: Any
    valid: Any
    episode_starts: Any
    last_obs: Any
    final_obs: Any
    final_at: Any
    slots: Any
    infos: dict[str, Any] = field(default_factory=dict)
    episodes: Episodes = field(default_factory=Episodes)
    action_masks: Any = None
    initial_state: Any = None
    receipts: tuple[Receipt, ...] = ()
    incarnations: Any = None
    sequence: Any = None

    @property
    def num_steps(self) -> int:
        return int(self.rewards.shape[0])

    @property
    def num_envs(self) -> int:
        return int(self.rewards.shape[1])

    def __repr__(self) -> str:
        """Return shapes and counts, without the arrays' values."""
        size = int(np.prod(self.rewards.shape))
        invalid = size - int(self.valid.sum())
        first, last = (int(self.versions.min()), int(self.versions.max())) if size else (-1, -1)
        shown = {"obs": self.obs, "actions": self.actions, "action_masks": self.action_masks}
        shown |= {f"infos[{key!r}]": value for key, value in self.infos.items() if f"_{key}" in self.infos}
        parts = [
            f"{self.num_steps} steps" + (f" x {self.num_envs} environments" if self.rewards.ndim > 1 else ""),
            f"{invalid} of {size} rows invalid" if invalid else "all rows valid",
            f"version {first}" if first == last else f"versions {first} to {last}",
            repr(self.episodes),
            *(f"{name}: {shape_of(values)}" for name, values in shown.items() if values is not None),
        ]
        return f"Rollout({', '.join(parts)})"

    def next_obs(self) -> Any:
        """Return the observation after each step, [T, N, ...]; always of the same episode, even where it ended."""
        when, who = self.final_at[:, 0], self.final_at[:, 1]

        def shift(obs: Any, last: Any, final: Any) -> Any:
            following = _concat(obs[1:], last[None])
            if len(when):
                following[when, who] = final
            return following

        return map_arrays(shift, self.obs, self.last_obs, self.final_obs)

    def transitions(self) -> Transitions:
        """Return the valid (s, a, r, s', terminated) rows, flattened, for a replay buffer."""
        keep = self.valid.reshape(-1)

        def rows(values: Any) -> Any:
            return _flat(values)[keep]

        return Transitions(
            map_arrays(rows, self.obs),
            map_arrays(rows, self.actions),
            rows(self.rewards),
            map_arrays(rows, self.next_obs()),
            rows(self.terminations),
        )

    def flatten(self) -> Rollout:
        """Return the same rows with time and environments in one axis [T * N, ...]; other arrays are unchanged."""
        names = "obs actions rewards terminations truncations logprobs versions valid episode_starts infos action_masks"
        return replace(self, **{name: map_arrays(_flat, getattr(self, name)) for name in names.split()})

    def torch(self, device: Any = None) -> Rollout:
        """Return a copy with numeric arrays as tensors on `device`; float64 becomes float32, as learners expect."""
        import torch

        def convert(values: Any) -> Any:
            if not isinstance(values, np.ndarray) or values.dtype == object:
                return values
            if values.dtype == np.float64:
                values = values.astype(np.float32)
            return torch.as_tensor(np.ascontiguousarray(values), device=device)

        skip = ("episodes", "receipts", "slots", "incarnations", "sequence")
        changed = {f.name: map_arrays(convert, getattr(self, f.name)) for f in fields(self) if f.name not in skip}
        return replace(self, **changed)


def _success(info: dict[str, Any]) -> float | None:
    """Return the success that an info reports, as a number; None if it reports none."""
    for name in ("is_success", "success"):
        value = info.get(name)
        if isinstance(value, (bool, int, float, np.generic, np.ndarray)):
            number = np.asarray(value)
            if number.size == 1 and number.dtype.kind in "biuf":
                return float(number.item())
    return None


def map_arrays(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply `function` to the leaves of dicts, tuples and lists of the same structure; None stays None."""
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: map_arrays(function, value, *(other[key] for other in others)) for key, value in first.items()}
    if isinstance(first, (tuple, list)):
        return tuple(map_arrays(function, *items) for items in zip(first, *others, strict=True))
    return function(first, *others)


def to_numpy(values: Any) -> Any:
    """Return an array, or a tensor on whatever device, as a numpy array."""
    if isinstance(values, np.ndarray):
        return values
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def shape_of(values: Any) -> str:
    """Return the dtype and shape of an array or tensor, or of each one in a dict or tuple, as text."""
    if isinstance(values, dict):
        return "{" + ", ".join(f"{key!r}: {shape_of(value)}" for key, value in values.items()) + "}"
    if isinstance(values, (tuple, list)):
        return f"({', '.join(map(shape_of, values))})"
    return f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)}"


def _flat(values: Any) -> Any:
    """Reshape [T, N, ...] to [T * N, ...]."""
    return values.reshape(-1, *values.shape[2:])


def _concat(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    import torch

    return torch.cat([first, second])
