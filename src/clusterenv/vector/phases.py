"""Define which calls of `ClusterEnv` and `Collector` are refused in each phase, and why, as a table. Pure.

The phase is computed from what the environments are doing (`CallGuard.phase`), not stored. A call that the table does
not name for a phase is allowed in it.
"""

from __future__ import annotations

import enum

from clusterenv.errors import NoPendingCallError, PendingCallError, UsageError

__all__ = ["AWAITED", "PENDING", "Phase", "refusal", "refused"]


class Phase(enum.Enum):
    NEW = "never reset, or resumed from a state"
    IDLE = "nothing is pending"
    PARTIAL = "slots are in flight from send()"
    RESETTING = "reset_async() was called, but not yet reset_wait()"
    STEPPING = "step_async() was called, but not yet step_wait()"
    CALLING = "call_async() was called, but not yet call_wait()"
    COLLECTING = "a fragment was started, but not yet returned by rollout()"
    STREAMING = "a stream is open"
    INTERRUPTED = "a step or reset was ended by an exception, and its rows are unknown"


PENDING = {
    Phase.PARTIAL: "step",
    Phase.RESETTING: "reset",
    Phase.STEPPING: "step",
    Phase.CALLING: "call",
    Phase.COLLECTING: "rollout",
    Phase.STREAMING: "stream",
}
"""Phase → the call that is pending in it."""

AWAITED = {"recv": "step", "reset_wait": "reset", "step_wait": "step", "call_wait": "call"}
"""A call that waits for results → the call that must be pending."""

_ASYNC = ("reset_async", "step_async", "call_async")
_OF_ALL = ("step", "call", "get_attr", "set_attr", "rollout", "stream", "evaluate", "load_state_dict", *_ASYNC)
"""Calls that are refused while the results of another one are awaited."""

_RESET_FIRST = "{call}() before reset(): call reset() first"
_IN_FLIGHT = "{call}() while slots {slots} are in flight: recv() them first"
_FRAGMENT = (
    "{call}() while a fragment of {num_steps} steps is under way (prefetch, a call that timed out, or a late "
    "worker): take it with rollout({num_steps}), or reset()"
)
_STREAM = "{call}() while a stream is open: leave its loop first (or close() the generator)"
_INTERRUPTED = "{call}() after a step that was interrupted by an error or Ctrl-C: call reset() to go on"
_NOTHING = "{call}() while nothing is in flight; send() first"
# The texts of `AsyncVectorEnv`, followed by what to do.
_NOT_CALLED = "Calling `{call}` without any prior call to `{awaited}_async`. Call {awaited}_async() first"
_WAITING = "Calling `{call}` while waiting for a pending call to `{pending}` to complete. Call {pending}_wait() first"

_NO_ASYNC = dict.fromkeys(("reset_wait", "step_wait", "call_wait"), _NOT_CALLED)
_ALL_WAITING = dict.fromkeys(("send", "recv", *_OF_ALL), _WAITING)


def _refused_until(wait: str) -> dict[str, str]:
    """Return what is refused until this call: everything but `reset`, which abandons what is pending."""
    return {call: text for call, text in {**_NO_ASYNC, **_ALL_WAITING}.items() if call != wait}


_REFUSED: dict[Phase, dict[str, str]] = {
    Phase.NEW: {**_NO_ASYNC, **dict.fromkeys(("step", "send", "recv", "step_async"), _RESET_FIRST)},
    Phase.IDLE: {**_NO_ASYNC, "recv": _NOTHING},
    Phase.PARTIAL: {**_NO_ASYNC, **dict.fromkeys(_OF_ALL, _IN_FLIGHT)},
    Phase.RESETTING: _refused_until("reset_wait"),
    Phase.STEPPING: _refused_until("step_wait"),
    Phase.CALLING: _refused_until("call_wait"),
    Phase.COLLECTING: {
        **_NO_ASYNC,
        **dict.fromkeys(("step", "send", "stream", "load_state_dict", *_ASYNC), _FRAGMENT),
        "recv": _NOTHING,
    },
    Phase.STREAMING: {
        **_NO_ASYNC,
        **dict.fromkeys(
            ("reset", "step", "send", "rollout", "stream", "evaluate", "load_state_dict", *_ASYNC), _STREAM
        ),
        "recv": _NOTHING,
    },
    Phase.INTERRUPTED: {
        **_NO_ASYNC,
        **dict.fromkeys(
            ("step", "send", "recv", "rollout", "stream", "evaluate", "step_async", "reset_wait", "step_wait"),
            _INTERRUPTED,
        ),
    },
}


def refusal(call: str, phase: Phase) -> str | None:
    """Return why this call is refused in this phase, as a template for `refused` to fill in; None if it is allowed."""
    return _REFUSED[phase].get(call)


def refused(call: str, phase: Phase, text: str, slots: list[int], num_steps: int) -> UsageError:
    """Return the error for a refused call.

    Args:
        call: the name of the call.
        phase: the present phase.
        text: the template that `refusal` returned.
        slots: the slots in flight.
        num_steps: length of the pending fragment.
    """
    names = {"call": call, "awaited": AWAITED.get(call), "pending": PENDING.get(phase)}
    text = text.format(**names, slots=slots, num_steps=num_steps)
    if call in AWAITED:
        return NoPendingCallError(text, AWAITED[call])
    if phase in PENDING:
        return PendingCallError(text, PENDING[phase])
    return UsageError(text)
