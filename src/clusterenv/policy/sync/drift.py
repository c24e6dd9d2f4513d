"""Estimate how far each version in use is from the newest, on states that it visited.

Fragments bring samples: a few of their states, with the parameters that the acting policy gave for them. The newest
policy is run on them when an estimate is requested. Memory is bounded: one reservoir of states per version in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from clusterenv.policy.sync.divergence import Divergence
from clusterenv.rollout import map_arrays

__all__ = ["CAPACITY", "Drift", "DriftTable", "sample_every"]

CAPACITY = 512
"""States kept per version."""


def sample_every(states: int) -> int:
    """Return n such that one in n states of a rollout is sampled: 64, but at least about 64 and at most 1024 in all.

    >>> sample_every(16 * 8), sample_every(128 * 64), sample_every(1024 * 256)
    (2, 64, 256)
    """
    return max(1, states // 1024, min(64, states // 64))


class Drift(NamedTuple):
    mean: float
    se: float
    states: int


class _Reservoir:
    """A uniform sample of the states that were added (Vitter's algorithm R)."""

    def __init__(self) -> None:
        self.obs: list[Any] = []
        self.params: list[Any] = []
        self.seen = 0

    def add(self, obs: Any, params: Any, rng: np.random.Generator) -> None:
        for i in range(len(params)):
            row = map_arrays(lambda values, i=i: values[i], obs)
            if len(self.params) < CAPACITY:
                self.obs.append(row)
                self.params.append(params[i])
            else:
                place = int(rng.integers(self.seen + 1))
                if place < CAPACITY:
                    self.obs[place], self.params[place] = row, params[i]
            self.seen += 1


class DriftTable:
    """Keeps a reservoir per version, and estimates each version's drift from the newest.

    Args:
        forward: (obs [n, ...]) → parameters [n, P] of the newest policy.
        forward_of: (version, obs) → the same for an older version that has no samples yet; None if its weights are no
            longer known.
    """

    def __init__(
        self,
        measure: Divergence,
        forward: Callable[[Any], Any],
        forward_of: Callable[[int, Any], Any | None] | None = None,
        seed: int = 0,
    ) -> None:
        self._measure = measure
        self._forward = forward
        self._forward_of = forward_of
        self._rng = np.random.default_rng(seed)
        self._reservoirs: dict[int, _Reservoir] = {}
        self._known: dict[int, Drift] = {}
        self._asked_at = -1
        self._begin: Any = None

    def add(self, version: int, obs: Any, params: Any) -> None:
        """Add states that `version` visited, [m, ...], and the parameters that it gave for them, [m, P]."""
        if len(params):
            self._reservoirs.setdefault(version, _Reservoir()).add(obs, params, self._rng)
            self._begin = None

    def add_begin(self, obs: Any) -> None:
        """Set initial states of episodes, [m, ...], to measure on before any worker has acted."""
        self._begin = obs

    def clear(self) -> None:
        """Forget everything, because version numbers are about to be reused for other weights."""
        self._reservoirs, self._known, self._asked_at, self._begin = {}, {}, -1, None

    def keep(self, versions: set[int]) -> None:
        """Forget other versions, except the newest sampled one, which serves versions without samples."""
        newest = max(self._reservoirs, default=None)
        for version in list(self._reservoirs):
            if version not in versions and version != newest:
                del self._reservoirs[version]

    def drift(self, version: int, latest: int, knobs: dict[str, Any]) -> Drift | None:
        """Return the drift of `version` from `latest`, which `forward` runs; None if no state is known."""
        if version == latest:
            return Drift(0.0, 0.0, 0)
        if latest != self._asked_at:
            self._asked_at, self._known = latest, {}
        if version not in self._known:
            measured = self._measured(version, knobs)
            if measured is None:
                return None
            self._known[version] = measured
        return self._known[version]

    def distance(self, version: int, forward: Callable[[Any], Any], knobs: dict[str, Any]) -> Drift | None:
        """Return how far another policy is from the newest; None if no state is known.

        Measured on states that `version` visited, or on initial states before any worker has acted.
        """
        reservoir = self._reservoirs.get(version)
        obs = self._begin if reservoir is None else _stack(reservoir.obs)
        if obs is None:
            return None
        return _drift(self._measure(forward(obs), self._forward(obs), knobs))

    def _measured(self, version: int, knobs: dict[str, Any]) -> Drift | None:
        reservoir = self._reservoirs.get(version)
        old: Any
        if reservoir is not None:
            obs, old = _stack(reservoir.obs), np.stack(reservoir.params)
        else:
            newest = max(self._reservoirs, default=None)
            if newest is None or self._forward_of is None:
                return None
            obs = _stack(self._reservoirs[newest].obs)
            old = self._forward_of(version, obs)
            if old is None:
                return None
        return _drift(self._measure(old, self._forward(obs), knobs))


def _drift(values: Any) -> Drift:
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return Drift(float(values.mean()), spread / len(values) ** 0.5, len(values))


def _stack(rows: list[Any]) -> Any:
    return map_arrays(lambda *leaves: np.stack(leaves), *rows)
