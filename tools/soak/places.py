"""Where a soak runs: machines that are network namespaces, or, without root, processes over loopback."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv.testing import chaos
from clusterenv.testing.chaos import Fault, Kind

HEARTBEAT_S = (0.5, 3.0, 10.0)
MOVE_AFTER_S = 8.0
COMMON = chaos.WORKER + chaos.ENVIRONMENT + chaos.NODE + chaos.LINK + chaos.NETWORK
_SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"


@dataclass(frozen=True)
class Place:
    name: str
    backend: Any
    kinds: tuple[Kind, ...]
    """What can go wrong here."""
    acts: Callable[[], dict[Kind, Any]]
    """How to do what needs more than processes; once the backend runs."""


def options(workers: int, nodes: int) -> dict[str, Any]:
    """Return the options of a backend with so many workers over so many nodes, one of which has two shares."""
    each = max(1, workers // (nodes + 1))
    return {
        "workers_per_node": each,
        "max_nodes": workers // each,
        "heartbeat_s": HEARTBEAT_S,
        "move_after_s": MOVE_AFTER_S,
        "start_timeout_s": 120.0,
        "oversubscribe": True,
    }


@contextlib.contextmanager
def place(workers: int, nodes: int, use_namespaces: bool | None = None) -> Iterator[Place]:
    """Make the machines. `use_namespaces`: None: where this process may."""
    if use_namespaces is None:
        use_namespaces = os.geteuid() == 0 and os.environ.get("CLUSTERENV_NO_NETNS") != "1"
    if not use_namespaces:
        backend = chaos.LinkedLoopback(nodes=nodes, **options(workers, nodes))
        yield Place("loopback", backend, COMMON, lambda: backend.acts)
        return
    cluster, netns = _support("namespace_cluster"), _support("netns")
    with netns.Network(nodes=nodes) as net, contextlib.ExitStack() as stack:
        namespaces = cluster.Namespaces(
            net, through_proxy="each", dead_after_s=HEARTBEAT_S[1], **options(workers, nodes)
        )
        stack.callback(lambda: [proxy.close() for proxy in namespaces.proxies])

        def partition(fault: Fault) -> tuple[float, Callable[[], None]]:
            host = net.nodes[fault.random % len(net.nodes)]
            host.link_down()
            return fault.amount, host.link_up

        def acts() -> dict[Kind, Any]:
            plan = namespaces.jobs[0].plan
            strangers = chaos.stranger_acts(plan, net.nodes[0].popen)
            return {**chaos.link_acts(namespaces.proxies), **strangers, Kind.PARTITION: partition}

        yield Place(f"{nodes} network namespaces", namespaces, (*COMMON, Kind.PARTITION), acts)


def _support(name: str) -> Any:
    """Import a helper of the tests: the namespaces are theirs."""
    if str(_SUPPORT) not in sys.path:
        sys.path.insert(0, str(_SUPPORT))
    return importlib.import_module(name)
