"""Helpers for the checks of answers: assert a condition, and test the type of a value. Pure."""

from __future__ import annotations

from typing import Any

from clusterenv.errors import ProtocolError

__all__ = ["is_int", "is_policy_error", "is_reason", "is_text", "need"]

_LONGEST_TEXT = 1 << 20
_LONGEST_REASON = 1000


def need(holds: bool, what: str) -> None:
    """Raise ProtocolError unless the condition holds; `what` names what is wrong with the answer."""
    if not holds:
        raise ProtocolError(f"an answer with {what}")


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def is_reason(value: Any) -> bool:
    """Return whether this can say why an info was not sent; "" if it was."""
    return isinstance(value, str) and len(value) < _LONGEST_REASON


def is_policy_error(value: Any) -> bool:
    """Return whether this is a worker's report of a failed policy: the error and its traceback."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_text, value))
