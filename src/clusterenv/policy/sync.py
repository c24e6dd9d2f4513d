"""When a worker's weights are renewed: rules as data, decisions as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Always"]


@dataclass(frozen=True)
class Always:
    """Hand over the weights whenever they changed: the data is never stale."""
