"""What acts and what travels."""

from __future__ import annotations

import sys
from typing import Any

from clusterenv.errors import PolicyError
from clusterenv.policy.base import Policy

__all__ = ["as_policy"]


def as_policy(agent: Any) -> Policy:
    """What the user attached, as a policy: torch modules and Stable-Baselines3 algorithms are wrapped."""
    if isinstance(agent, Policy):
        return agent
    torch = sys.modules.get("torch")  # an agent that needs torch has imported it
    if torch is not None:
        inner = getattr(agent, "policy", None)
        module = agent if isinstance(agent, torch.nn.Module) else inner
        if isinstance(module, torch.nn.Module):
            from clusterenv.policy.torch import TorchPolicy

            return TorchPolicy(module)
    raise PolicyError(
        f"{type(agent).__name__} is no policy: pass a torch.nn.Module, TorchPolicy(module, dist=...), "
        "NumpyPolicy(...) or RandomPolicy()"
    )
