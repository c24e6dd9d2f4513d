"""Assemble fragments of several workers into one `Rollout`. Pure, except that it accesses their shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from clusterenv.memory.fragments import FragmentArrays
from clusterenv.memory.rows import Leaf, assemble
from clusterenv.rollout import Episodes, Rollout, map_arrays
from clusterenv.wire.requests import Finals, FragmentResult

__all__ = ["Part", "end_episodes", "put_together", "size_of"]

_NONE = np.zeros(0, dtype=np.int64)


class Part(NamedTuple):
    """One worker's columns of a batch."""

    worker: int
    slots: list[int]
    side: FragmentArrays
    result: FragmentResult | None
    """None: late, or lost and not run again; its columns are flagged invalid."""
    num_steps: int
    """Steps that were requested: fewer than those of the batch if rollouts are balanced; 0: it is late."""
    incarnations: list[int]
    sequence: int

    @property
    def columns(self) -> slice:
        return slice(self.slots[0], self.slots[-1] + 1)


def put_together(parts: list[Part], num_steps: int, space: Any, leaves: tuple[Leaf, ...], copy: bool) -> Rollout:
    """Join the parts side by side, in the given order, which is that of their slots; without receipts."""
    steps = slice(0, num_steps)
    for part in parts:
        if part.result is None or part.num_steps < num_steps:
            arrays = FragmentArrays(part.side.specs, part.side.part(num_steps, part.columns))
            if part.result is None and part.num_steps:
                arrays.lose_unplayed(0)
            else:
                arrays.blank(part.num_steps)
    slots = [slot for part in parts for slot in part.slots]
    n = len(slots)
    sides = {id(part.side) for part in parts}
    whole = len(sides) == 1 and slots == list(range(slots[0], slots[0] + n))

    def take(pick: Callable[[FragmentArrays], Any], rows: Any = steps) -> Any:
        if whole:
            view = pick(parts[0].side)[rows, slots[0] : slots[0] + n]
            return np.array(view) if copy else view
        pieces = [pick(part.side)[rows, part.columns] for part in parts]
        return np.concatenate(pieces, axis=1)

    beside = _join_results(parts, num_steps, n, leaves)
    obs, last = [], []
    for i in range(len(leaves)):
        pick_leaf = partial(_leaf, i)
        obs.append(take(pick_leaf))
        last.append(take(pick_leaf, slice(num_steps, num_steps + 1))[0])
    has_masks = parts[0].side.masks.shape[2] > 0
    return Rollout(
        obs=assemble(space, iter(obs)),
        actions=take(lambda side: side.actions),
        rewards=take(lambda side: side.rewards),
        terminations=take(lambda side: side.terminations),
        truncations=take(lambda side: side.truncations),
        logprobs=take(lambda side: side.logprobs),
        versions=beside.versions,
        valid=take(lambda side: side.valid),
        episode_starts=take(lambda side: side.starts),
        last_obs=assemble(space, iter(last)),
        final_obs=assemble(space, iter(beside.finals)),
        final_at=beside.final_at,
        slots=np.array(slots),
        infos=beside.infos,
        episodes=beside.episodes,
        action_masks=take(lambda side: side.masks) if has_masks else None,
        initial_state=_join_states(parts),
        incarnations=np.array([number for part in parts for number in part.incarnations]),
        sequence=np.array([part.sequence for part in parts for _ in part.slots]),
    )


class _Beside(NamedTuple):
    """What fragments bring besides their arrays, joined."""

    versions: Any  # [T, N]
    finals: list[Any]
    final_at: Any
    infos: dict[str, Any]
    episodes: Episodes


def _join_results(parts: list[Part], num_steps: int, n: int, leaves: tuple[Leaf, ...]) -> _Beside:
    versions = np.full((num_steps, n), -1, dtype=np.int64)
    final_t, final_n, final_leaves = [_NONE], [_NONE], [[np.zeros((0, *f.shape), f.dtype) for f in leaves]]
    episodes: list[tuple[int, int, float, int, dict[str, Any]]] = []
    infos: dict[str, list[tuple[int, int, Any]]] = {}
    first = 0
    for part in parts:
        result = part.result
        if result is not None:
            versions[:, first : first + len(part.slots)] = result.version
            final_t.append(result.finals.t)
            final_n.append(result.finals.columns + first)
            final_leaves.append(result.finals.leaves)
            episodes += [(t, part.slots[k], total, length, info) for t, k, total, length, info in result.episodes]
            for key, values in result.infos.items():
                infos.setdefault(key, []).extend((t, first + k, value) for t, k, value in values)
        first += len(part.slots)
    when, who = np.concatenate(final_t), np.concatenate(final_n)
    order = np.lexsort((who, when))
    finals = [np.concatenate(pieces)[order] for pieces in zip(*final_leaves, strict=True)]
    episodes.sort(key=lambda item: item[:2])
    final_at = np.stack([when[order], who[order]], axis=1)
    return _Beside(versions, finals, final_at, _info_arrays(infos, num_steps, n), _episode_table(episodes))


def _leaf(i: int, side: FragmentArrays) -> Any:
    return side.obs[i]


def _info_arrays(infos: dict[str, list[tuple[int, int, Any]]], num_steps: int, n: int) -> dict[str, Any]:
    """Return each key as [T, N, ...] with its "_key" mask, as in Gymnasium; zeros (or None) where it had no value."""
    arrays: dict[str, Any] = {}
    for key, items in infos.items():
        values = [_as_array(value) for *_, value in items]
        alike = len({(v.shape, v.dtype.kind) for v in values}) == 1 and values[0].dtype.kind in "biufc"
        if alike:
            array = np.zeros((num_steps, n, *values[0].shape), dtype=np.result_type(*{v.dtype for v in values}))
        else:
            array = np.full((num_steps, n), None, dtype=object)
        there = np.zeros((num_steps, n), dtype=np.bool_)
        for (t, column, value), plain in zip(items, values, strict=True):
            array[t, column] = plain if alike else value
            there[t, column] = True
        arrays[key], arrays[f"_{key}"] = array, there
    return arrays


def _as_array(value: Any) -> Any:
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.array(None)


def _episode_table(rows: list[tuple[int, int, float, int, dict[str, Any]]]) -> Episodes:
    return Episodes(
        np.array([row[1] for row in rows], dtype=np.int64),
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[2] for row in rows], dtype=np.float64),
        np.array([row[3] for row in rows], dtype=np.int64),
        [row[4] for row in rows],
    )


def _join_states(parts: list[Part]) -> Any:
    """Return the initial states [N, ...]; zeros where a worker was lost."""
    known = next((part.result.initial_state for part in parts if part.result is not None), None)
    if known is None:
        return None

    def blank(part: Part) -> Any:
        return map_arrays(lambda like: np.zeros((len(part.slots), *like.shape[1:]), like.dtype), known)

    states = [blank(part) if part.result is None else part.result.initial_state for part in parts]
    return map_arrays(lambda *leaves: np.concatenate(leaves), *states)


def size_of(part: Part) -> int:
    """Return the bytes of a fragment as it is sent: its rows, the observation after them, and the final ones."""
    if part.result is None:
        return 0
    total = sum(array.nbytes for array in part.side.part(part.result.num_steps, part.columns))
    return int(total + sum(values.nbytes for values in part.result.finals.leaves))


def end_episodes(side: FragmentArrays, first: int, count: int, result: FragmentResult) -> FragmentResult:
    """Truncate the episodes that continue after this fragment; its last observation becomes their final one.

    `first`, `count`: the columns of `side` that belong to the fragment.
    """
    columns = slice(first, first + count)
    # The last row of each column: with vector environments, columns of one fragment may have different lengths.
    last = side.valid[: result.num_steps, columns].sum(axis=0) - 1
    played = np.flatnonzero(last >= 0)
    t = last[played]
    ended = side.terminations[t, first + played] | side.truncations[t, first + played]
    is_lost = (t + 1 < result.num_steps) & side.truncations[np.minimum(t + 1, result.num_steps - 1), first + played]
    open_ones = ~ended & ~is_lost
    t, who_ends = t[open_ones], played[open_ones]
    side.truncations[t, first + who_ends] = True
    when, who, known = result.finals
    last_obs = [leaf[t + 1, first + who_ends] for leaf in side.obs]
    finals = Finals(
        np.append(when, t),
        np.append(who, who_ends),
        [np.concatenate(pair) for pair in zip(known, last_obs, strict=True)],
    )
    return result._replace(finals=finals)
