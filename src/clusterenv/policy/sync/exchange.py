"""Decide which weights a machine gets, and in which form, from the rule, the codec and the policy's versions. No I/O.

Called by `Synchronization` for each machine that gets a request, with the weight ledger's facts about that machine.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from clusterenv.errors import SpecError
from clusterenv.policy.acting.base import Policy
from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.sync.drift import Drift
from clusterenv.policy.sync.publisher import Publisher
from clusterenv.policy.sync.rules import APS, Decision, Rule, Standing, decide, fit, wants_drift
from clusterenv.policy.weights.encoding import digest
from clusterenv.policy.weights.packing import CODECS, Codec, pack, takes_steps

__all__ = ["Acting", "Exchange", "Pulled"]


class Acting(Protocol):
    """Weights that a machine acts with."""

    @property
    def version(self) -> int: ...
    @property
    def data(self) -> bytes: ...
    @property
    def left(self) -> Drift | None: ...


class Pulled(NamedTuple):
    """Weights for a machine."""

    version: int
    data: bytes
    """The weights that its workers load; only close to that version if they are sent packed."""
    form: str = "fp32"
    packed: bytes | None = None
    """The bytes that are sent, if not `data` itself."""
    left: Drift | None = Drift(0.0, 0.0, 0)
    """How far `data` is from that version; None: not measured."""


class Exchange:
    """Holds the versions of one policy, and applies the rule that decides when machines get them."""

    def __init__(self, policy: Policy, recipe: bytes, family: Family, rule: Rule, codec: Codec = "fp32") -> None:
        if codec not in CODECS:
            raise SpecError(f"codec={codec!r}: choose one of {', '.join(CODECS)}")
        self.rule = fit(rule, family)
        self.codec = codec
        self.publisher = Publisher(policy, recipe, family)
        self._policy = policy
        self._packed: dict[str, Pulled] = {}  # by digest of the held weights: machines that hold the same share it
        self._packed_for = -1

    @property
    def measures_drift(self) -> bool:
        return wants_drift(self.rule) or self.codec == "auto"

    @property
    def keeps(self) -> bool:
        """Return whether nodes must keep the weights they get, because later ones come as steps from them."""
        return self.codec == "auto" or takes_steps(self.codec)

    def stand(self, acting: Acting | None, fragments: int) -> Standing:
        """Compare a machine's weights with the newest; `fragments`: the number that it has acted with them."""
        if acting is None:
            return Standing(-1, self.publisher.version, None, None)
        mean, se = self.drift_of(acting, acting.version)
        return Standing(acting.version, self.publisher.version, mean, se, fragments)

    def drift_of(self, acting: Acting | None, version: int) -> tuple[float, float] | tuple[None, None]:
        """Return mean and standard error of the drift of a version that this machine acts or acted with."""
        if acting is not None and self.publisher.snapshot() == version == acting.version:
            drift = acting.left
        else:
            drift = self.publisher.drift(version, self._policy.knobs()) if self.measures_drift else None
        return (None, None) if drift is None else (drift.mean, drift.se)

    def consider(self, node: int, standing: Standing, max_lag: int | None = None) -> Decision:
        """Decide whether the machine pulls before its next request; more than `max_lag` behind, it always does."""
        if max_lag is not None and standing.lag > max_lag:
            return Decision(True, f"{standing.lag} versions behind, max_staleness={max_lag}")
        return decide(self.rule, standing)

    def pull(self, held: Acting | None) -> Pulled:
        """Return the newest version in the smallest form that is accurate enough for a machine that holds `held`."""
        version = self.publisher.snapshot()
        if self.codec == "fp32":
            return Pulled(version, self.publisher.data)
        if self._packed_for != version:
            self._packed_for, self._packed = version, {}
        name = "" if held is None else digest(held.data)
        if name not in self._packed:
            self._packed[name] = self._smallest(version, held)
        return self._packed[name]

    def _smallest(self, version: int, held: Acting | None) -> Pulled:
        newest, base = self.publisher.data, None if held is None else held.data
        whole = Pulled(version, newest)
        if self.codec != "auto":
            packed = pack(self.codec, newest, base)
            return whole if packed is None else Pulled(version, packed.weights, self.codec, packed.data, None)
        rule = self.rule if isinstance(self.rule, APS) else APS()
        for name in CODECS[-2:0:-1]:  # the smallest first
            packed = pack(name, newest, base)
            if packed is None:
                continue
            visited = -1 if held is None else held.version
            left = self.publisher.distance(packed.weights, visited, self._policy.knobs())
            # Packing may use up at most a quarter of the drift that the rule tolerates.
            if left is not None and left.mean + rule.z * left.se <= rule.delta / 4:
                return Pulled(version, packed.weights, name, packed.data, left)
        return whole
