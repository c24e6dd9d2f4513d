"""When each call of `ClusterEnv` and `Collector` makes sense: a table of what is wrong with it in each phase. Pure.

The phase follows from what the environments are doing (`CallGuard.phase`); nobody keeps it. A call that the table
does not name for a phase is allowed in it.
"""

from __future__ import annotations

import enum

from clusterenv.errors import NoPendingCallError, PendingCallError, UsageError

__all__ = ["AWAITED", "PENDING", "Phase", "refusal", "refused"]


class Phase(enum.Enum):
    NEW = "never reset, or resumed from a state"
    IDLE = "nothing is under way"
    PARTIAL = "slots are in flight from send()"
    RESETTING = "reset_async() was called, and reset_wait() not yet"
    STEPPING = "step_async() was called, and step_wait() not yet"
    CALLING = "call_async() was called, and call_wait() not yet"
    COLLECTING = "a fragment was started, and not taken yet"
    STREAMING = "a stream is open"
    INTERRUPTED = "a step or reset ended by an exception, and its rows are unknown"


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
"""Call that waits for the results of another → that other, which has to be pending."""

_ASYNC = ("reset_async", "step_async", "call_async")
_OF_ALL = ("step", "call", "get_attr", "set_attr", "rollout", "stream", "evaluate", "load_state_dict", *_ASYNC)
"""Calls that make no sense while results of another one are awaited."""

_RESET_FIRST = "{call}() before reset(): call reset() first"
_IN_FLIGHT = "{call}() while slots {slots} are in flight: recv() them first"
_FRAGMENT = (
    "{call}() while a fragment of {num_steps} steps is under way (prefetch, or a call that timed out): take it with "
    "rollout({num_steps}), or reset()"
)
_STREAM = "{call}() while a stream is open: leave its loop first (or close() the generator)"
_INTERRUPTED = "{call}() after a step that was interrupted by an error or Ctrl-C: call reset() to go on"
_NOTHING = "{call}() while nothing is in flight; send() first"
# As `AsyncVectorEnv` words them, and what to do.
_NOT_CALLED = "Calling `{call}` without any prior call to `{awaited}_async`. Call {awaited}_async() first"
_WAITING = "Calling `{call}` while waiting for a pending call to `{pending}` to complete. Call {pending}_wait() first"

_NO_ASYNC = dict.fromkeys(("reset_wait", "step_wait", "call_wait"), _NOT_CALLED)
_ALL_WAITING = dict.fromkeys(("send", "recv", *_OF_ALL), _WAITING)


def _refused_until(wait: str) -> dict[str, str]:
    """Return what is refused until this call: everything but `reset`, which gives up what is pending."""
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
    """Return what is wrong with this call in this phase, with places for `refused` to fill in; None: nothing."""
    return _REFUSED[phase].get(call)


def refused(call: str, phase: Phase, text: str, slots: list[int], num_steps: int) -> UsageError:
    """Return the error for a call that `refusal` has something against.

    Args:
        call: its name.
        phase: what the environments are doing.
        text: what `refusal` returned.
        slots: those in flight.
        num_steps: of the fragment under way.
    """
    names = {"call": call, "awaited": AWAITED.get(call), "pending": PENDING.get(phase)}
    text = text.format(**names, slots=slots, num_steps=num_steps)
    if call in AWAITED:
        return NoPendingCallError(text, AWAITED[call])
    if phase in PENDING:
        return PendingCallError(text, PENDING[phase])
    return UsageError(text)
