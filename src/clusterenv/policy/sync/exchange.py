"""Who has which version, and what travels to whom: the head's side of weights, for one node or for many.

Before something is asked of a node, its rule is applied to how its version stands to the newest (`consider`); where it
pulls, it is given the newest weights (`pull`). Called by `Collector`; no I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clusterenv.errors import SpecError
from clusterenv.policy.acting.base import Policy
from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.sync.drift import Drift
from clusterenv.policy.sync.publisher import Publisher
from clusterenv.policy.sync.rules import APS, Decision, Rule, Standing, decide, fit, wants_drift
from clusterenv.policy.weights.codec import digest
from clusterenv.policy.weights.packing import CODECS, Codec, Packed, pack, takes_steps

__all__ = ["Exchange", "Holding", "Pulled"]


_NOTHING = Standing(-1, -1, None, None)


class _Form(NamedTuple):
    """How the newest weights travel to a node."""

    name: str
    packed: Packed | None
    """None: whole."""
    left: Drift | None
    """What is lost by it; None where nobody measured."""


_WHOLE = _Form("fp32", None, Drift(0.0, 0.0, 0))


class Pulled(NamedTuple):
    """What a node gets."""

    version: int
    weights: bytes
    packed: bytes | None
    """In which form they travel, if not as they are."""


@dataclass
class Holding:
    """One node: what it has, and what went to it and came from it."""

    version: int = -1
    weights: bytes = b""
    """What it acts with: near to that version where they travel packed."""
    left: Drift | None = None
    """How near; None: not measured."""
    standing: Standing = _NOTHING
    drift_at_pull: float | None = None
    acted: Counter[int] = field(default_factory=Counter)
    """Worker → fragments that it acted with this version, and that were handed over."""
    pulls: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    """Codec → how many pulls."""
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
            "forms": dict(self.forms),
            "weight_bytes": self.weight_bytes,
            "evaluation_bytes": self.evaluation_bytes,
            "drift_bytes": self.drift_bytes,
            "fragment_bytes": self.fragment_bytes,
            "lags": dict(sorted(self.lags.items())),
        }


class Exchange:
    """The versions of one policy, and the nodes that act with them."""

    def __init__(
        self, policy: Policy, recipe: bytes, family: Family, rule: Rule, nodes: int, codec: Codec = "fp32"
    ) -> None:
        if codec not in CODECS:
            raise SpecError(f"codec={codec!r}: choose one of {', '.join(CODECS)}")
        self.rule = fit(rule, family)
        self.codec = codec
        self.publisher = Publisher(policy, recipe, family)
        self.holdings = [Holding() for _ in range(nodes)]
        self._policy = policy
        self._packed: dict[str, _Form] = {}  # by what a node has: those that have the same share it
        self._packed_for = -1

    @property
    def measures_drift(self) -> bool:
        return wants_drift(self.rule) or self.codec == "auto"

    @property
    def keeps(self) -> bool:
        """Nodes are to keep what they get: later weights come as steps from it."""
        return self.codec == "auto" or takes_steps(self.codec)

    def forget(self) -> None:
        """The nodes have another policy now."""
        for holding in self.holdings:
            holding.version, holding.weights = -1, b""
            holding.acted.clear()

    def stand(self, node: int) -> Standing:
        """How the version that the node has stands to the newest."""
        holding, publisher = self.holdings[node], self.publisher
        if holding.version < 0:
            return Standing(-1, publisher.version, None, None)
        mean, se = self._drift_of(holding, holding.version)
        return Standing(holding.version, publisher.version, mean, se, max(holding.acted.values(), default=0))

    def _drift_of(self, holding: Holding, version: int) -> tuple[float, float] | tuple[None, None]:
        """Mean and standard error, of a version that this node acts or acted with from the newest."""
        if self.publisher.snapshot() == version == holding.version:
            drift = holding.left
        else:
            drift = self.publisher.drift(version, self._policy.knobs()) if self.measures_drift else None
        return (None, None) if drift is None else (drift.mean, drift.se)

    def consider(self, node: int, max_lag: int | None = None) -> Decision:
        """Whether the node pulls, now that something is asked of it; more than `max_lag` behind it does in any case."""
        standing = self.holdings[node].standing = self.stand(node)
        if max_lag is not None and standing.lag > max_lag:
            decision = Decision(True, f"{standing.lag} versions behind, max_staleness={max_lag}")
        else:
            decision = decide(self.rule, standing)
        return decision

    def pull(self, node: int) -> Pulled:
        """The newest version and its weights, for this node."""
        holding, publisher = self.holdings[node], self.publisher
        version = publisher.snapshot()
        name, packed, holding.left = self._pack(holding)
        data = publisher.data if packed is None else packed.data
        holding.version, holding.weights = version, publisher.data if packed is None else packed.weights
        holding.drift_at_pull = holding.standing.drift
        holding.standing = Standing(version, version, *self._drift_of(holding, version))
        holding.acted.clear()
        holding.pulls += 1
        holding.forms[name] += 1
        holding.weight_bytes += len(data)
        self.publisher.keep({holding.version: holding.weights for holding in self.holdings if holding.version >= 0})
        return Pulled(version, holding.weights, None if packed is None else data)

    def _pack(self, holding: Holding) -> _Form:
        """The smallest form of the newest weights that will do for this node."""
        if self.codec == "fp32":
            return _WHOLE
        latest = self.publisher.version
        if self._packed_for != latest:
            self._packed_for, self._packed = latest, {}
        name = digest(holding.weights) if holding.weights else ""
        if name not in self._packed:
            self._packed[name] = self._smallest(holding)
        return self._packed[name]

    def _smallest(self, holding: Holding) -> _Form:
        base = holding.weights or None
        if self.codec != "auto":
            packed = pack(self.codec, self.publisher.data, base)
            return _WHOLE if packed is None else _Form(self.codec, packed, None)
        rule = self.rule if isinstance(self.rule, APS) else APS()
        for name in CODECS[-2:0:-1]:  # the smallest first
            packed = pack(name, self.publisher.data, base)
            if packed is None:
                continue
            left = self.publisher.distance(packed.weights, holding.version, self._policy.knobs())
            # At most a quarter of the drift that the rule puts up with.
            if left is not None and left.mean + rule.z * left.se <= rule.delta / 4:
                return _Form(name, packed, left)
        return _WHOLE

    def delivered(self, node: int, worker: int, version: int) -> Standing:
        """A fragment acted by `version` is handed to the learner; returns how stale it is by now.

        Its samples are to be noted before. In a stream the newest is another than when the fragment was asked for.
        """
        holding = self.holdings[node]
        standing = Standing(version, self.publisher.snapshot(), *self._drift_of(holding, version))
        holding.lags[standing.lag] += 1
        if version == holding.version:
            holding.acted[worker] += 1
        return standing
