"""Decide when a machine gets newer weights: rules are frozen data, decisions pure functions.

The head applies the rule for each machine to a `Standing`, which compares the machine's version with the newest (a few
numbers, no weights). A user's own rule is a function `rule(standing) -> bool`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from clusterenv.arguments import check_fields, closest, expect, refused
from clusterenv.errors import PolicyError, SpecError
from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.sync.divergence import is_kl

__all__ = [
    "APS",
    "Always",
    "Decision",
    "Every",
    "Never",
    "Rule",
    "Standing",
    "decide",
    "fit",
    "threshold_of",
    "wants_drift",
]


class Standing(NamedTuple):
    """Compares the version that a machine has with the newest."""

    version: int
    """-1: it has none yet."""
    latest: int
    drift: float | None
    """Mean divergence from the newest, over states that this version visited; None: not known."""
    drift_se: float | None
    fragments: int = 0
    """Number of fragments that one of its workers has acted with this version."""

    @property
    def lag(self) -> int:
        return self.latest - self.version


class Decision(NamedTuple):
    pull: bool
    reason: str
    is_overdue: bool = False
    """The drift alone would not have required the pull."""


@dataclass(frozen=True)
class Always:
    """Pull whenever a newer version exists. In a stream, the next one may be published before the fragment arrives."""


@dataclass(frozen=True)
class Every:
    """Pull at every k-th version."""

    k: int

    def __post_init__(self) -> None:
        expect("Every", "k", self.k, int, least=1)


@dataclass(frozen=True)
class Never:
    """Pull once, and never again: a frozen policy."""


@dataclass(frozen=True)
class APS:
    """Adaptive Policy Synchronization (arXiv 2507.10990): pull when the policy has diverged.

    Args:
        threshold: mean KL per state (see `divergence`) above which a machine pulls; default: 0.01. Plain PPO clips
            around the policy that acted, and cannot move farther than about clip² / 2 from it: use at most half of
            that (0.01 for a clip of 0.2, 0.0025 for 0.1), or learn with `behaviour_weights`.
        ess: alternatively, the share of effective samples to keep, e.g. 0.98; threshold = -ln(ess) / 2.
        max_lag: always pull when this many versions behind.
        max_fragments: always pull when a worker has acted this many fragments with one version: a learner that is kept
            near that version (by a clip) would otherwise stay there for ever. None: no limit.
        min_updates: do not pull when fewer versions behind than this.
        z: number of standard errors added to the estimated drift; larger is more cautious.

    Example:
        >>> import clusterenv as ce
        >>> round(ce.APS(ess=0.95).delta, 4)
        0.0256
    """

    threshold: float | None = None
    ess: float | None = None
    max_lag: int | None = None
    max_fragments: int | None = 64
    min_updates: int = 1
    z: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.threshold is not None and self.ess is not None:
            raise SpecError("APS: threshold and ess say the same thing; give one")
        if self.threshold is not None and not 0.0 <= self.threshold < math.inf:
            raise SpecError(f"APS(threshold={self.threshold}): expected a number of 0 or more (a mean KL per state)")
        if self.ess is not None and not 0.0 < self.ess < 1.0:
            raise SpecError(f"APS(ess={self.ess}): expected a share between 0 and 1")
        for name in ("max_lag", "max_fragments"):
            expect("APS", name, getattr(self, name), int | None, least=1)
        expect("APS", "min_updates", self.min_updates, int, least=1)
        expect("APS", "z", self.z, float, least=0)

    def __repr__(self) -> str:
        """Show the threshold in effect, even if none was given."""
        first = f"threshold={self.delta:g}" if self.ess is None else f"ess={self.ess:g} (threshold {self.delta:.3g})"
        names = ("max_lag", "max_fragments", "min_updates", "z")
        return f"APS({first}, {', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def delta(self) -> float:
        """The threshold in effect."""
        if self.ess is not None:
            return -0.5 * math.log(self.ess)
        return 0.01 if self.threshold is None else self.threshold


Rule = Always | Every | Never | APS | Callable[[Standing], bool]


def fit(rule: Rule, family: Family) -> Rule:
    """Return the rule; raise if it is not one, or has no meaning for this family of policy."""
    if isinstance(rule, type) or not (isinstance(rule, (Always, Every, Never, APS)) or callable(rule)):
        hint = f"this is the class, write sync={rule.__name__}(...)" if isinstance(rule, type) else _meant(rule)
        wanted = "Always(), APS(...), Every(k), Never() or a function of a Standing"
        raise refused("collector", "sync", rule, wanted, hint)
    if isinstance(rule, APS) and rule.ess is not None and not is_kl(family):
        raise PolicyError(
            f"APS(ess=...) has no meaning for a {family.name} policy, whose samples have no density ratio: "
            "use APS(threshold=...), the share of states whose action changed (epsilon-greedy), or half the "
            "squared distance of actions over the noise (deterministic)"
        )
    return rule


def _meant(rule: Any) -> str:
    if isinstance(rule, str):
        name = closest(rule, ("Always", "APS", "Every", "Never"))
        return f"write sync={name}({'k' * (name == 'Every')})" if name else ""
    if isinstance(rule, float):
        return f"write sync=APS(threshold={rule})"
    return f"write sync=Every({rule})" if isinstance(rule, int) else ""


def wants_drift(rule: Rule) -> bool:
    """Return whether the rule uses the drift: measuring it costs a forward pass."""
    return not isinstance(rule, (Always, Every, Never))


def threshold_of(rule: Rule) -> float | None:
    """Return the drift above which the rule pulls; None: it has no such threshold."""
    return rule.delta if isinstance(rule, APS) else None


def decide(rule: Rule, standing: Standing) -> Decision:
    """Decide whether to pull, and say why."""
    lag = standing.lag
    if standing.version < 0:
        return Decision(True, "nothing loaded yet")
    if lag <= 0:
        return Decision(False, "is the newest")
    if isinstance(rule, Always):
        return Decision(True, f"{lag} newer")
    if isinstance(rule, Every):
        return Decision(lag >= rule.k, f"{lag} of {rule.k} versions behind")
    if isinstance(rule, Never):
        return Decision(False, "never")
    if isinstance(rule, APS):
        return _decide_by_drift(rule, standing)
    try:
        verdict = bool(rule(standing))
    except Exception as error:  # the user's own code
        raise PolicyError(f"the sync rule {rule!r} raised on {standing}: {error!r}") from error
    return Decision(verdict, f"by {getattr(rule, '__name__', type(rule).__name__)}")


def _decide_by_drift(rule: APS, standing: Standing) -> Decision:
    lag = standing.lag
    if lag < rule.min_updates:
        return Decision(False, f"{lag} of at least {rule.min_updates} versions behind")
    if rule.max_lag is not None and lag >= rule.max_lag:
        return Decision(True, f"{lag} versions behind, max_lag={rule.max_lag}")
    if standing.drift is None:
        return Decision(True, "drift not known")
    bound = standing.drift + rule.z * (standing.drift_se or 0.0)
    if math.isnan(bound):
        return Decision(True, "drift is not a number")
    if bound <= rule.delta and rule.max_fragments is not None and standing.fragments >= rule.max_fragments:
        text = f"{standing.fragments} fragments with one version, as its drift of {standing.drift:.2g} stays below"
        return Decision(True, f"{text} {rule.delta:.2g}", is_overdue=True)
    text = f"drift {standing.drift:.4g} + {rule.z:g} x {standing.drift_se or 0.0:.2g}"
    return Decision(bound > rule.delta, f"{text} {'>' if bound > rule.delta else '<='} {rule.delta:.4g}")
