"""What another machine says, held against what was asked: of itself when it joins, and of a fragment. Pure.

The codec has made sure that it is plain data; here, that indices point into the fragment and arrays have the shapes of
its spaces, before anything is made of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

from clusterenv._version import __version__
from clusterenv.code import versions
from clusterenv.errors import ProtocolError
from clusterenv.memory.rows import Leaf
from clusterenv.wire.messages import PROTOCOL, Hello
from clusterenv.wire.requests import DriftSamples, Finals, FragmentResult, MissingKeys

__all__ = ["check_fragment", "check_missing", "mismatch"]

_MOST_KEYS = 1000
_LONGEST_KEY = 1000


def mismatch(hello: Hello, cores: int, sends_pickle: bool, packages: Iterable[str]) -> str | None:
    """Return why a node does not fit a run that needs so many cores of it, and these packages in matching versions."""
    pairs = [
        ("protocol", str(hello.protocol), str(PROTOCOL)),
        ("clusterenv", hello.clusterenv, __version__),
        ("Python", hello.python, ".".join(map(str, sys.version_info[:2]))),
        ("Gymnasium", hello.gymnasium, gymnasium.__version__),
    ]
    wrong = [f"{name} {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours]
    if hello.protocol == PROTOCOL:
        wrong += versions.differences(hello.versions, versions.installed(), packages, sends_pickle)
    if wrong:
        return f"versions differ: {'; '.join(wrong)}. Install the same on both sides"
    if sends_pickle and not hello.allow_pickle:
        return f"{hello.host} takes no pickled code: say allow_pickle=False here, or start it without --no-pickle"
    if hello.cores < cores:
        return (
            f"{hello.host} may use {hello.cores} CPUs (by affinity and control group quotas) for {cores} workers: "
            "ask for fewer workers_per_node or more CPUs, or say oversubscribe=True"
        )
    return None


def check_fragment(result: FragmentResult, num_steps: int, columns: int, leaves: tuple[Leaf, ...]) -> None:
    """Of a worker with so many environments that was asked for so many steps; raises ProtocolError."""
    try:
        _check(result, num_steps, columns, leaves)
    except (TypeError, ValueError, AttributeError) as error:  # a number where a tuple belongs, and the like
        raise ProtocolError(f"a fragment that cannot be: {error}") from None


def _check(result: FragmentResult, num_steps: int, columns: int, leaves: tuple[Leaf, ...]) -> None:
    _need(_is_int(result.num_steps) and 0 <= result.num_steps <= num_steps, "its number of steps")
    _need(_is_int(result.version), "its version")
    _need(all(isinstance(value, float) and value >= 0 for value in (result.env_s, result.policy_s)), "its times")
    _need(isinstance(result.not_sent, str) and len(result.not_sent) < 1000, "its infos")
    step_s = result.step_s
    if step_s is not None:
        _need(isinstance(step_s, np.ndarray) and step_s.dtype == np.float32 and step_s.shape == (columns,), "its times")
        _need(bool(np.isfinite(step_s).all() and (step_s >= 0).all()), "its times")
    error = result.policy_error
    _need(error is None or (len(error) == 2 and all(isinstance(text, str) for text in error)), "its policy error")
    _finals(result.finals, num_steps, columns, leaves)
    if result.samples is not None:
        _samples(result.samples, num_steps, columns)
    _need(isinstance(result.episodes, list) and isinstance(result.infos, dict), "its episodes and infos")
    for t, column, total, length, info in result.episodes:
        _need(_is_int(t) and 0 <= t < num_steps and _is_int(column) and 0 <= column < columns, "an episode's place")
        _need(isinstance(total, float) and _is_int(length) and isinstance(info, dict), "an episode's return and length")
    for entries in result.infos.values():
        for t, column, _ in entries:
            _need(_is_int(t) and 0 <= t < num_steps and _is_int(column) and 0 <= column < columns, "an info's place")


def check_missing(missing: Any) -> None:
    """What the answer to a fragment has in place of infos; raises ProtocolError."""
    if missing is not None:
        _need(isinstance(missing, MissingKeys) and (missing.mask is None or _is_key(missing.mask)), "its missing keys")
        for keys in (missing.info_keys, missing.seen):
            _need(isinstance(keys, list) and len(keys) <= _MOST_KEYS and all(map(_is_key, keys)), "its missing keys")


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_KEY


def _finals(finals: Finals, num_steps: int, columns: int, leaves: tuple[Leaf, ...]) -> None:
    _need(isinstance(finals, Finals) and isinstance(finals.leaves, list), "its last observations")
    if finals.t is None:
        _need(finals.columns is None and not finals.leaves, "its last observations")
        return
    count = _places(finals.t, finals.columns, num_steps, columns)
    if not finals.leaves:
        _need(count == 0, "its last observations")
        return
    _need(len(finals.leaves) == len(leaves), "its last observations")
    for leaf, values in zip(leaves, finals.leaves, strict=True):
        if leaf.dtype is None:
            _need(isinstance(values, list) and len(values) == count, "its last observations")
        else:
            fits = isinstance(values, np.ndarray) and values.dtype == np.dtype(leaf.dtype)
            _need(fits and values.shape == (count, *leaf.shape), "its last observations")


def _samples(samples: DriftSamples, num_steps: int, columns: int) -> None:
    _need(isinstance(samples, DriftSamples), "its samples")
    count = _places(samples.t, samples.columns, num_steps, columns)
    params = samples.params
    _need(isinstance(params, np.ndarray) and params.dtype == np.float32 and params.ndim == 2, "its samples")
    _need(len(params) == count, "its samples")


def _places(t: Any, columns: Any, num_steps: int, num_columns: int) -> int:
    for values, limit in ((t, num_steps), (columns, num_columns)):
        _need(isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu", "its places")
        _need(len(values) == 0 or (values.min() >= 0 and values.max() < limit), "its places")
    _need(len(t) == len(columns), "its places")
    return len(t)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(f"a fragment in which {what} cannot be")
