"""The start of a run: make every worker build its environments, before there is an engine. Called by `Driver`."""

from __future__ import annotations

import time
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.engine.agreement import Agreed
from clusterenv.engine.collecting.weights import WeightLedger
from clusterenv.engine.failures import env_error, last_words
from clusterenv.engine.health import Health
from clusterenv.engine.incarnations import Incarnations
from clusterenv.engine.inputs import Cause, Exit, Placed, Stack
from clusterenv.engine.instructions import Kill
from clusterenv.engine.requests import Kind, Requests
from clusterenv.engine.workers import Worker, Workers
from clusterenv.errors import SpecError, WorkerLostError
from clusterenv.events import EventLog, emit_progress
from clusterenv.executors.contract import Executor
from clusterenv.memory.rows import Layout, make_layout
from clusterenv.wire.requests import Build, Built

__all__ = ["Building", "lay_out", "own_mode"]

_WAIT_S = 0.25
"""Interval between two checks for hung workers."""


class Building:
    """Build all environments, on workers that may still change their node."""

    def __init__(
        self, executor: Executor, workers: Workers, requests: Requests, weights: WeightLedger, health: Health
    ) -> None:
        self._executor = executor
        self._workers = workers
        self._requests = requests
        self._weights = weights
        self._health = health
        self._built: dict[int, Built] = {}

    def run(self, incarnations: Incarnations, events: EventLog, timeout_s: float) -> dict[int, Built]:
        """Make every worker build its environments. Return the answers by worker; raise for the first failure.

        `timeout_s`: how long a worker that lost its node may wait for another.
        """
        for worker in self._workers:
            self._start(worker, incarnations)
        while len(self._built) < len(self._workers):
            for worker in self._workers.absent():
                self._start_again(worker, incarnations, timeout_s)
            for index, message in self._executor.poll(_WAIT_S):
                self._heard(index, message, events)
            self._watch()
        return self._built

    def _start(self, worker: Worker, incarnations: Incarnations) -> None:
        self._executor.start(worker.index)
        seeds = [incarnations.seed(slot) for slot in worker.slots]
        numbers = [incarnations.numbers[slot] for slot in worker.slots]
        message = Build(self._requests.next_number(), worker.slots, seeds, incarnations=numbers)
        request = self._requests.open(worker.index, Kind.BUILD, worker.slots, message)
        worker.asked(time.monotonic())
        self._executor.send(worker.index, message, request)

    def _start_again(self, worker: Worker, incarnations: Incarnations, timeout_s: float) -> None:
        nodes = self._executor.nodes
        if nodes is None or nodes.can_start(worker.index):
            worker.started()
            self._start(worker, incarnations)
        elif time.monotonic() - worker.start_at_s > timeout_s:
            text = f"worker {worker.index} lost its node while environments were made, and got no other"
            raise WorkerLostError(f"{text} within recovery_timeout_s={timeout_s:g}", slots=tuple(worker.slots))

    def _heard(self, index: int, message: Any, events: EventLog) -> None:
        if isinstance(message, Placed):
            self._weights.placed(*message)
        elif isinstance(message, Stack):
            event = self._health.long_call(index, message.text, self._executor.progress(index), time.monotonic())
            if event is not None:
                events.add(event)
        elif isinstance(message, Exit):
            self._exited(self._workers[index], message)
        elif message.faults:
            raise env_error(message.faults[0], self._workers.where(index))
        else:
            self._requests.close_all(index)
            self._built[index] = message

    def _exited(self, worker: Worker, exit: Exit) -> None:
        if exit.cause is Cause.CRASHED:
            raise WorkerLostError(
                f"worker {worker.index} {worker.reason or exit.reason} while it made the environment of slot "
                f"{self._executor.progress(worker.index)[0]}{last_words(exit.tail)}",
                slots=tuple(worker.slots),
            )
        # It moves to its own node, which joined late, or its node is lost.
        self._requests.close_all(worker.index)
        self._built.pop(worker.index, None)
        worker.exited(time.monotonic())
        emit_progress(f"making environments: worker {worker.index} {exit.reason}; restarting it")

    def _watch(self) -> None:
        """Check for hung workers."""
        processes = self._executor.processes
        if processes is None:
            return
        for index in self._health.watched():
            instruction = self._health.watch(index, self._executor.progress(index), time.monotonic())
            if isinstance(instruction, Kill):
                processes.kill(index)
            elif instruction is not None:
                processes.stack(index)


def own_mode(agreed: Agreed, is_vector: bool) -> AutoresetMode:
    """Return the autoreset mode if the user gives none: a vector environment may declare its own."""
    own = agreed.metadata.get("autoreset_mode") if is_vector else None
    return own if isinstance(own, AutoresetMode) else AutoresetMode.NEXT_STEP


def lay_out(agreed: Agreed, num_envs: int, is_vector: bool) -> Layout:
    """Return the layout of the rows of these environments."""
    layout = make_layout(agreed.single_observation_space, agreed.single_action_space, num_envs, is_same=agreed.is_same)
    if is_vector and (not layout.actions_are_shared or any(leaf.dtype is None for leaf in layout.obs)):
        raise SpecError("Vector(fn) supports only spaces of a fixed size (no Text, Sequence, Graph)")
    return layout
