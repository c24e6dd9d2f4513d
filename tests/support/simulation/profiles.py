"""The kinds of schedules: which calls the user makes in each phase, how likely each fault is, how failures are handled.

Most schedules are of the usual kind, with faults at drawn rates. The others make situations likely that are rare there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clusterenv.vector.phases import Phase

__all__ = ["CALLS", "PROFILES", "Profile"]

CALLS: dict[Phase, tuple[str, ...]] = {
    Phase.NEW: (
        *["reset"] * 4,
        "reset_async",
        "call",
        "call_async",
        "set_attr",
        "rollout",
        "stream",
        "evaluate",
        "load",
    )
    + ("misuse",) * 4,
    Phase.IDLE: (*["step"] * 4, *["send"] * 2, *["rollout"] * 2, "stream", "reset", *["masked reset"] * 2, "call")
    + ("set_attr", "evaluate", "pause", "step with a policy", "scale", "step_async", "reset_async", "call_async")
    + ("load", "misuse"),
    Phase.PARTIAL: (*["recv"] * 4, *["send"] * 2, "pause", "masked reset", "reset", "misuse"),
    Phase.RESETTING: (*["reset_wait"] * 4, "pause", "reset", "masked reset", *["misuse"] * 4),
    Phase.STEPPING: (*["step_wait"] * 4, "pause", "reset", "masked reset", *["misuse"] * 4),
    Phase.CALLING: (*["call_wait"] * 4, "pause", "reset", "masked reset", *["misuse"] * 4),
    Phase.COLLECTING: (
        *["rollout"] * 3,
        "pause",
        "evaluate",
        "call",
        "set_attr",
        "masked reset",
        "reset",
        *["misuse"] * 4,
    ),
    Phase.INTERRUPTED: (
        *["reset"] * 6,
        "masked reset",
        "reset_async",
        "call",
        "call_async",
        "set_attr",
        "load",
        *["misuse"] * 3,
    ),
}
"""The calls that the user may make in each phase, as often as they are likely."""


@dataclass(frozen=True)
class Profile:
    script: tuple[str, ...] = ()
    """Most of the calls that the user makes while nothing is pending, in this order, again and again. Such a
    schedule has several workers, and no vector environments."""
    rates: dict[str, float] | None = None
    """The rate of each fault that happens; None: drawn."""
    rates_in: dict[str, dict[str, float]] = field(default_factory=dict)
    """Call → the rates of faults within it."""
    on_error: str | None = None
    """None: drawn."""


_STEPPED = {name: {"kill": 0.35, "late": 0.6} for name in ("step", "recv")}
_BETWEEN = {"set_attr": {"kill": 0.7}}

UNREPORTED = Profile(("set_attr", "evaluate", "step"), {}, {**_STEPPED, **_BETWEEN})
"""Workers are lost between two steps; evaluations bring their slots back before a step reports the loss."""

RAISING = Profile(
    ("set_attr", "evaluate", "evaluate", "step", "set_attr", "evaluate", "evaluate", "set_attr"),
    {},
    {**_STEPPED, **_BETWEEN, "evaluate": {"raise in reset": 0.4}},
    "raise",
)
"""The same, and slots cannot be brought back at first, which an exception reports."""

PROFILES = (*[Profile()] * 5, UNREPORTED, *[RAISING] * 3)
