"""Compare rollouts field by field."""

from __future__ import annotations

from typing import Any

import numpy as np

ARRAYS = ["obs", "actions", "rewards", "terminations", "truncations", "logprobs", "versions", "valid"]
ARRAYS += ["episode_starts", "last_obs", "final_obs", "final_at", "slots", "incarnations", "sequence"]


def assert_equal(left: Any, right: Any, names: list[str] = ARRAYS) -> None:
    """Fail unless these fields, the infos and the episodes of two rollouts are equal."""
    for name in names:
        _assert_same(getattr(left, name), getattr(right, name), name)
    assert left.infos.keys() == right.infos.keys()
    for key, values in left.infos.items():
        _assert_same(values, right.infos[key], f"infos[{key!r}]")
    for name in ("slots", "t", "returns", "lengths"):
        _assert_same(getattr(left.episodes, name), getattr(right.episodes, name), f"episodes.{name}")


def _assert_same(left: Any, right: Any, name: str) -> None:
    if isinstance(left, dict):
        for key in left:
            _assert_same(left[key], right[key], f"{name}[{key!r}]")
        return
    assert left.dtype == right.dtype and left.shape == right.shape, (name, left.dtype, left.shape, right.shape)
    assert np.array_equal(left, right), (name, np.argwhere(np.asarray(left != right))[:5].tolist())
