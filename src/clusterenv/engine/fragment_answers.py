"""Check the result of a fragment against what was asked, and against its own arrays. Pure; called by `answers.check`.

The codec has made sure that it is plain data; here, that indices point into the fragment, arrays have the shapes of its
spaces, and flags, last observations and samples agree, before anything is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clusterenv.engine.requests import Request
from clusterenv.errors import ProtocolError
from clusterenv.memory.rows import Leaf
from clusterenv.wire.requests import DriftSamples, Finals, FragmentResult, MissingKeys

__all__ = ["check_fragment", "check_missing"]

_MOST_KEYS = 1000
_LONGEST_KEY = 1000
_LONGEST_TEXT = 1 << 20
_FLAGS = slice(3, 8)
"""Which of a fragment's arrays are bools: terminations, truncations, valid, starts, masks."""


def check_fragment(
    result: FragmentResult, request: Request, columns: int, leaves: tuple[Leaf, ...], arrays: Sequence[Any]
) -> None:
    """Raise ProtocolError unless this can be the result of a request for a fragment of so many environments.

    Args:
        arrays: the bytes of its arrays, of the sizes of the layout, in the order of `memory.transfer`.
    """
    num_steps = request.message.num_steps
    _check_numbers(result, num_steps, columns)
    error = result.policy_error
    if error is not None:
        _need(isinstance(error, (tuple, list)) and len(error) == 2, "its policy error")
        _need(all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in error), "its policy error")
    elif request.version is not None:
        _need(result.version == request.version, "its version")
    _check_finals(result.finals, num_steps, columns, leaves)
    if result.samples is not None:
        _check_samples(result.samples, num_steps, columns)
    _check_state(result.initial_state, columns)
    _need(isinstance(result.episodes, list) and isinstance(result.infos, dict), "its episodes and infos")
    for t, column, total, length, info in result.episodes:
        _need(_is_place(t, num_steps) and _is_place(column, columns), "an episode's place")
        fits = isinstance(total, float) and _is_place(length, 1 << 62) and isinstance(info, dict)
        _need(fits, "an episode's return and length")
    for key, entries in result.infos.items():
        _need(key in request.info_keys and isinstance(entries, list), "infos that nobody asked for")
        for t, column, _ in entries:
            _need(_is_place(t, num_steps) and _is_place(column, columns), "an info's place")
    for array in arrays[_FLAGS]:
        _need(not len(array) or int(np.frombuffer(array, np.uint8).max()) <= 1, "its flags")  # numpy trusts a bool
    if error is None:  # else its rows are not used
        _check_rows(result, num_steps, columns, arrays)


def check_missing(missing: Any) -> None:
    """Check what the answer to a fragment has in place of infos."""
    if missing is not None:
        _need(isinstance(missing, MissingKeys) and (missing.mask is None or _is_key(missing.mask)), "its missing keys")
        for keys in (missing.info_keys, missing.seen):
            _need(isinstance(keys, list) and len(keys) <= _MOST_KEYS and all(map(_is_key, keys)), "its missing keys")


def _check_numbers(result: FragmentResult, num_steps: int, columns: int) -> None:
    _need(_is_int(result.num_steps) and 0 <= result.num_steps <= num_steps, "its number of steps")
    _need(_is_int(result.version), "its version")
    times = (result.env_s, result.policy_s)
    _need(all(isinstance(value, float) and 0 <= value < float("inf") for value in times), "its times")
    _need(isinstance(result.not_sent, str) and len(result.not_sent) < _LONGEST_KEY, "its infos")
    step_s = result.step_s
    if step_s is not None:
        _need(isinstance(step_s, np.ndarray) and step_s.dtype == np.float32 and step_s.shape == (columns,), "its times")
        _need(bool(np.isfinite(step_s).all() and (step_s >= 0).all()), "its times")


def _check_rows(result: FragmentResult, num_steps: int, columns: int, arrays: Sequence[Any]) -> None:
    """Check that flags and last observations agree: each valid row that ends an episode has one, and no other row."""
    flags = [np.frombuffer(array, np.bool_).reshape(num_steps, columns) for array in arrays[3:6]]
    ended, valid = flags[0] | flags[1], flags[2]
    _need(not (valid[1:] & ~valid[:-1]).any(), "rows that are valid again")
    _need(not valid[result.num_steps :].any(), "rows after its end")
    has_final = np.zeros((num_steps, columns), dtype=np.bool_)
    if result.finals.t is not None:
        has_final[result.finals.t, result.finals.columns] = True
        _need(int(has_final.sum()) == len(result.finals.t), "a last observation twice")
    _need(not (has_final & ~ended).any(), "last observations of episodes that go on")
    _need(not (ended & valid & ~has_final).any(), "episodes that ended without a last observation")


def _check_finals(finals: Any, num_steps: int, columns: int, leaves: tuple[Leaf, ...]) -> None:
    _need(isinstance(finals, Finals) and isinstance(finals.leaves, list), "its last observations")
    count = _check_places(finals.t, finals.columns, num_steps, columns)
    # Those of several workers are put together: unsigned places would make floats of them.
    _need(finals.t.dtype == np.int64 and finals.columns.dtype == np.int64, "its places")
    _need(len(finals.leaves) == len(leaves), "its last observations")
    for leaf, values in zip(leaves, finals.leaves, strict=True):
        fits = isinstance(values, np.ndarray) and values.dtype == np.dtype(leaf.dtype)
        _need(fits and values.shape == (count, *leaf.shape), "its last observations")


def _check_samples(samples: Any, num_steps: int, columns: int) -> None:
    _need(isinstance(samples, DriftSamples), "its samples")
    count = _check_places(samples.t, samples.columns, num_steps, columns)
    params = samples.params
    _need(isinstance(params, np.ndarray) and params.dtype == np.float32 and params.ndim == 2, "its samples")
    _need(len(params) == count and bool(np.isfinite(params).all()), "its samples")


def _check_state(state: Any, columns: int) -> None:
    """Check a recurrent state: arrays with a row for each environment, in tuples, lists and dicts."""
    if isinstance(state, (tuple, list)):
        for item in state:
            _check_state(item, columns)
    elif isinstance(state, dict):
        for item in state.values():
            _check_state(item, columns)
    elif state is not None:
        _need(isinstance(state, np.ndarray) and state.ndim > 0 and len(state) == columns, "its state")


def _check_places(t: Any, columns: Any, num_steps: int, num_columns: int) -> int:
    for values, limit in ((t, num_steps), (columns, num_columns)):
        _need(isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu", "its places")
        _need(len(values) == 0 or (values.min() >= 0 and values.max() < limit), "its places")
    _need(len(t) == len(columns), "its places")
    return len(t)


def _is_place(value: Any, limit: int) -> bool:
    return _is_int(value) and 0 <= value < limit


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_KEY


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(f"a fragment in which {what} cannot be")
