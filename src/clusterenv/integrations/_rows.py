"""Split batched infos (`{key: array, "_key": mask}`) and observations into those of single environments. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from clusterenv.errors import SpecError
from clusterenv.rollout import map_arrays


def rows_of(infos: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return one dict per environment, with the keys that it reported according to the masks.

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
    """Return the observation of one environment from a batch of a Box, Dict or Tuple space."""
    return map_arrays(lambda values: values[i], batch)


def check_same_step(envs: VectorEnv[Any, Any, Any], why: str) -> None:
    """Raise SpecError, with the reason `why`, unless ended episodes are reset in the same step."""
    mode = envs.metadata.get("autoreset_mode")
    if mode != AutoresetMode.SAME_STEP:
        raise SpecError(
            f"{why}, but these environments have autoreset_mode={mode}: pass autoreset_mode=AutoresetMode.SAME_STEP"
        )
