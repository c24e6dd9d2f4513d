"""Convert delivered rows to what Gymnasium returns: step results, and infos of all slots from those of some. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from clusterenv.engine.rows import Rows
from clusterenv.wire.requests import Acted

__all__ = ["StepResult", "acted_infos", "spread", "step_result"]

StepResult = tuple[Any, Any, Any, Any, dict[str, Any]]


def step_result(rows: Rows) -> StepResult:
    """Return what `step` returns for these rows; rows of lost episodes are marked in the infos."""
    infos = rows.infos
    if rows.lost:
        n = len(rows.slots)
        everyone = np.ones(n, dtype=np.bool_)
        valid, with_worker = everyone.copy(), np.zeros(n, dtype=np.bool_)
        reasons = np.full(n, None, dtype=object)
        for row, loss in rows.lost.items():
            valid[row], with_worker[row], reasons[row] = False, loss.with_worker, loss.reason
        infos = {
            **infos,
            "transition_valid": valid,
            "_transition_valid": everyone,
            "worker_lost": with_worker,
            "_worker_lost": everyone.copy(),
            "loss_reason": reasons,
            "_loss_reason": ~valid,
        }
    return rows.obs, rows.rewards, rows.terminations, rows.truncations, infos


def acted_infos(parts: list[Acted], num_envs: int) -> dict[str, Any]:
    """Return actions, log-probabilities and versions in Gymnasium's info layout; rows without an action are masked."""
    there = np.zeros(num_envs, dtype=np.bool_)
    infos: dict[str, Any] = {}
    for part in parts:
        columns = {"action": part.actions, "logprob": part.logprobs, "policy_version": np.int64(part.version)}
        for name, values in columns.items():
            shape = (num_envs, *np.shape(values)[1:])
            array = infos.setdefault(name, np.zeros(shape, dtype=np.asarray(values).dtype))
            array[part.slots] = values
        there[part.slots] = True
    return {**infos, **{f"_{name}": there.copy() for name in infos}}


def spread(infos: dict[str, Any], slots: Any, n: int) -> dict[str, Any]:
    """Return infos of some rows as infos of all slots, as Gymnasium returns them from a masked reset."""
    if len(slots) == n:
        return infos
    result: dict[str, Any] = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            result[key] = spread(value, slots, n)
        else:
            fill = np.full((n, *value.shape[1:]), None, dtype=object)
            result[key] = fill if value.dtype == object else np.zeros((n, *value.shape[1:]), dtype=value.dtype)
            result[key][slots] = value
    return result
