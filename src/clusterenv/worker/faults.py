"""What user code may raise in a worker, how such a failure is described, and how rows are answered beside it."""

from __future__ import annotations

import traceback
from typing import Any

from clusterenv.memory.progress import INIT, PHASES, RESET
from clusterenv.wire import infos as info_columns
from clusterenv.wire.requests import Fault, Reply

__all__ = ["Caught", "describe", "rows_reply"]

Caught = (Exception, SystemExit)
"""What user code may raise without taking the worker along; `sys.exit()` in a simulator is not the worker's."""


def describe(slot: int, phase: int, error: BaseException, seed: int | None, incarnation: int, call: int) -> Fault:
    """Return the fault. `call`: number of the failing `step` call in its episode."""
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
    """Answer with rows; of slots that failed, only the fault travels."""
    if faults:
        failed = {fault.slot for fault in faults}
        infos = [item for item in infos if item[0] not in failed]
        objects = [item for item in objects if item[0] not in failed]
    columns = info_columns.pack(infos) if infos else None
    return Reply(request, slots, columns, objects or None, faults, None, last)
