"""`Remote`: the base class of every backend over a network, with the options that they share."""

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
    from clusterenv.journal import Journal
    from clusterenv.recovery import Recovery
    from clusterenv.spec import Blueprint


@dataclass(frozen=True, kw_only=True)
class Remote(ABC):
    """A backend that starts node agents on other machines; subclasses implement `launch`.

    Args:
        nodes: number of nodes at the start.
        workers_per_node: environment processes on each machine.
        bind: the address or interface of this machine to listen on, IPv4 or IPv6. None: the address from which this
            machine reaches others; if it has no route, its only address that is not loopback.
        port: the port to listen on, a range (low, high) of which the first free port is used, or 0 for any free port.
        advertise: the "host" or "host:port" that nodes dial, if it differs from what the head listens on: a forwarded
            port, the host of the container in which this process runs, a Kubernetes Service.
        folder: where to create the run's own folder (mode 0700) of key files, one per node; it is removed at the end.
        owner_squashed: the file system of `folder` shows another owner than you for files that you create (NFS with
            root_squash or all_squash, mapped owners): accept that, and let nodes check the content of their key file
            instead. Users that this file system maps to the same owner can read the keys (docs/security.md).
        start_timeout_s: how long to wait for the nodes; those lost during this time are started again.
        max_nodes: the limit for `envs.scale`. Every node runs the workers of its own slots, and of those whose nodes
            are absent: with 2 of at most 4 nodes, twice `workers_per_node`.
        min_nodes: begin when this many nodes have joined and no other did for 5 s; the rest may join later. None: all.
        threads_per_worker, preload: as in `Local`.
        compress: how the observations of fragments are sent: "auto" compresses them, without loss, where they are
            sent sooner that way; True always, unless that saves less than a fifth; False never (docs/cluster.md).
        other_infos: what to do with infos that are not plain data: "refuse", or send their "repr".
        heartbeat_s: how fast a lost node is noticed: the time between two heartbeats, the silence after which a node
            counts as lost, and the lease after which a node without its head ends.
        move_after_s: move the slots of a lost node to the other nodes after this time; None: wait for the node.
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
    compress: Literal["auto"] | bool = "auto"
    heartbeat_s: tuple[float, float, float] = (1.0, 10.0, 60.0)
    move_after_s: float | None = 30.0
    oversubscribe: bool = False
    allow_pickle: bool = True
    heartbeat: tuple[float, float, float] | None = None
    is_remote: ClassVar[bool] = True
    can_reattach: ClassVar[bool] = False
    """Whether nodes started by an earlier head can join the next one; otherwise they are ended and new ones started."""

    def __post_init__(self) -> None:
        name, nodes = type(self).__name__, self.nodes
        parse_port(self.port, name)  # before `check_fields`: their error messages are more precise
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
            raise SpecError(f"{name}(min_nodes={self.min_nodes}): must be between 1 and nodes={nodes}")
        if self.max_nodes is not None and self.max_nodes < nodes:
            raise SpecError(f"{name}(max_nodes={self.max_nodes}): must be at least nodes={nodes}")

    @abstractmethod
    def launch(self, plan: Plan) -> Jobs:
        """Return the jobs of a run without starting any: see `contract.ClusterBackend`."""

    def resolved(self, num_envs: int) -> Remote:
        """Return this backend with the options filled in that depend on the machine or on `num_envs`."""
        return self

    def start(
        self,
        blueprint: Blueprint,
        mode: AutoresetMode | None,
        recovery: Recovery,
        events: EventLog,
        journal: Journal | None = None,
    ) -> Driver:
        from clusterenv.backends import cluster

        return cluster.start(self.resolved(blueprint.num_envs), blueprint, mode, recovery, events, journal)
