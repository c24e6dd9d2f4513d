"""What is done with one environment of the user's beside stepping it: set its attributes again, call it, close it."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from clusterenv.wire.requests import Sticky
from clusterenv.worker.faults import Caught

__all__ = ["apply_stickies", "call_env", "close_env"]


def apply_stickies(env: Any, stickies: list[Sticky]) -> None:
    """Repeat on a new environment the calls that the user wanted kept."""
    for sticky in stickies:
        if sticky.is_call:
            env.get_wrapper_attr(sticky.name)(*sticky.args, **sticky.kwargs)
        else:
            env.set_wrapper_attr(sticky.name, sticky.args[0])


def call_env(env: Any, name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method, or return the attribute of that name."""
    if name == "render":
        return env.render()
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def close_env(env: Any) -> None:
    """Close it, if there is one. What it raises goes to the head's log: closing the others matters more."""
    if env is not None:
        try:
            env.close()
        except Caught:
            traceback.print_exc()
