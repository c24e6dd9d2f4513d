"""Reduce the statistics of a collector to the numbers that a logger draws. Pure; called by `Collector.summary`."""

from __future__ import annotations

from typing import Any

__all__ = ["summarize"]


def summarize(stats: dict[str, Any], mean_return: float, mean_length: float) -> dict[str, float]:
    """Return named numbers from `Collector.stats` and the means of recent episodes; NaN: not known."""
    return {
        "charts/episodic_return": mean_return,
        "charts/episodic_length": mean_length,
        "collect/steps": float(stats["steps"]),
        "collect/episodes": float(stats["episodes"]),
        "collect/steps_per_s": float(stats["steps_per_s"]),
        "collect/share_environment": stats["time_shares"]["environment"],
        "collect/share_policy": stats["time_shares"]["policy"],
        "collect/share_waiting": stats["time_shares"]["waiting"],
        "collect/invalid_rows": float(stats["invalid_rows"]),
        "collect/restarts": float(stats["restarts"]),
        "sync/version": float(stats["version"]),
        "sync/lag": _or_nan(stats["mean_lag"]),
        "sync/drift": _or_nan(stats["drift"]),
        "sync/mean_drift": _or_nan(stats["mean_drift"]),
        "sync/pulls": float(stats["pulls"]),
        "sync/pulls_saved": float(stats["pushes"] - stats["pulls"]),
        "sync/weight_bytes": float(stats["weight_bytes"]),
        "sync/bytes_saved": float(stats["pushed_bytes"] - stats["weight_bytes"]),
    }


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
