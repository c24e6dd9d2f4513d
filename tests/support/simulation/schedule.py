"""Run one schedule from a seed or from a list of draws, and shorten failing ones."""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

import clusterenv.env as env_module
from clusterenv.backends.local import split
from clusterenv.driver import Driver
from clusterenv.engine.requests import Requests
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.system import interrupts
from simulation import program as programs
from simulation.choices import Choices, shrink, trimmed
from simulation.clock import virtual_time
from simulation.invariants import check_engine
from simulation.nodes import SimulatedCluster
from simulation.processes import SimulatedExecutor
from simulation.profiles import PROFILES
from simulation.world import FAULTS, Failure, World

__all__ = ["Outcome", "opened", "run", "shortest", "step_interrupted"]

NUM_EVENTS = 220
MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
RATES = {
    "raise": 0.02,
    "raise in reset": 0.0,
    "raise_after": 0.02,
    "die": 0.02,
    "hang": 0.01,
    "nan": 0.02,
    "slow": 0.1,
    "kill": 0.04,
    "interrupt": 0.01,
    "part": 0.2,
    "late": 0.1,
    "node": 0.03,
    "double": 0.1,
}


@dataclass
class Outcome:
    seed: int | None
    choices: list[int]
    failure: str | None
    """The broken rule, or None."""
    num_events: int
    counts: dict[str, int]
    trace: list[str] = field(default_factory=list)


class _Backend:
    is_remote = False
    allow_pickle = True

    def __init__(self, world: World, workers: int, nodes: int) -> None:
        self._world, self._workers, self._nodes = world, workers, nodes

    def start(self, blueprint: Any, mode: Any, recovery: Any, events: Any) -> Driver:
        world, workers = self._world, self._workers
        slots_of = split(blueprint.num_envs, workers)
        executor: SimulatedExecutor
        shard_of = None
        if self._nodes:
            shard_of = [worker * self._nodes // workers for worker in range(workers)]
            invited = 1 + world.choices.draw(self._nodes)
            executor = SimulatedCluster(world, slots_of, mode, blueprint.is_vector, shard_of, invited)
        else:
            executor = SimulatedExecutor(world, slots_of, mode, blueprint.is_vector)
        driver = Driver(
            executor, Requests(slots_of), mode, recovery, blueprint=blueprint, events=events, node_of=shard_of
        )
        executor.on_wait = lambda: check_engine(world, driver)
        return driver


@contextmanager
def prepared(world: World) -> Iterator[None]:
    """Make the package use the world's clock, and its environments without pickling them; silence the logs."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    plan, env_module.blueprint = env_module.blueprint, _plan
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: no Ctrl-C would be simulated
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with virtual_time(world.clock):
            yield
    finally:
        env_module.blueprint = plan
        interrupts.STATE.pending = False
        logging.disable(level)


@contextmanager
def opened(
    num_envs: int,
    workers: int,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    recovery: Recovery | None = None,
    is_vector: bool = False,
) -> Iterator[tuple[World, Any]]:
    """Open environments on a simulated machine with no faults but those that the test plans."""
    world = World(Choices(recorded=[]), planned=lambda fault: False)
    with prepared(world):
        backend = _Backend(world, workers, 0)
        env = "vector" if is_vector else None
        envs = env_module.ClusterEnv(env, num_envs, backend=backend, autoreset_mode=mode, recovery=recovery)
        try:
            yield world, envs
        finally:
            world.planned = lambda fault: False
            envs.close()


def step_interrupted(envs: Any) -> None:
    """Step all environments, and press Ctrl-C when the first worker has answered."""
    executor = envs._driver.executor
    run_worker = executor.run

    def run_and_press(index: int) -> None:
        run_worker(index)
        interrupts.STATE.pending = True

    executor.run = run_and_press
    try:
        envs.step(np.zeros(envs.num_envs, np.int64))
    except KeyboardInterrupt:
        return
    finally:
        executor.run = run_worker
    raise AssertionError("Ctrl-C did not end the step")


def run(
    seed: int | None = None,
    recorded: Sequence[int] | None = None,
    num_events: int = NUM_EVENTS,
    keep_trace: bool = False,
) -> Outcome:
    """Run one schedule."""
    world = World(Choices(seed or 0, recorded), trace=[] if keep_trace else None)
    failure = None
    try:
        with prepared(world):
            _run(world, num_events)
    except Failure as broken:
        failure = str(broken)
    except (KeyboardInterrupt, Exception) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{world.call}: {type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"
    return Outcome(seed, world.choices.taken, failure, world.num_events, world.counts, world.trace or [])


def _plan(env: Any, num_envs: Any, env_kwargs: Any, is_remote: bool, allow_pickle: bool) -> Blueprint:
    return Blueprint(num_envs, b"", env == "vector", None)


def _run(world: World, num_events: int) -> None:
    draw = world.choices.draw
    mode = MODES[draw(3)]
    profile = PROFILES[draw(len(PROFILES))]
    workers = 2 + draw(2) if profile.script else 1 + draw(3)
    num_envs = workers * (1 + draw(2)) + draw(2)
    nodes = min(workers, draw(3)) if draw(2) else 0
    is_vector = not profile.script and draw(4) == 3
    world.steps_rows = is_vector and draw(2) == 1
    if profile.rates is None:
        for fault in FAULTS:
            world.rates[fault] = (0.0, 0.0, RATES[fault], RATES[fault] * 3)[draw(4)]
    else:
        world.rates.update(profile.rates)
    world.rates_in = profile.rates_in
    recovery = Recovery(
        on_error=profile.on_error or ("restart", "restart", "restart", "raise")[draw(4)],
        init_timeout_s=5.0,
        reset_timeout_s=5.0,
        step_timeout_s=5.0,
        warn_after_s=(None, 1.0)[draw(2)],
        recovery_timeout_s=(60.0, 8.0)[draw(2)],
        max_restarts=1000 if profile.rates_in else (1000, 3)[draw(2)],
        restart_window_s=20.0,
        backoff_s=((0.1, 2.0), (1.0, 8.0))[draw(2)],
    )
    world.calm = True
    envs = env_module.ClusterEnv(
        "vector" if is_vector else None,
        num_envs,
        backend=_Backend(world, workers, nodes),
        autoreset_mode=mode,
        recovery=recovery,
    )
    world.calm = False
    envs._driver.set_seed_base([1 << 64] * num_envs)  # by default it is different in each run
    try:
        program = programs.Program(world, envs, recovery)
        program.profile = profile
        program.run(num_events)
    finally:
        interrupts.STATE.pending = False
        world.calm = True
        world.polls = 0
        envs.close()


def shortest(outcome: Outcome, attempts: int = 400) -> Outcome:
    """Return a short schedule that breaks the same rule, with its trace."""
    assert outcome.failure is not None
    kind = _kind(outcome.failure)

    def fails(choices: list[int]) -> bool:
        found = run(recorded=choices)
        return found.failure is not None and _kind(found.failure) == kind

    short = run(recorded=shrink(outcome.choices, fails, attempts), keep_trace=True)
    short.choices = trimmed(short.choices)
    return short


def _kind(failure: str) -> str:
    """Return the failure text without numbers."""
    return "".join(c for c in failure.partition(": ")[2] if not c.isdigit() and c not in ".,")[:60]
