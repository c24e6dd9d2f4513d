"""Send a policy as plain data, for nodes that accept no pickled code.

An exported policy is a graph. Of another one the node gets the name: it imports the class, instantiates it with plain
arguments, and prepares it itself. Weights follow as arrays. Only policy classes are instantiated: calling an arbitrary
importable object could do anything.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

from gymnasium import Space

from clusterenv.errors import PolicyError
from clusterenv.policy.acting.base import Policy, Prepared
from clusterenv.policy.acting.distributions import family_for
from clusterenv.policy.onnx.actor import OnnxRecipe

__all__ = ["Named", "Plain", "as_plain", "class_at", "prepare_plain"]


class Named(NamedTuple):
    """A policy class that the node can import, and its arguments."""

    path: str
    """`package.module:Class`"""
    kwargs: dict[str, Any]
    options: dict[str, Any]
    """Of `TorchPolicy`."""


Plain = Named | OnnxRecipe


def as_plain(policy: Policy, prepared: Prepared) -> Plain:
    """Return this policy as plain data; raise PolicyError if it can only be sent as code."""
    if isinstance(prepared.recipe, OnnxRecipe):
        return prepared.recipe
    describe = getattr(policy, "describe", None)
    if describe is None:
        raise PolicyError(
            f"allow_pickle=False: {type(policy).__name__} carries code. Use TorchPolicy(module, made_by=(...)) with a "
            "module class that the nodes can import"
        )
    described: Named = describe()
    class_at(described.path)
    return described


def class_at(path: str) -> type:
    """Import the policy class at this path."""
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PolicyError(f"{path!r} cannot be imported: {error}. Install its package on every node") from error
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(found, type) and issubclass(found, torch.nn.Module)
    if not is_module and not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError(f"{path!r} is no policy class: expected a subclass of torch.nn.Module")
    kind: type = found
    return kind


def prepare_plain(given: Plain, observation_space: Space[Any], action_space: Space[Any]) -> Prepared:
    if isinstance(given, OnnxRecipe):
        return Prepared(given, family_for(given.family, action_space), None, "exported")
    made = class_at(given.path)(**given.kwargs)
    if isinstance(made, Policy):
        return made.prepare(observation_space, action_space)
    from clusterenv.policy.acting.torch import TorchPolicy

    return TorchPolicy(made, **given.options).prepare(observation_space, action_space)
