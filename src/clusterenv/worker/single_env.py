"""Operate on one environment of the user, except for steps: sticky attributes, calls, closing, describing failures."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from clusterenv.memory.progress import INIT, PHASES, RESET
from clusterenv.wire import infos as info_columns
from clusterenv.wire.requests import Fault, Reply, Sticky

__all__ = ["Caught", "describe", "rows_reply", "apply_stickies", "call_env", "close_env"]

Caught = (Exception, SystemExit)
"""Exceptions of user code that do not end the worker; `sys.exit()` in a simulator must not."""


def describe(slot: int, phase: int, error: BaseException, seed: int | None, incarnation: int, call: int) -> Fault:
    """Return a failure as a `Fault`. `call`: number of the failing `step` call in its episode."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    title = f"{type(error).__name__}: {error}"
    return Fault(slot, PHASES[phase], title, text, seed, incarnation, 0 if phase in (INIT, RESET) else call)


def rows_reply(
    request: int,
    slots: list[int],
    infos: list[tuple[int, dict[str, Any]]],
    objects: list[tuple[int, list[Any]]],
    faults: list[Fault],
    last: bool = True,
) -> Reply:
    """Return an answer with rows; of slots that failed, it holds only the fault."""
    if faults:
        failed = {fault.slot for fault in faults}
        infos = [item for item in infos if item[0] not in failed]
        objects = [item for item in objects if item[0] not in failed]
    columns = info_columns.pack(infos) if infos else None
    return Reply(request, slots, columns, objects or None, faults, None, last)


def apply_stickies(env: Any, stickies: list[Sticky]) -> None:
    """Repeat the user's sticky calls and attributes on a new environment."""
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
    """Close an environment, if there is one. What it raises goes to stderr: the others must be closed too."""
    if env is not None:
        try:
            env.close()
        except Caught:
            traceback.print_exc()
