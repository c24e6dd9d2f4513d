"""Who has which version, and what travels to whom: the head's side of weights, for one node or for many.

Before something is asked of a node, its rule is applied to how its version stands to the newest (`consider`); where it
pulls, it is given the newest weights (`pull`). Called by `Collector`; no I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from clusterenv.policy.base import Policy
from clusterenv.policy.families import Family
from clusterenv.policy.publisher import Publisher
from clusterenv.policy.sync import Decision, Rule, Standing, decide, fit, wants_drift

__all__ = ["Exchange", "Holding"]


_NOTHING = Standing(-1, -1, None, None)


@dataclass
class Holding:
    """One node: what it has, and what went to it and came from it."""

    version: int = -1
    standing: Standing = _NOTHING
    drift_at_pull: float | None = None
    pulls: int = 0
    weight_bytes: int = 0
    evaluation_bytes: int = 0
    """Weights that went only to be evaluated."""
    drift_bytes: int = 0
    fragment_bytes: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    """Versions behind the newest when a fragment was handed to the learner → how many fragments."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "drift": self.standing.drift,
            "drift_se": self.standing.drift_se,
            "drift_at_pull": self.drift_at_pull,
            "pulls": self.pulls,
            "weight_bytes": self.weight_bytes,
            "evaluation_bytes": self.evaluation_bytes,
            "drift_bytes": self.drift_bytes,
            "fragment_bytes": self.fragment_bytes,
            "lags": dict(sorted(self.lags.items())),
        }


class Exchange:
    """The versions of one policy, and the nodes that act with them."""

    def __init__(self, policy: Policy, recipe: bytes, family: Family, rule: Rule, nodes: int) -> None:
        self.rule = fit(rule, family)
        self.publisher = Publisher(policy, recipe, family)
        self.holdings = [Holding() for _ in range(nodes)]
        self._policy = policy

    @property
    def measures_drift(self) -> bool:
        return wants_drift(self.rule)

    def forget(self) -> None:
        """The nodes have another policy now."""
        for holding in self.holdings:
            holding.version = -1

    def stand(self, node: int) -> Standing:
        """How the version that the node has stands to the newest."""
        holding, publisher = self.holdings[node], self.publisher
        if holding.version < 0:
            return Standing(-1, publisher.version, None, None)
        latest = publisher.snapshot()
        drift = None
        if self.measures_drift and latest != holding.version:
            drift = publisher.drift(holding.version, self._policy.knobs())
        return Standing(holding.version, latest, *((None, None) if drift is None else drift[:2]))

    def consider(self, node: int, max_lag: int | None = None) -> Decision:
        """Whether the node pulls, now that something is asked of it; more than `max_lag` behind it does in any case."""
        holding = self.holdings[node]
        holding.standing = self.stand(node)
        if max_lag is not None and holding.standing.lag > max_lag:
            return Decision(True, f"{holding.standing.lag} versions behind, max_staleness={max_lag}")
        return decide(self.rule, holding.standing)

    def pull(self, node: int) -> tuple[int, bytes]:
        """The newest version and its weights, for this node."""
        holding, publisher = self.holdings[node], self.publisher
        holding.version = publisher.snapshot()
        holding.drift_at_pull = holding.standing.drift
        holding.standing = Standing(holding.version, holding.version, 0.0, 0.0)
        holding.pulls += 1
        holding.weight_bytes += len(publisher.data)
        self.keep_what_is_held()
        return holding.version, publisher.data

    def keep_what_is_held(self) -> None:
        """Versions that no node has any more are forgotten."""
        self.publisher.keep({holding.version for holding in self.holdings})

    def delivered(self, node: int, version: int) -> Standing:
        """A fragment acted by `version` is handed to the learner; returns how stale it is."""
        holding = self.holdings[node]
        latest = self.publisher.version
        holding.lags[latest - version] += 1
        known = holding.standing.version == version
        return Standing(version, latest, *(holding.standing[2:] if known else (None, None)))
