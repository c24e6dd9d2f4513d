"""Write samples, events and records as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["to_json"]


def to_json(value: object) -> bytes:
    """Return `value` as JSON; NaN becomes null, and what is no text in UTF-8 is escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # an environment's traceback may quote bytes, which Python decodes to lone surrogates
        return msgspec.json.encode(_encodable(msgspec.to_builtins(value)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(entry) for entry in value]
    return value
