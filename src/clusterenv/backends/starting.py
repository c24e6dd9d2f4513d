"""Start a run for `ClusterEnv` and return how to close it; with `resume`, earlier or later heads share the run."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable

from gymnasium.vector import AutoresetMode

from clusterenv.arguments import expect
from clusterenv.backends.contract import Backend
from clusterenv.cluster.ending import Ending
from clusterenv.driver import Driver
from clusterenv.errors import SpecError
from clusterenv.events import Event, EventLog
from clusterenv.journal import Journal
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.system import termination

_CLOSE_TIMEOUT_S = 5.0


def start(
    backend: Backend,
    blueprint: Blueprint,
    mode: AutoresetMode | None,
    recovery: Recovery,
    events: EventLog,
    resume: str | os.PathLike[str] | None,
) -> tuple[Driver, Callable[[], None]]:
    """Return the driver of a run, and the function that closes it. `resume`: the path of its journal, old or new."""
    expect("ClusterEnv", "resume", resume, str | os.PathLike[str] | None)
    if resume is None:
        driver = backend.start(blueprint, mode, recovery, events)
        return driver, lambda: driver.close(_CLOSE_TIMEOUT_S)
    if "journal" not in inspect.signature(backend.start).parameters:
        raise SpecError(f"ClusterEnv(resume=...): {type(backend).__name__}.start() takes no `journal`")
    ending, journal = Ending(), Journal(resume, events)
    try:
        if journal.is_resumed:
            text = f"resumed from {journal.path}: head {journal.starts} of this run; every slot begins a new episode"
            events.add(Event("resumed", text, tuple(range(blueprint.num_envs))), level=logging.INFO)
        driver = backend.start(blueprint, mode, recovery, events, journal=journal)
    except BaseException:
        journal.end(is_clean=not journal.is_resumed and not termination.is_terminated())
        raise

    def close() -> None:
        try:
            driver.close(_CLOSE_TIMEOUT_S)
        finally:  # last: while there are nodes, another head may need the journal to find them
            journal.end(is_clean=not ending.error() and not termination.is_terminated())

    return driver, close
