"""The start of a run: every worker makes its environments, before there is an engine to look after them."""

from __future__ import annotations

import time

from clusterenv.engine.failures import env_error, last_words
from clusterenv.engine.health import Health
from clusterenv.engine.incarnations import Lives
from clusterenv.engine.inputs import Exit, Placed, Stack
from clusterenv.engine.instructions import Kill
from clusterenv.engine.requests import Kind, Requests
from clusterenv.engine.weights import WeightLedger
from clusterenv.engine.workers import Workers
from clusterenv.errors import WorkerLostError
from clusterenv.events import EventLog
from clusterenv.executors.contract import Crew
from clusterenv.wire.requests import Build, Built

__all__ = ["build"]

_WAIT_S = 0.25
"""How often a wait looks whether anybody hangs."""


def build(
    executor: Crew,
    workers: Workers,
    requests: Requests,
    weights: WeightLedger,
    health: Health,
    lives: Lives,
    events: EventLog,
) -> dict[int, Built]:
    """Have every worker make its environments; returns what they are, by worker. Raises for the first that fails."""
    for worker in workers:
        executor.start(worker.index)
        seeds = [lives.seed(slot) for slot in worker.slots]
        request = Build(requests.next_number(), worker.slots, seeds)
        worker.asked(time.monotonic())
        executor.send(worker.index, request, requests.open(worker.index, Kind.BUILD, worker.slots, request))
    built: dict[int, Built] = {}
    while len(built) < len(workers):
        for index, message in executor.wait(_WAIT_S):
            if isinstance(message, Placed):
                weights.placed(*message)
            elif isinstance(message, Stack):
                event = health.long_call(index, message.text, executor.progress(index), time.monotonic())
                if event is not None:
                    events.add(event)
            elif isinstance(message, Exit):
                raise WorkerLostError(
                    f"worker {index} {workers[index].reason or message.reason} while it made the environment of slot "
                    f"{executor.progress(index)[0]}{last_words(message.tail)}",
                    slots=tuple(workers[index].slots),
                )
            elif message.faults:
                raise env_error(message.faults[0], workers.where(index))
            else:
                requests.close_all(index)
                built[index] = message
        _watch(executor, health)
    return built


def _watch(executor: Crew, health: Health) -> None:
    """Look for workers that hang."""
    if executor.is_inline:
        return
    for index in health.watched():
        instruction = health.watch(index, executor.progress(index), time.monotonic())
        if isinstance(instruction, Kill):
            executor.kill(index)
        elif instruction is not None:
            executor.stack(index)
