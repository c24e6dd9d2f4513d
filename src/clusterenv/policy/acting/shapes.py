"""Known shapes of torch policies: compute a distribution's parameters from a module without building the distribution.

`candidates(module, ...)` lists the shapes that a module might have, likeliest first; `TorchPolicy` takes the first
whose log-probability agrees with the module's own. Functions here run on workers, once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gymnasium import Space, spaces

__all__ = ["LOOKED_FOR", "Shape", "call_module", "candidates", "example_for", "from_distribution", "pack"]

LOOKED_FOR = (
    "CleanRL's agents (get_action_and_value with actor, network + actor, or actor_mean + actor_logstd), "
    "CleanRL's SAC actor (fc_mean + fc_logstd with action_scale), Stable-Baselines3's actor-critic policies "
    "(get_distribution)"
)


class Shape(NamedTuple):
    name: str
    family: str
    forward: Callable[[Any, Any], Any]
    """(module, obs) → a tensor [B, P], or (mean, log_std)"""
    acting: tuple[str, ...] | None
    """Prefixes of the state_dict that acting needs; None: all of it."""
    own_logprob: Callable[[Any, Any, Any], Any] | None
    """(module, obs, actions) → [B], by the module's own code."""


def call_module(module: Any, obs: Any) -> Any:
    return module(obs)


def _actor(module: Any, obs: Any) -> Any:
    return module.actor(obs)


def _network_actor(module: Any, obs: Any) -> Any:
    return module.actor(module.network(obs))


def _pixel_network_actor(module: Any, obs: Any) -> Any:
    return module.actor(module.network(obs / 255.0))


def _mean_logstd(module: Any, obs: Any) -> Any:
    mean = module.actor_mean(obs)
    return mean, module.actor_logstd.expand_as(mean)


def _sb3(module: Any, obs: Any) -> Any:
    features = module.extract_features(obs, module.pi_features_extractor)
    out = module.action_net(module.mlp_extractor.forward_actor(features))
    if hasattr(module, "log_std"):
        return out, module.log_std.expand_as(out)
    return out


def _cleanrl_logprob(module: Any, obs: Any, actions: Any) -> Any:
    return module.get_action_and_value(obs, actions)[1]


def _sb3_logprob(module: Any, obs: Any, actions: Any) -> Any:
    # Bernoulli's log-probability wants floats.
    return module.evaluate_actions(obs, actions.float() if actions.dtype == torch.int8 else actions)[1]


def candidates(module: Any, action_space: Space[Any]) -> list[Shape]:
    discrete = isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete))
    found = []
    if hasattr(module, "get_action_and_value"):
        own = _cleanrl_logprob
        if hasattr(module, "actor_mean") and hasattr(module, "actor_logstd"):
            found.append(Shape("CleanRL continuous", "normal", _mean_logstd, ("actor_mean", "actor_logstd"), own))
        if hasattr(module, "actor") and discrete:
            if hasattr(module, "network"):
                prefixes = ("network", "actor")
                found.append(Shape("CleanRL pixels", "categorical", _pixel_network_actor, prefixes, own))
                found.append(Shape("CleanRL network + actor", "categorical", _network_actor, prefixes, own))
            found.append(Shape("CleanRL discrete", "categorical", _actor, ("actor",), own))
    if hasattr(module, "get_distribution") and hasattr(module, "mlp_extractor"):
        family = "normal" if isinstance(action_space, spaces.Box) else "categorical"
        if isinstance(action_space, spaces.MultiBinary):
            family = "bernoulli"
        found.append(Shape("Stable-Baselines3", family, _sb3, None, _sb3_logprob))
    if all(hasattr(module, name) for name in ("fc_mean", "fc_logstd", "action_scale")):
        found.append(Shape("CleanRL SAC", "tanh-normal", call_module, None, None))
    return found


def example_for(action_space: Space[Any]) -> str:
    """Return example code for the value of a `dist` function over this action space."""
    if isinstance(action_space, spaces.Box):
        return "torch.distributions.Normal(module(obs), 0.5)"
    if isinstance(action_space, spaces.MultiBinary):
        return "torch.distributions.Bernoulli(logits=module(obs))"
    if isinstance(action_space, spaces.MultiDiscrete):
        sizes = action_space.nvec.reshape(-1).tolist()
        return f"[torch.distributions.Categorical(logits=part) for part in module(obs).split({sizes}, dim=1)]"
    return "torch.distributions.Categorical(logits=module(obs))"


def pack(output: Any) -> Any:
    """Return the output of a shape's forward pass as one tensor [B, P]."""
    if isinstance(output, tuple):
        return torch.cat([part.reshape(len(part), -1) for part in output], dim=1)
    return output.reshape(len(output), -1)


def from_distribution(dist: Any) -> tuple[str, Any]:
    """Return (family, tensor [B, P]) for the result of a user's `dist`; raise TypeError if its kind is unknown."""
    d = torch.distributions
    if isinstance(dist, (tuple, list)) and dist and all(isinstance(part, d.Categorical) for part in dist):
        return "multi-categorical", torch.cat([part.logits for part in dist], dim=1)
    if isinstance(dist, d.Independent):
        return from_distribution(dist.base_dist)
    if isinstance(dist, d.Categorical):
        return "categorical", dist.logits.reshape(len(dist.logits), -1)
    if isinstance(dist, d.Bernoulli):
        return "bernoulli", dist.logits.reshape(len(dist.logits), -1)
    if isinstance(dist, d.Normal):
        return "normal", pack((dist.loc, dist.scale.log()))
    if isinstance(dist, d.TransformedDistribution):
        base = dist.base_dist.base_dist if isinstance(dist.base_dist, d.Independent) else dist.base_dist
        parts = [p for t in dist.transforms for p in getattr(t, "parts", [t])]
        if isinstance(base, d.Normal) and parts and isinstance(parts[0], d.TanhTransform):
            return "tanh-normal", pack((base.loc, base.scale.log()))
    raise TypeError(
        f"dist returned {type(dist).__name__}; known are Categorical, a list of Categoricals, Bernoulli, Normal, "
        "Independent of these, and a Normal transformed by TanhTransform"
    )
