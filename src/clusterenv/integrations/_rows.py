"""Batches back to one value per environment: infos (`{key: array, "_key": mask}`) and observations; pure."""

from __future__ import annotations

from typing import Any

import numpy as np


def rows_of(infos: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """One dict per environment, with the keys that its mask says it reported.

    >>> rows_of({"x": np.array([3, 0]), "_x": np.array([True, False])}, 2)
    [{'x': np.int64(3)}, {}]
    """
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        present = range(num_envs) if mask is None else np.flatnonzero(mask)
        values = rows_of(value, num_envs) if isinstance(value, dict) else value
        for i in present:
            rows[i][key] = values[i]
    return rows


def row_of(batch: Any, i: int) -> Any:
    """The observation of one environment out of a batch of a Box, Dict or Tuple space."""
    if isinstance(batch, dict):
        return {key: row_of(value, i) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row_of(value, i) for value in batch)
    return batch[i]
