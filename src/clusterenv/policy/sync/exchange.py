"""Which weights travel to a machine, and in which form: the rule, the codec and the policy's versions. No I/O.

Called by `Synchronization` for each machine that something is asked of, with what the weight ledger knows of it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from clusterenv.errors import SpecError
from clusterenv.policy.acting.base import Policy
from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.sync.drift import Drift
from clusterenv.policy.sync.publisher import Publisher
from clusterenv.policy.sync.rules import APS, Decision, Rule, Standing, decide, fit, wants_drift
from clusterenv.policy.weights.codec import digest
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
    """What a machine gets."""

    version: int
    data: bytes
    """What its workers load: near to that version where they travel packed."""
    form: str = "fp32"
    packed: bytes | None = None
    """What travels, if not `data` as it is."""
    left: Drift | None = Drift(0.0, 0.0, 0)
    """How far `data` is from that version; None: not measured."""


class Exchange:
    """The versions of one policy, and the rule by which machines get them."""

    def __init__(self, policy: Policy, recipe: bytes, family: Family, rule: Rule, codec: Codec = "fp32") -> None:
        if codec not in CODECS:
            raise SpecError(f"codec={codec!r}: choose one of {', '.join(CODECS)}")
        self.rule = fit(rule, family)
        self.codec = codec
        self.publisher = Publisher(policy, recipe, family)
        self._policy = policy
        self._packed: dict[str, Pulled] = {}  # by what a machine holds: those that hold the same share it
        self._packed_for = -1

    @property
    def measures_drift(self) -> bool:
        return wants_drift(self.rule) or self.codec == "auto"

    @property
    def keeps(self) -> bool:
        """Nodes are to keep what they get: later weights come as steps from it."""
        return self.codec == "auto" or takes_steps(self.codec)

    def stand(self, acting: Acting | None, fragments: int) -> Standing:
        """Return how what a machine acts with stands to the newest; `fragments`: how many it has acted with it."""
        if acting is None:
            return Standing(-1, self.publisher.version, None, None)
        mean, se = self.drift_of(acting, acting.version)
        return Standing(acting.version, self.publisher.version, mean, se, fragments)

    def drift_of(self, acting: Acting | None, version: int) -> tuple[float, float] | tuple[None, None]:
        """Return mean and standard error, of a version that this machine acts or acted with from the newest."""
        if acting is not None and self.publisher.snapshot() == version == acting.version:
            drift = acting.left
        else:
            drift = self.publisher.drift(version, self._policy.knobs()) if self.measures_drift else None
        return (None, None) if drift is None else (drift.mean, drift.se)

    def consider(self, node: int, standing: Standing, max_lag: int | None = None) -> Decision:
        """Return whether the machine pulls, now that it gets a request; more than `max_lag` behind it does anyway."""
        if max_lag is not None and standing.lag > max_lag:
            return Decision(True, f"{standing.lag} versions behind, max_staleness={max_lag}")
        return decide(self.rule, standing)

    def pull(self, held: Acting | None) -> Pulled:
        """Return the newest version in the smallest form that will do for a machine that holds `held`."""
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
            # At most a quarter of the drift that the rule puts up with.
            if left is not None and left.mean + rule.z * left.se <= rule.delta / 4:
                return Pulled(version, packed.weights, name, packed.data, left)
        return whole
