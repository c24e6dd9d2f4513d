"""The table of arms: which environment, learner and rule, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import clusterenv as ce

__all__ = ["TABLES", "Arm", "rule_of"]


@dataclass(frozen=True)
class Arm:
    env: str
    learner: str
    rule: str
    """As it is written: "Always", "Every(8)", "APS(0.02)"."""
    total_steps: int
    num_envs: int = 64
    nodes: int = 8

    @property
    def name(self) -> str:
        return f"{self.env} {self.learner} {self.rule}"


def rule_of(text: str) -> Any:
    """
    >>> rule_of("APS(0.02)")
    APS(threshold=0.02, ess=None, max_lag=None, min_updates=1, z=1.0)
    >>> rule_of("Every(8)")
    Every(k=8)
    """
    name, _, rest = text.partition("(")
    if name == "APS":
        return ce.APS(threshold=float(rest.rstrip(")")))
    if name == "Every":
        return ce.Every(int(rest.rstrip(")")))
    return {"Always": ce.Always, "Never": ce.Never}[name]()


_RULES = ("Always", "Every(8)", "APS(0.01)", "APS(0.02)", "APS(0.05)")

TABLES: dict[str, tuple[Arm, ...]] = {
    "rules": (
        *(Arm("LunarLander-v3", "PPO", rule, 300_000) for rule in _RULES),
        *(Arm("CartPole-v1", "DQN", rule, 40_000, num_envs=16, nodes=4) for rule in _RULES),
        *(Arm("Pendulum-v1", "SAC", rule, 20_000, num_envs=8, nodes=4) for rule in _RULES),
    ),
}
