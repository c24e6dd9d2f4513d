"""`Manual`: node agents that you start yourself, with one command per machine. For two desktops, or any scheduler."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gymnasium.vector import AutoresetMode

from clusterenv.errors import SpecError
from clusterenv.events import EventLog
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint

if TYPE_CHECKING:
    from clusterenv.backends.network import Plan
    from clusterenv.pool import Pool

__all__ = ["Manual"]


@dataclass(frozen=True)
class Manual:
    """Prints one command per machine, and waits until all have joined.

    Args:
        nodes: how many machines.
        workers_per_node: environment processes on each.
        bind: the address or interface of this machine that nodes can dial; None: the one that leads outside.
        port: 0 for any that is free.
        folder: where to make the run's own folder (mode 0700) of key files, one per node; it is removed at the end.
        start_timeout_s: how long to wait for the nodes.
        other_infos: what to do with infos that are not plain data: "refuse", or send their "repr".
        heartbeat: tune how fast a lost node is noticed (seconds): beat, silence, lease of a node on its head.
        move_after_s: a node that stays away for so long hands its slots to the others; None: they wait for it.
        oversubscribe: allow more workers than cores on a node.
        allow_pickle: False: nodes get ids, plain arguments and weights, but no code (`clusterenv node --no-pickle`).
    """

    nodes: int
    workers_per_node: int = 1
    bind: str | None = None
    port: int = 0
    folder: str | None = None
    start_timeout_s: float = 600.0
    threads_per_worker: int | None = 1
    preload: tuple[str, ...] = ()
    other_infos: Literal["refuse", "repr"] = "refuse"
    heartbeat: tuple[float, float, float] = field(default=(1.0, 10.0, 60.0))
    move_after_s: float | None = 30.0
    oversubscribe: bool = False
    allow_pickle: bool = True
    is_remote = True

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.workers_per_node < 1:
            raise SpecError(f"Manual(nodes={self.nodes}, workers_per_node={self.workers_per_node}): 1 or more")

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Pool:
        from clusterenv.backends import network
        from clusterenv.head.head import Timing

        cluster = network.Cluster(
            self.nodes,
            self.workers_per_node,
            network.address_of(self.bind),
            self.port,
            self.start_timeout_s,
            self.threads_per_worker,
            self.preload,
            Timing(*self.heartbeat, self.move_after_s),
            self.other_infos,
            None if self.folder is None else Path(self.folder),
            self.oversubscribe,
            self.allow_pickle,
        )
        return network.start(cluster, _ByHand, blueprint, mode, recovery, events)


class _ByHand:
    """`Jobs` that the user runs."""

    def __init__(self, plan: Plan) -> None:
        lines = [" ".join(["clusterenv node --join", path.name, *plan.options]) for path in plan.files]
        text = f"Copy each key file from {plan.folder} to its machine (scp keeps it private), and start there:\n"
        for i, (path, line) in enumerate(zip(plan.files, lines, strict=True)):
            text += f"  node {i}: {line}    # {path}\n"
        sys.stderr.write(text)
        sys.stderr.flush()

    def ended(self) -> dict[int, str]:
        return {}  # nobody knows

    def replace(self, node: int) -> None:
        sys.stderr.write(f"clusterenv: node {node} is gone: start it again with the same command\n")

    def log_tail(self, node: int) -> str:
        return "(in the terminal where it was started)"

    def stop(self) -> None:
        return None
