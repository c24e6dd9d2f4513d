"""The base of every backend over a network: its options, and how a run is started with them."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from clusterenv.arguments import check_fields, expect
from clusterenv.backends.launch.addresses import parse_advertise, parse_port
from clusterenv.errors import SpecError

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clusterenv.backends.contract import Jobs, Plan
    from clusterenv.driver import Driver
    from clusterenv.events import EventLog
    from clusterenv.recovery import Recovery
    from clusterenv.spec import Blueprint


@dataclass(frozen=True, kw_only=True)
class Remote(ABC):
    """A backend that starts node agents on other machines; derived classes say how, in `launch`.

    Args:
        nodes: number of nodes at the start.
        workers_per_node: environment processes on each machine.
        bind: the address or interface of this machine to listen on, IPv4 or IPv6. None: the address from which this
            machine reaches others; where it has no route, its only address that is not loopback.
        port: to listen on: a port, a range (low, high) of which the first free one is taken, or 0 for any free one.
        advertise: "host" or "host:port" that nodes dial, if it is not what the head listens on: a forwarded port, the
            host of the container that this process runs in, a Kubernetes Service.
        folder: where to make the run's own folder (mode 0700) of key files, one per node; it is removed at the end.
        owner_squashed: the file system of `folder` shows another owner than you for files that you make (NFS with
            root_squash or all_squash, owners that are mapped): accept it, and have nodes check the content of their key
            file instead. Whoever that file system takes for the same owner can read the keys (docs/security.md).
        start_timeout_s: how long to wait for the nodes; those that are lost meanwhile are started again.
        max_nodes: how many `envs.scale` may ask for. Every node has the workers of its own slots, and of those whose
            nodes are not there: with 2 nodes of at most 4, twice `workers_per_node`.
        min_nodes: begin when so many have come and no other did for 5 s; the rest may join later. None: all.
        threads_per_worker, preload: as in `Local`.
        other_infos: what to do with infos that are not plain data: "refuse", or send their "repr".
        heartbeat_s: how fast a lost node is noticed: the time between two beats, the silence after which a node counts
            as lost, and the lease after which a node without its head ends.
        move_after_s: a node that stays away for so long hands its slots to the others; None: they wait for it.
        oversubscribe: allow more workers than CPUs that a node may use, by its affinity and control group quotas.
        allow_pickle: False: nodes get ids, plain arguments and weights, but no code (`clusterenv node --no-pickle`).
        heartbeat: deprecated; write `heartbeat_s`.
    """

    nodes: int = field(kw_only=False)
    workers_per_node: int = 1
    bind: str | None = None
    port: int | tuple[int, int] = 0
    advertise: str | None = None
    folder: str | os.PathLike[str] | None = None
    owner_squashed: bool = False
    start_timeout_s: float = 600.0
    min_nodes: int | None = None
    max_nodes: int | None = None
    threads_per_worker: int | None = 1
    preload: tuple[str, ...] = ()
    other_infos: Literal["refuse", "repr"] = "refuse"
    heartbeat_s: tuple[float, float, float] = (1.0, 10.0, 60.0)
    move_after_s: float | None = 30.0
    oversubscribe: bool = False
    allow_pickle: bool = True
    heartbeat: tuple[float, float, float] | None = None
    is_remote: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name, nodes = type(self).__name__, self.nodes
        parse_port(self.port, name)  # first: these name what they expect better than their annotations do
        parse_advertise(self.advertise, name)
        if self.heartbeat is not None:
            text = f"{name}(heartbeat=...) is deprecated: write heartbeat_s=..."
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "heartbeat_s", self.heartbeat)
            object.__setattr__(self, "heartbeat", None)
        check_fields(self)
        expect(name, "nodes", nodes, int, least=1)
        expect(name, "workers_per_node", self.workers_per_node, int, least=1)
        if self.min_nodes is not None and not 1 <= self.min_nodes <= nodes:
            raise SpecError(f"{name}(min_nodes={self.min_nodes}): between 1 and nodes={nodes}")
        if self.max_nodes is not None and self.max_nodes < nodes:
            raise SpecError(f"{name}(max_nodes={self.max_nodes}): at least nodes={nodes}")

    @abstractmethod
    def launch(self, plan: Plan) -> Jobs:
        """Return the jobs of a run, none of which is started yet: see `contract.ClusterBackend`."""

    def resolved(self, num_envs: int) -> Remote:
        """Return this backend with those options filled in that depend on the machine or on `num_envs`."""
        return self

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Driver:
        from clusterenv.backends import cluster

        return cluster.start(self.resolved(blueprint.num_envs), blueprint, mode, recovery, events)
