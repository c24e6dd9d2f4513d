"""Invariants of the head that hold between any two events."""

from __future__ import annotations

from typing import Any

import numpy as np

from clusterenv.engine.collecting.fragments import FragmentState
from clusterenv.engine.inputs import WeightsHeld
from clusterenv.engine.requests import Kind
from clusterenv.engine.slots import Env
from clusterenv.engine.workers import WorkerState
from simulation.world import World

__all__ = ["check_engine", "check_size"]


def check_engine(world: World, driver: Any) -> None:
    """Check that every awaited row has a request or rebuild that brings it, and every open request an owner."""
    rows, slots, requests, workers = driver.rows, driver._slots, driver.requests, driver.workers
    awaited, ready, lost = rows.awaited, rows.ready, rows.is_loss
    if (ready & ~awaited).any():
        world.fail(f"rows of slots {np.flatnonzero(ready & ~awaited)} are ready, and nobody waits for them")
    if (lost & ~ready).any():
        world.fail(f"losses of slots {np.flatnonzero(lost & ~ready)} that are not ready")
    asked: dict[int, set[Kind]] = {}
    count = 0
    for request in requests:
        count += 1
        if workers[request.worker].state is WorkerState.ABSENT:
            world.fail(f"{request.kind} of worker {request.worker} is open, and it is absent")
        for slot in request.slots:
            asked.setdefault(slot, set()).add(request.kind)
    if count != requests.count:
        world.fail(f"{requests.count} requests are counted, {count} are open")
    heard = {worker for worker, _ in driver._inbox}
    nobody: set[Kind] = set()
    for slot in np.flatnonzero(awaited & ~ready).tolist():
        env, kinds = slots.env(slot), asked.get(slot, nobody)
        is_owned = env in (Env.DUE, Env.REBUILDING) or Kind.STEP in kinds or Kind.RESET in kinds
        if not is_owned and workers.of_slot(slot).index not in heard:
            world.fail(f"the row of slot {slot} ({env}) is awaited, and nobody brings it")
    for slot, record in slots.records.items():
        if record.env is Env.REBUILDING and Kind.REBUILD not in asked.get(slot, nobody):
            world.fail(f"slot {slot} is being rebuilt, and nobody was asked to")
    if driver.executor.nodes is not None:
        _check_transfers(world, driver)
    for fragment in driver.collecting.fragments:
        if fragment.state is FragmentState.RUNNING and requests.get(fragment.worker, fragment.number) is None:
            world.fail(f"the fragment {fragment.number} of worker {fragment.worker} runs, and nobody was asked to")


def _check_transfers(world: World, driver: Any) -> None:
    """Check that the weights that the head considers in transit are in transit."""
    cluster = driver.executor
    said = {message.number for _, message in (*cluster.said, *driver._inbox) if isinstance(message, WeightsHeld)}
    for machine in driver.weights:
        node = cluster._nodes[machine.node]
        if node.is_here and node.session == machine.session and not driver._inbox:
            coming = {transfer.weights.number for transfer in node.coming}
            lost = set(machine.transfers) - coming - said
            if lost:
                world.fail(f"weights {sorted(lost)} are taken to be on their way to node {machine.node}")


def check_size(world: World, driver: Any) -> None:
    """Check that no ledger grows without bound; called between two calls of the user."""
    num_envs, num_workers = driver.num_envs, len(driver.slots_of)
    rows = driver.rows
    sizes = {
        "open requests": (driver.requests.count, 12 * num_workers),
        "records of slots": (len(driver._slots.records), num_envs),
        "awaited resets": (len(rows.resetting), num_envs),
        "losses to report": (len(rows._lost_rows), num_envs),
        "infos": (len(rows._columns), 4 * num_envs),
        "objects": (len(rows._next_objects), num_envs),
        "instructions": (len(driver._state.out), 0),
        "errors": (len(driver._state.errors), 0),
        "fragments": (sum(1 for _ in driver.collecting.fragments), 5 * num_workers),
    }
    for number, machine in enumerate(driver.weights):
        sizes[f"transfers of machine {number}"] = (len(machine.transfers), 3)
        sizes[f"places of machine {number}"] = (len(machine._places), 6)
        readers = sum(len(place.readers) for place in machine._places)
        sizes[f"readers of machine {number}"] = (readers, 3 * num_workers)
    for name, (size, most) in sizes.items():
        if size > most:
            world.fail(f"{size} {name}, where {most} are the most that make sense")
