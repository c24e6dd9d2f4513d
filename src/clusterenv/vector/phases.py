"""When each call of `ClusterEnv` and `Collector` makes sense: a table of what is wrong with it in each phase. Pure.

The phase follows from what the environments are doing (`CallGuard.phase`); nobody keeps it. A call that the table
does not name for a phase is allowed in it.
"""

from __future__ import annotations

import enum

from clusterenv.errors import NoPendingCallError, PendingCallError, UsageError

__all__ = ["Phase", "refusal"]


class Phase(enum.Enum):
    NEW = "never reset, or resumed from a state"
    IDLE = "nothing is under way"
    PARTIAL = "slots are in flight from send()"
    COLLECTING = "a fragment was started, and not taken yet"
    STREAMING = "a stream is open"
    INTERRUPTED = "a step or reset ended by an exception, and its rows are unknown"


_RESET_FIRST = "before reset(): call reset() first"
_IN_FLIGHT = "while slots {slots} are in flight: recv() them first"
_FRAGMENT = (
    "while a fragment of {num_steps} steps is under way (prefetch, or a call that timed out): take it with "
    "rollout({num_steps}), or reset()"
)
_STREAM = "while a stream is open: leave its loop first (or close() the generator)"
_INTERRUPTED = "after a step that was interrupted by an error or Ctrl-C: call reset() to go on"
_NOTHING = "while nothing is in flight; send() first"

_REFUSED: dict[Phase, dict[str, str]] = {
    Phase.NEW: dict.fromkeys(("step", "send", "recv"), _RESET_FIRST),
    Phase.IDLE: {"recv": _NOTHING},
    Phase.PARTIAL: dict.fromkeys(
        ("step", "call", "get_attr", "set_attr", "rollout", "stream", "evaluate", "load_state_dict"), _IN_FLIGHT
    ),
    Phase.COLLECTING: {
        **dict.fromkeys(("step", "send", "stream", "load_state_dict"), _FRAGMENT),
        "recv": _NOTHING,
    },
    Phase.STREAMING: {
        **dict.fromkeys(("reset", "step", "send", "rollout", "stream", "evaluate", "load_state_dict"), _STREAM),
        "recv": _NOTHING,
    },
    Phase.INTERRUPTED: dict.fromkeys(("step", "send", "recv", "rollout", "stream", "evaluate"), _INTERRUPTED),
}


_PENDING = {Phase.PARTIAL: "step", Phase.COLLECTING: "rollout", Phase.STREAMING: "stream"}
"""Phase → the call that is pending in it."""


def refusal(call: str, phase: Phase, slots: list[int], num_steps: int) -> UsageError | None:
    """Return what is wrong with this call in this phase; None: nothing.

    `slots` are in flight, `num_steps` is the length of the fragment under way.
    """
    reason = _REFUSED[phase].get(call)
    if reason is None:
        return None
    text = f"{call}() {reason.format(slots=slots, num_steps=num_steps)}"
    if call == "recv" and phase is not Phase.INTERRUPTED:
        return NoPendingCallError(text, "step")
    return PendingCallError(text, _PENDING[phase]) if phase in _PENDING else UsageError(text)
