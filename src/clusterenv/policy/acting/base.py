"""The contract between a policy at the head and the actor that a worker makes of it.

A `Policy` is what the user attaches. `prepare` turns it into a `Recipe`, which travels once; `weights` travel when a
sync rule says so. On the worker, `recipe.build()` gives an `Actor`: weights in, `forward` passes out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from gymnasium import Space

from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.weights.codec import Weights
from clusterenv.rollout import map_arrays

__all__ = ["Actor", "PAD", "Policy", "Prepared", "Recipe", "num_rows", "pad_rows"]

PAD = 16
"""Batches are padded to a multiple of this: at smaller sizes BLAS rounds by the size, and actions would depend on
how slots are spread over workers."""


class Actor(Protocol):
    """Acts on a worker; has no randomness of its own."""

    def load(self, weights: Weights) -> None: ...

    def forward(self, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
        """Parameters of the family [B, P] float32, and the next recurrent state (None: not recurrent)."""

    def initial_state(self, rows: int) -> Any: ...

    def like_state(self, state: Any) -> Any:
        """A state that came as numpy arrays, as `forward` takes it."""


class Recipe(Protocol):
    """Pickled once and sent to every worker."""

    def build(self) -> Actor: ...


class Prepared(NamedTuple):
    recipe: Recipe
    family: Family
    mask: str | None
    """Where action masks are: a key of the observation, or of the infos."""
    description: str
    """Which shape was recognised, for the log."""
    is_recurrent: bool = False


@runtime_checkable
class Policy(Protocol):
    """What can be attached to environments."""

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Prepared: ...

    def weights(self) -> Weights:
        """The arrays that acting needs, as they are now."""

    def token(self) -> Any:
        """Equal tokens mean that the weights surely have not changed; None where only their content can tell."""

    def knobs(self) -> dict[str, Any]:
        """Scalars of acting that may change at any time (epsilon, noise): a number, or one per slot; absent means 0."""


def num_rows(obs: Any) -> int:
    """Return how many rows batched observations have."""
    while isinstance(obs, (dict, tuple)):
        obs = next(iter(obs.values() if isinstance(obs, dict) else obs))
    return len(obs)


def pad_rows(obs: Any, rows: int) -> Any:
    """`obs` [B, ...] with zero rows added, up to a multiple of PAD."""
    missing = -rows % PAD
    if not missing:
        return obs
    return map_arrays(lambda a: np.concatenate([a, np.zeros((missing, *a.shape[1:]), dtype=a.dtype)]), obs)
