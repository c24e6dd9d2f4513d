"""Policies: how workers act (`acting`), how weights are encoded (`weights`), and when they are sent (`sync`)."""

from __future__ import annotations

import sys
from typing import Any

from clusterenv.arguments import shown
from clusterenv.errors import PolicyError
from clusterenv.policy.acting.base import Policy

__all__ = ["as_policy", "is_agent"]


def as_policy(agent: Any) -> Policy:
    """Return the attached agent as a policy; torch modules and Stable-Baselines3 algorithms are wrapped."""
    if isinstance(agent, Policy) and not isinstance(agent, type):
        return agent
    module = _module_of(agent)
    if module is not None:
        from clusterenv.policy.acting.torch import TorchPolicy

        return TorchPolicy(module)
    if isinstance(agent, type):
        hint = f"; this is the class, write {agent.__name__}(...)"
    else:
        hint = "; write NumpyPolicy(forward, weights)" if callable(agent) else ""
    raise PolicyError(
        f"collector(agent={shown(agent)}): expected a torch.nn.Module, TorchPolicy(module, dist=...), "
        f"NumpyPolicy(...), RandomPolicy() or a Stable-Baselines3 algorithm{hint}"
    )


def is_agent(value: Any) -> bool:
    """Return whether the argument of `step` is an agent rather than actions."""
    return (isinstance(value, Policy) and not isinstance(value, type)) or _module_of(value) is not None


def _module_of(agent: Any) -> Any:
    """Return the torch module that acts in this agent, or None."""
    torch = sys.modules.get("torch")  # an agent that needs torch has imported it
    if torch is None:
        return None
    module = agent if isinstance(agent, torch.nn.Module) else getattr(agent, "policy", None)
    return module if isinstance(module, torch.nn.Module) else None
