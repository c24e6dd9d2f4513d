"""Machines for a soak: network namespaces, or, without root, processes over loopback."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv.testing import chaos
from clusterenv.testing.chaos import Fault, Kind, lying

HEARTBEAT_S = (0.5, 3.0, 10.0)
MOVE_AFTER_S = 8.0
COMMON = chaos.WORKER + chaos.ENVIRONMENT + chaos.NODE + chaos.LINK + chaos.NETWORK
_SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"


@dataclass(frozen=True)
class Place:
    name: str
    backend: Any
    kinds: tuple[Kind, ...]
    """Faults that are possible here."""
    acts: Callable[[], dict[Kind, Any]]
    """Returns functions for faults that need more than processes; call it once the backend runs."""
    lies: Path | None = None
    """Folder in which nodes look for requested lies; None: they do not."""


def options(workers: int, nodes: int) -> dict[str, Any]:
    """Return backend options for these numbers; if `workers` is no multiple of `nodes`, one node has two shares."""
    is_even = workers % nodes == 0
    each = workers // nodes if is_even else max(1, workers // (nodes + 1))
    return {
        "workers_per_node": each,
        "max_nodes": None if is_even else workers // each,
        "heartbeat_s": HEARTBEAT_S,
        "move_after_s": MOVE_AFTER_S,
        "start_timeout_s": 120.0,
        "oversubscribe": True,
    }


@contextlib.contextmanager
def place(workers: int, nodes: int, use_namespaces: bool | None = None) -> Iterator[Place]:
    """Make the machines; `use_namespaces=None`: namespaces if this process may create them."""
    if use_namespaces is None:
        use_namespaces = os.geteuid() == 0 and os.environ.get("CLUSTERENV_NO_NETNS") != "1"
    if not use_namespaces:
        backend = chaos.LinkedLoopback(nodes=nodes, **options(workers, nodes))
        yield Place("loopback", backend, COMMON, lambda: backend.acts)
        return
    with _namespaces(workers, nodes) as found:
        yield found


@contextlib.contextmanager
def _namespaces(workers: int, nodes: int) -> Iterator[Place]:
    cluster, netns = _support("namespace_cluster"), _support("netns")
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(netns.Network(nodes=nodes))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = stack.enter_context(_small_disk(scratch / "disk"))
        clock = _clock(scratch)
        if clock is not None:
            stack.enter_context(clock.applied())
        stack.enter_context(_variable(lying.VARIABLE, str(scratch)))
        backend = cluster.Namespaces(
            net,
            through_proxy="each",
            dead_after_s=HEARTBEAT_S[1],
            program=(lying.__file__,),
            folder=disk,
            **options(workers, nodes),
        )
        stack.callback(lambda: [proxy.close() for proxy in backend.proxies])

        def partition(fault: Fault) -> tuple[float, Callable[[], None]]:
            host = net.nodes[fault.random % len(net.nodes)]
            host.link_down()
            return fault.amount, host.link_up

        def acts() -> dict[Kind, Any]:
            return {
                **chaos.link_acts(backend.proxies),
                **chaos.stranger_acts(backend.jobs[0].plan, net.nodes[0].popen),
                **lying.lie_acts(scratch, range(nodes)),
                **chaos.disk_acts(disk),
                **(clock.acts if clock is not None else {}),
                Kind.PARTITION: partition,
            }

        kinds = (*COMMON, Kind.PARTITION, Kind.LIE, Kind.DISK_FULL, *((Kind.CLOCK,) if clock is not None else ()))
        yield Place(f"{nodes} network namespaces", backend, kinds, acts, scratch)


@contextlib.contextmanager
def _small_disk(path: Path) -> Iterator[Path]:
    """Mount a small separate file system for keys and logs, which faults can fill."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _clock(folder: Path) -> chaos.Clock | None:
    with contextlib.suppress(FileNotFoundError):
        return chaos.Clock(folder)
    return None


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _support(name: str) -> Any:
    """Import a helper from tests/support, which has the network namespaces."""
    if str(_SUPPORT) not in sys.path:
        sys.path.insert(0, str(_SUPPORT))
    return importlib.import_module(name)
