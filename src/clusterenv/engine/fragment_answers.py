"""Check the result of a fragment against its request and its own arrays. Pure; called by `answers.check`.

The codec has ensured that the result is plain data. These checks ensure, before anything is used, that indices point
into the fragment, arrays have the shapes of its spaces, and flags, final observations and samples agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from clusterenv.engine.checking import is_int, is_policy_error, is_reason, need
from clusterenv.engine.requests import Request
from clusterenv.errors import ProtocolError
from clusterenv.memory import compression
from clusterenv.memory.fragments import ArenaLayout, FragmentArrays, specs_of
from clusterenv.memory.rows import Leaf
from clusterenv.memory.transfer import view_fragment
from clusterenv.wire.requests import DriftSamples, Finals, FragmentResult, MissingKeys

__all__ = ["check_fragment", "check_missing", "unpack_arrays", "unpack_finals"]

_MOST_KEYS = 1000
_LONGEST_KEY = 1000


def check_fragment(
    result: FragmentResult, request: Request, columns: int, layout: ArenaLayout, frames: Sequence[Any]
) -> None:
    """Raise ProtocolError unless this can be the result of a request for a fragment of `columns` environments.

    Args:
        frames: the bytes of its arrays, in the format of `memory.transfer`, for the steps that the result has.
    """
    num_steps = result.num_steps
    _check_numbers(result, columns)
    error = result.policy_error
    if error is not None:
        need(is_policy_error(error), "a malformed policy error")
    elif request.version is not None:
        need(result.version == request.version, "a fragment of another version")
    _check_finals(result.finals, num_steps, columns, layout.obs)
    if result.samples is not None:
        # One step more: the policy may have failed after the sample was taken.
        _check_samples(result.samples, min(num_steps + 1, request.message.num_steps), columns)
    _check_state(result.initial_state, columns)
    need(isinstance(result.episodes, list) and isinstance(result.infos, dict), "malformed episodes or infos")
    _check_episodes(result.episodes, num_steps, columns)
    for key, entries in result.infos.items():
        need(key in request.info_keys and isinstance(entries, list), "infos that were not requested")
        for t, column, _ in entries:
            need(_is_place(t, num_steps) and _is_place(column, columns), "an info outside the fragment")
    received = view_fragment(specs_of(layout), columns, num_steps, frames)
    for array in received.arrays:
        if array.dtype == np.bool_ and array.size:
            need(int(array.view(np.uint8).max()) <= 1, "flags that are neither 0 nor 1")  # numpy assumes this
    if error is None:  # else its rows are not used
        _check_rows(result, received)


def unpack_arrays(
    num_steps: int, columns: int, layout: ArenaLayout, packed: Sequence[int], frames: Sequence[Any]
) -> list[Any]:
    """Return the bytes of all arrays of a fragment of at most `num_steps` steps: `packed` are observations.

    Each takes at most as many bytes as in a complete fragment, whatever it claims.
    """
    specs = specs_of(layout)
    need(len(frames) == len(specs), f"{len(frames)} arrays instead of {len(specs)}")
    need(all(a < b for a, b in pairwise(packed)), "packed arrays that do not ascend")
    need(all(0 <= i < len(specs) and specs[i].field == "obs" for i in packed), "packed arrays that are no observations")
    arrays = list(frames)
    for i in packed:
        arrays[i] = compression.unpack(specs[i], columns, num_steps + specs[i].extra_rows, frames[i])
    return arrays


def unpack_finals(result: FragmentResult, columns: int, layout: ArenaLayout, frames: Sequence[Any]) -> FragmentResult:
    """Return the result with its packed final observations unpacked, and the number of bytes that packing them saved.

    They take at most as many bytes as the observations of the fragment, of which each is the last one's successor.
    """
    finals, num_steps = result.finals, result.num_steps
    need(isinstance(finals, Finals) and isinstance(finals.leaves, list), "final observations of the wrong shape")
    packed = {i: leaf for i, leaf in enumerate(finals.leaves) if isinstance(leaf, bytes)}
    if not packed:
        return result._replace(saved_bytes=0)
    count = _check_places(finals.t, finals.columns, num_steps, columns)
    fits = len(finals.leaves) == len(layout.obs) and count <= num_steps * columns
    need(fits, "final observations of the wrong shape")
    specs, leaves = specs_of(layout), list(finals.leaves)
    received = view_fragment(specs, columns, num_steps, frames)
    saved = 0
    for i, data in packed.items():
        before = received.obs[i][finals.t, finals.columns]
        leaves[i] = compression.unpack_finals(specs[len(specs) - len(leaves) + i], before, data)
        saved += leaves[i].nbytes - len(data)
    return result._replace(finals=finals._replace(leaves=leaves), saved_bytes=saved)


def check_missing(missing: Any) -> None:
    """Check the missing keys that the answer to a fragment may have in place of infos."""
    if missing is not None:
        need(
            isinstance(missing, MissingKeys) and (missing.mask is None or _is_key(missing.mask)),
            "malformed missing keys",
        )
        for keys in (missing.info_keys, missing.seen):
            need(
                isinstance(keys, list) and len(keys) <= _MOST_KEYS and all(map(_is_key, keys)),
                "malformed missing keys",
            )


def _check_numbers(result: FragmentResult, columns: int) -> None:
    need(is_int(result.version), "a version that is not an integer")
    times = (result.env_s, result.policy_s)
    need(all(isinstance(value, float) and 0 <= value < float("inf") for value in times), "malformed times")
    need(is_reason(result.not_sent), "a malformed reason for infos that were not sent")
    forms = result.forms
    fits = isinstance(forms, list) and len(forms) <= _MOST_KEYS and all(map(_is_key, forms))
    need(fits, "malformed forms of its observations")
    for flags in (result.at_start, result.over):
        is_bools = isinstance(flags, np.ndarray) and flags.dtype == np.bool_ and flags.shape == (columns,)
        need(flags is None or is_bools, "malformed flags of its episodes")
    pace_s = result.pace_s
    if pace_s is not None:
        need(
            isinstance(pace_s, np.ndarray) and pace_s.dtype == np.float32 and pace_s.shape == (columns,),
            "malformed times",
        )
        need(bool(np.isfinite(pace_s).all() and (pace_s >= 0).all()), "malformed times")


def _check_episodes(episodes: list[Any], num_steps: int, columns: int) -> None:
    # A fragment of short episodes has hundreds: a call for each value would take longer than all other checks.
    for t, column, total, length, info in episodes:
        if not (type(t) is type(column) is type(length) is int and 0 <= t < num_steps and 0 <= column < columns):
            raise ProtocolError("an answer with an episode outside the fragment")
        if not (type(total) is float and 0 <= length < 1 << 62 and type(info) is dict):
            raise ProtocolError("an answer with an episode whose return, length or info is malformed")


def _check_rows(result: FragmentResult, received: FragmentArrays) -> None:
    """Check flags against final observations: valid rows that end an episode have one, rows that end none do not."""
    ended, valid = received.terminations | received.truncations, received.valid
    need(not (valid[1:] & ~valid[:-1]).any(), "valid rows after invalid ones")
    has_final = np.zeros_like(valid)
    if result.finals.t is not None:
        has_final[result.finals.t, result.finals.columns] = True
        need(int(has_final.sum()) == len(result.finals.t), "a duplicate final observation")
    need(not (has_final & ~ended).any(), "final observations of episodes that continue")
    need(not (ended & valid & ~has_final).any(), "episodes that ended without a final observation")


def _check_finals(finals: Any, num_steps: int, columns: int, leaves: tuple[Leaf, ...]) -> None:
    need(isinstance(finals, Finals) and isinstance(finals.leaves, list), "final observations of the wrong shape")
    count = _check_places(finals.t, finals.columns, num_steps, columns)
    # Those of several workers are concatenated: unsigned indices would turn all of them into floats.
    need(finals.t.dtype == np.int64 and finals.columns.dtype == np.int64, "indices of the wrong type")
    need(len(finals.leaves) == len(leaves), "final observations of the wrong shape")
    for leaf, values in zip(leaves, finals.leaves, strict=True):
        fits = isinstance(values, np.ndarray) and values.dtype == np.dtype(leaf.dtype)
        need(fits and values.shape == (count, *leaf.shape), "final observations of the wrong shape")


def _check_samples(samples: Any, num_steps: int, columns: int) -> None:
    need(isinstance(samples, DriftSamples), "malformed samples")
    count = _check_places(samples.t, samples.columns, num_steps, columns)
    params = samples.params
    need(isinstance(params, np.ndarray) and params.dtype == np.float32 and params.ndim == 2, "malformed samples")
    need(len(params) == count and bool(np.isfinite(params).all()), "malformed samples")


def _check_state(state: Any, columns: int) -> None:
    """Check a recurrent state: arrays with one row per environment, nested in tuples, lists and dicts."""
    if isinstance(state, (tuple, list)):
        for item in state:
            _check_state(item, columns)
    elif isinstance(state, dict):
        for item in state.values():
            _check_state(item, columns)
    elif state is not None:
        need(isinstance(state, np.ndarray) and state.ndim > 0 and len(state) == columns, "a state of the wrong shape")


def _check_places(t: Any, columns: Any, num_steps: int, num_columns: int) -> int:
    for values, limit in ((t, num_steps), (columns, num_columns)):
        need(
            isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu",
            "indices that are not integers",
        )
        need(len(values) == 0 or (values.min() >= 0 and values.max() < limit), "indices outside the fragment")
    need(len(t) == len(columns), "step and column indices of different lengths")
    return len(t)


def _is_place(value: Any, limit: int) -> bool:
    return is_int(value) and 0 <= value < limit


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_KEY
