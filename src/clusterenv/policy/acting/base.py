"""Define the contract between a policy on the head and the actor that a worker builds from it.

The user attaches a `Policy`. `prepare` turns it into a `Recipe`, which is sent once; `weights` are sent when a sync
rule decides so. On the worker, `recipe.build()` returns an `Actor`, which loads weights and runs forward passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from gymnasium import Space

from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.weights.encoding import Weights
from clusterenv.rollout import map_arrays

__all__ = ["Actor", "PAD", "Policy", "Prepared", "Recipe", "num_rows", "pad_rows"]

PAD = 16
"""Batches are padded to a multiple of this. In smaller batches BLAS results depend on the batch size, so actions would
depend on how slots are spread over workers."""


class Actor(Protocol):
    """Runs a policy's forward passes on a worker; draws no random numbers."""

    def load(self, weights: Weights) -> None: ...

    def forward(self, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
        """Return the family's parameters [B, P] float32 and the next recurrent state (None: not recurrent)."""

    def initial_state(self, rows: int) -> Any: ...

    def like_state(self, state: Any) -> Any:
        """Convert a state of numpy arrays to the form that `forward` takes."""


class Recipe(Protocol):
    """Pickled once and sent to every worker."""

    def build(self) -> Actor: ...


class Prepared(NamedTuple):
    recipe: Recipe
    family: Family
    mask: str | None
    """Key of the observation or of the infos that holds action masks."""
    description: str
    """The recognised shape, for the log."""
    is_recurrent: bool = False
    runtime: str = "numpy"
    """What runs the forward pass on workers: "onnx", "torch" or "numpy"."""
    reason: str = ""
    """Why this runtime."""


@runtime_checkable
class Policy(Protocol):
    """A policy that can be attached to environments."""

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Prepared: ...

    def weights(self) -> Weights:
        """Return the current values of the arrays that acting needs."""

    def token(self) -> Any:
        """Return a token that is equal only while the weights are unchanged; None if only their content can tell."""

    def knobs(self) -> dict[str, Any]:
        """Return scalars that may change at any time (epsilon, noise): a number or one per slot; absent means 0."""


def num_rows(obs: Any) -> int:
    """Return the number of rows of batched observations."""
    while isinstance(obs, (dict, tuple)):
        obs = next(iter(obs.values() if isinstance(obs, dict) else obs))
    return len(obs)


def pad_rows(obs: Any, rows: int) -> Any:
    """Pad `obs` [B, ...] with zero rows to a multiple of PAD."""
    missing = -rows % PAD
    if not missing:
        return obs
    return map_arrays(lambda a: np.concatenate([a, np.zeros((missing, *a.shape[1:]), dtype=a.dtype)]), obs)
