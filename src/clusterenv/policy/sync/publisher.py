"""Number the policy's versions on the head: the newest one, its weights, and the drift of older ones from it.

`publish` may be called after each gradient step: a torch module's weights are read once, to see whether they changed
(`torch_changes.py` has figures), and copied only when a machine is to get them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.policy.acting.base import PAD, Actor, Policy, num_rows, pad_rows
from clusterenv.policy.acting.distributions import Family, mask_logits
from clusterenv.policy.sync.divergence import divergence
from clusterenv.policy.sync.drift import Drift, DriftTable
from clusterenv.policy.weights import encoding
from clusterenv.rollout import map_arrays

__all__ = ["REPLAY", "Publisher"]

REPLAY = 16
"""Recurrent policies: drift is measured within this many steps of a fragment's start, by replaying them."""


class Publisher:
    def __init__(self, policy: Policy, recipe: bytes, family: Family) -> None:
        self._policy = policy
        self._recipe = recipe
        self.version = -1
        """Number of the newest version."""
        self.data = b""
        """Its weights, encoded."""
        self._token: Any = None
        self._digest = ""
        self._of_data = -1  # version of `data`
        self._is_behind = True  # `data` may be older than `version`
        self.weights_of: Callable[[int], bytes | None] = lambda version: None
        """Returns the weights of a version that machines act with; None if none does."""
        self._probe: Actor | None = None
        self._loaded: bytes | None = None  # the probe's weights; those of one version may differ between nodes
        self._table = DriftTable(divergence(family), self._forward_newest, self._forward_of)

    # -- versions ---------------------------------------------------------------------------------------------

    def publish(self) -> int:
        """Begin a new version if the agent's weights may have changed; return the number of the newest."""
        token = self._policy.token()
        if self.version < 0 or token is None or token != self._token:
            self._token = token
            self.version += 1
            self._is_behind = True
            if token is None:
                self.snapshot()
        return self.version

    def snapshot(self) -> int:
        """Copy the newest version's weights; if the content is unchanged, go back to the previous version's number."""
        if self._is_behind:
            data = encoding.encode(self._policy.weights())
            name = encoding.digest(data)
            if name == self._digest:
                self.version = self._of_data
            else:
                self.data, self._digest, self._of_data = data, name, self.version
            self._is_behind = False
        return self.version

    def resume(self, version: int) -> None:
        """Continue the version numbers of an earlier run after `version`."""
        self.version = version
        self._token, self._digest, self._is_behind = None, "", True
        self._table.clear()

    # -- drift ------------------------------------------------------------------------------------------------

    def note(self, version: int, obs: Any, params: Any) -> None:
        """Add states that `version` visited, and the parameters that it gave for them."""
        self._table.add(version, obs, params)

    def note_begin(self, obs: Any) -> None:
        """Set initial states of episodes, to measure on before any worker has acted."""
        self._table.add_begin({"obs": obs})

    def drift(self, version: int, knobs: dict[str, Any]) -> Drift | None:
        """Return how far `version` is from the newest; None if no state is known."""
        self.snapshot()
        return self._table.drift(version, self.version, knobs)

    def distance(self, weights: bytes, version: int, knobs: dict[str, Any]) -> Drift | None:
        """Return how far these weights are from the newest, on states that `version` visited; None if none is known."""
        self.snapshot()
        return self._table.distance(version, lambda rows: self._run(weights, rows), knobs)

    def keep(self, versions: set[int]) -> None:
        """Forget the samples of versions that no machine acts with."""
        self._table.keep(versions)

    def _forward_newest(self, rows: Any) -> Any:
        return self._run(self.data, rows)

    def _forward_of(self, version: int, rows: Any) -> Any | None:
        weights = self.weights_of(version)
        return None if weights is None else self._run(weights, rows)

    def _run(self, data: bytes, rows: Any) -> Any:
        if self._probe is None:
            self._probe = pickle.loads(self._recipe).build()  # a separate copy: the learner's module is not touched
        actor: Actor = self._probe
        if self._loaded is not data:
            actor.load(encoding.decode(data))
            self._loaded = data
        params = _replay(actor, rows) if "state" in rows else _forward(actor, rows["obs"])
        return mask_logits(params, rows["mask"]) if "mask" in rows else params


def _forward(actor: Actor, obs: Any) -> Any:
    count = num_rows(obs)
    starts = np.ones(count + -count % PAD, dtype=np.bool_)
    return actor.forward(pad_rows(obs, count), None, starts)[0][:count]


def _replay(actor: Actor, rows: Any) -> Any:
    """Return the parameters at step `t` of each row, replayed from the state before its first observation."""
    count = len(rows["t"])
    size = count + -count % PAD
    state = actor.like_state(pad_rows(rows["state"], count))
    params: Any = None
    for step in range(rows["starts"].shape[1]):
        obs = map_arrays(lambda values, step=step: values[:, step], rows["obs"])
        starts = np.ones(size, dtype=np.bool_)
        starts[:count] = rows["starts"][:, step]
        given, state = actor.forward(pad_rows(obs, count), state, starts)
        if params is None:
            params = np.zeros_like(given[:count])
        now = rows["t"] == step
        params[now] = given[:count][now]
    return params
