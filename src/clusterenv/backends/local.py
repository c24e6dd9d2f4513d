"""`Local`: run worker processes on this machine, over shared memory, without a network."""

from __future__ import annotations

import logging
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from gymnasium.vector import AutoresetMode

from clusterenv.arguments import check_fields, expect
from clusterenv.driver import Driver
from clusterenv.engine.requests import Requests
from clusterenv.errors import SpecError
from clusterenv.events import EventLog, emit
from clusterenv.executors.inline import InlineExecutor
from clusterenv.executors.processes import ProcessExecutor
from clusterenv.journal import Journal
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.system.cpus import cpu_limit, usable_cores
from clusterenv.worker.setup import WorkerConfig

_SPIN_S = 600e-6

_OF_NODES = ("nodes", "max_nodes", "heartbeat", "move_after_s", "allow_pickle")
"""Arguments that were for `Local(network=True)`, which is `Loopback` now."""


@dataclass(frozen=True)
class Local:
    """Run environments in processes on this machine.

    Args:
        workers: number of processes; None: one per CPU that this process may use, by its affinity and the quotas of
            its control groups (1.9 CPUs start 1 worker). 0 runs the environments in the calling process, without
            timeouts, so that a breakpoint in environment code works.
        threads_per_worker: threads that numerical libraries in a worker may use (OMP_NUM_THREADS and the like);
            None leaves the environment variables alone.
        preload: modules to import once, in the process from which the workers are forked, so that workers share
            their memory. `("torch",)` pays off for many workers that run a torch policy, not for one per core.
        network: deprecated; write `Loopback(nodes=...)`.

    Example:
        >>> import clusterenv as ce
        >>> envs = ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2))
        >>> envs.reset(seed=1)[0].shape
        (4, 4)
        >>> envs.close()
    """

    workers: int | None = None
    threads_per_worker: int | None = 1
    preload: tuple[str, ...] = ()
    network: InitVar[bool] = False
    is_remote: ClassVar[bool] = False
    allow_pickle: ClassVar[bool] = True

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return a `Loopback` if an older script passes `network=True`."""
        options |= zip(("workers", "threads_per_worker", "preload", "network"), args, strict=False)
        if options.pop("network", False):
            from clusterenv.backends.loopback import from_local

            return from_local(options)
        found = [name for name in _OF_NODES if name in options]
        if found:
            raise SpecError(f"Local({found[0]}=...): Local has no nodes; use Loopback(nodes=...)")
        return super().__new__(cls)

    def __post_init__(self, network: bool) -> None:
        check_fields(self)
        expect("Local", "workers", self.workers, int | None, least=0)
        expect("Local", "threads_per_worker", self.threads_per_worker, int | None, least=1)

    def start(
        self,
        blueprint: Blueprint,
        mode: AutoresetMode | None,
        recovery: Recovery,
        events: EventLog,
        journal: Journal | None = None,
    ) -> Driver:
        n = blueprint.num_envs
        if self.workers == 0:
            inline = InlineExecutor(blueprint, mode, recovery.check)
            slots = split(n, 1)
            return Driver(inline, Requests(slots), mode, recovery, blueprint=blueprint, events=events, journal=journal)
        workers = self.workers or min(usable_cores(), n)
        if workers > n:
            emit(logging.WARNING, f"Local(workers={workers}): {n} environments need {n} workers at most; using {n}")
            workers = n
        slots_of = split(n, workers)
        # Spinning pays off only if every worker has its own core.
        spin_s = _SPIN_S if workers <= cpu_limit() else 0.0
        config = WorkerConfig(mode, recovery.check, self.threads_per_worker, tuple(self.preload), spin_s=spin_s)
        executor = ProcessExecutor(blueprint, slots_of, config)
        return Driver(executor, Requests(slots_of), mode, recovery, blueprint=blueprint, events=events, journal=journal)


def split(num_envs: int, workers: int) -> list[list[int]]:
    """Return consecutive slots for each worker; the counts differ by at most one."""
    bounds = [num_envs * w // workers for w in range(workers + 1)]
    return [list(range(bounds[w], bounds[w + 1])) for w in range(workers)]
