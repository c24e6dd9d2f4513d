"""`Local`: worker processes on this machine, over shared memory, without any network."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gymnasium.vector import AutoresetMode

from clusterenv.arguments import check_fields, expect
from clusterenv.backends.remote import Remote
from clusterenv.driver import Pool
from clusterenv.errors import SpecError
from clusterenv.events import EventLog, emit
from clusterenv.executors.inline import InlineCrew
from clusterenv.executors.processes import ProcessCrew
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.system.cpus import cpu_limit, usable_cores
from clusterenv.worker.setup import WorkerConfig

if TYPE_CHECKING:
    from clusterenv.backends.cluster import Plan

__all__ = ["Local"]

_SPIN_S = 600e-6


@dataclass(frozen=True)
class Local:
    """Processes of this machine.

    Args:
        workers: how many; None for one per CPU that this process may use, by its affinity and the quotas of its
            control groups (1.9 CPUs start 1 worker). 0 runs the environments in the calling
            process, without timeouts, so that a breakpoint in environment code works.
        threads_per_worker: what numerical libraries in a worker may use (OMP_NUM_THREADS and its kin);
            None leaves the environment variables alone.
        preload: modules that are imported once, before the workers are forked from that process, so that they
            share it. `("torch",)` pays for many workers that run a torch policy; one per core hardly notice.
        network: run `nodes` node agents on this machine and talk to them over TCP, as to a cluster: to try that path.
        nodes: how many, with `workers / nodes` workers each.
        max_nodes, heartbeat, move_after_s, allow_pickle: as in `Manual`.

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
    network: bool = False
    nodes: int = 1
    max_nodes: int | None = None
    heartbeat: tuple[float, float, float] = (1.0, 10.0, 60.0)
    move_after_s: float | None = 30.0
    allow_pickle: bool = True

    @property
    def is_remote(self) -> bool:
        return self.network

    def __post_init__(self) -> None:
        check_fields(self)
        if self.nodes < 1 or (self.nodes > 1 and not self.network):
            raise SpecError(f"Local(nodes={self.nodes}): several nodes on this machine need network=True")
        if self.max_nodes is not None and (not self.network or self.max_nodes < self.nodes):
            raise SpecError(f"Local(max_nodes={self.max_nodes}): at least nodes={self.nodes}, and network=True")
        if not self.allow_pickle and not self.network:
            raise SpecError("Local(allow_pickle=False) is about nodes: it needs network=True")
        if self.network and self.workers == 0:
            raise SpecError("Local(network=True, workers=0): nodes have worker processes, at least one each")
        expect("Local", "workers", self.workers, int | None, least=0)
        expect("Local", "threads_per_worker", self.threads_per_worker, int | None, least=1)

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Pool:
        if self.network:
            return self._start_network(blueprint, mode, recovery, events)
        n = blueprint.num_envs
        if self.workers == 0:
            inline = InlineCrew(blueprint, mode, recovery.check)
            slots = [list(range(n))]
            return Pool(inline, slots, mode, recovery, blueprint=blueprint, events=events)
        workers = self.workers or min(usable_cores(), n)
        if workers > n:
            emit(
                logging.WARNING,
                f"Local(workers={workers}): {n} environments need {n} workers at most; using {n}",
            )
            workers = n
        slots_of = split(n, workers)
        # Waiting awake pays only while every worker has a core of its own.
        spin_s = _SPIN_S if workers <= cpu_limit() else 0.0
        config = WorkerConfig(mode, recovery.check, self.threads_per_worker, tuple(self.preload), spin_s=spin_s)
        crew = ProcessCrew(blueprint, slots_of, config)
        return Pool(crew, slots_of, mode, recovery, blueprint=blueprint, events=events)

    def _start_network(
        self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog
    ) -> Pool:
        from clusterenv.backends.agents import AgentProcesses

        workers = self.workers or self.nodes * max(1, min(usable_cores(), blueprint.num_envs) // self.nodes)
        if workers % self.nodes:
            raise SpecError(f"Local(workers={workers}, nodes={self.nodes}): every node has as many workers")
        remote = Remote(
            workers_per_node=workers // self.nodes,
            bind="127.0.0.1",
            start_timeout_s=60.0,
            max_nodes=self.max_nodes,
            threads_per_worker=self.threads_per_worker,
            preload=self.preload,
            heartbeat=self.heartbeat,
            move_after_s=self.move_after_s,
            oversubscribe=True,
            allow_pickle=self.allow_pickle,
        )

        def launch(plan: Plan) -> AgentProcesses:
            return AgentProcesses(plan, dead_after_s=self.heartbeat[1])

        return remote.start_with(self.nodes, launch, blueprint, mode, recovery, events)


def split(num_envs: int, workers: int) -> list[list[int]]:
    """Consecutive slots per worker, sizes differing by one at most."""
    bounds = [num_envs * w // workers for w in range(workers + 1)]
    return [list(range(bounds[w], bounds[w + 1])) for w in range(workers)]
