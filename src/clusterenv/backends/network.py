"""What every backend over a network shares: keys, a listening head, nodes that are awaited, a pool over them.

A backend brings `Jobs`: how node agents are started, looked after and ended. It sees no message.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gymnasium.vector import AutoresetMode

from clusterenv.backends.leftovers import note_head
from clusterenv.backends.local import split
from clusterenv.errors import SpecError, StartError
from clusterenv.events import EventLog, emit
from clusterenv.head.crew import RemoteCrew
from clusterenv.head.head import DEFAULT, Head, Timing
from clusterenv.pool import Pool
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.transport.keys import Joining, KeyPair, make_keys, private_folder, write_joining

__all__ = ["Cluster", "Jobs", "Plan", "address_of", "start"]

_SIOCGIFADDR = 0x8915

_OTHERS_S = 5.0
"""How long the last of `min_nodes` nodes waits for others before the run begins without them."""


@dataclass(frozen=True)
class Plan:
    """What a backend needs to start node agents."""

    run: str
    folder: Path
    files: tuple[Path, ...]
    """The key file of each node."""
    lease_s: float
    allow_pickle: bool
    nodes: int
    """So many are wanted at first, of those that have a key file."""

    def command(self, node: int) -> list[str]:
        """Starts the agent of this node on a machine that sees the same files."""
        return [sys.executable, "-m", "clusterenv", "node", "--join", str(self.files[node]), *self.options]

    @property
    def options(self) -> list[str]:
        return [] if self.allow_pickle else ["--no-pickle"]


class Jobs(Protocol):
    """The node agents of one run."""

    def ended(self) -> dict[int, str]:
        """Nodes whose agent is known to be over, and why. Called every half a second: must be quick."""
        ...

    def state(self, node: int) -> str:
        """What the scheduler says of a node that has not come yet ("PENDING (Resources)"); may be empty."""
        ...

    def replace(self, node: int) -> None:
        """Start this node, for the first time or again."""
        ...

    def drop(self, node: int) -> None:
        """It is not wanted any more, and was told so."""
        ...

    def log_tail(self, node: int) -> str:
        """The last words of a node, or where they are."""
        ...

    def stop(self) -> None:
        """Nothing may be left. Bounded, idempotent."""
        ...


@dataclass(frozen=True)
class Cluster:
    """Numbers that network backends have in common."""

    nodes: int
    workers_per_node: int
    bind: str
    port: int = 0
    start_timeout_s: float = 60.0
    threads_per_worker: int | None = 1
    preload: tuple[str, ...] = ()
    timing: Timing = DEFAULT
    other_infos: Literal["refuse", "repr"] = "refuse"
    folder: Path | None = None
    oversubscribe: bool = False
    """More workers than cores on a node are no mistake."""
    allow_pickle: bool = True
    min_nodes: int | None = None
    max_nodes: int | None = None


def start(
    cluster: Cluster,
    launch: Callable[[Plan], Jobs],
    blueprint: Blueprint,
    mode: AutoresetMode | None,
    recovery: Recovery,
    events: EventLog,
) -> Pool:
    """Listen, have node agents started, wait for them all, and make the pool."""
    most = cluster.max_nodes or cluster.nodes
    workers = most * cluster.workers_per_node
    if workers > blueprint.num_envs:
        raise SpecError(
            f"{most} nodes with {cluster.workers_per_node} workers each are {workers} workers for "
            f"{blueprint.num_envs} environments: ask for fewer"
        )
    run = secrets.token_hex(4)
    # A folder of the run's own, also below one that the user names: it is removed at the end.
    folder = private_folder((cluster.folder or Path(tempfile.gettempdir())) / f"clusterenv-{run}")
    note_head(folder, run)
    keys, node_keys = make_keys(), [make_keys() for _ in range(most)]
    running: list[Jobs] = []
    try:
        head = _listen(cluster, keys, node_keys, events, running)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise

    def stop() -> None:
        for jobs in running:
            jobs.stop()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        files = tuple(folder / f"node-{i}.key" for i in range(most))
        for i, (path, pair) in enumerate(zip(files, node_keys, strict=True)):
            write_joining(path, Joining(run, i, head.address, keys.public, pair.public, pair.secret))
        running.append(launch(Plan(run, folder, files, cluster.timing.lease_s, cluster.allow_pickle, cluster.nodes)))
        _await(head, running[0], cluster, blueprint.num_envs)
        head.share_out()
        slots_of = split(blueprint.num_envs, workers)
        seat_of = [worker // cluster.workers_per_node for worker in range(workers)]
        crew = RemoteCrew(
            head,
            blueprint,
            slots_of,
            seat_of,
            mode,
            recovery.check,
            threads=cluster.threads_per_worker,
            preload=cluster.preload,
            other=cluster.other_infos,
            stop=stop,
        )
        return Pool(crew, slots_of, mode, recovery, is_vector=blueprint.is_vector, events=events, node_of=seat_of)
    except BaseException:
        head.close()
        stop()
        raise


def _listen(cluster: Cluster, keys: KeyPair, node_keys: list[KeyPair], events: EventLog, running: list[Jobs]) -> Head:
    return Head(
        keys,
        [pair.public for pair in node_keys],
        cluster.bind,
        cluster.port,
        cluster.timing,
        events,
        replace=lambda node, reason: running[0].replace(node) if running else None,
        ended=lambda: running[0].ended() if running else {},
        cores=1 if cluster.oversubscribe else cluster.workers_per_node,
        sends_pickle=cluster.allow_pickle,
        invited=cluster.nodes,
        drop=lambda node: running[0].drop(node) if running else None,
    )


def _await(head: Head, jobs: Jobs, cluster: Cluster, num_envs: int) -> None:
    """Until every node is here, with a line that says who is missing."""
    deadline = time.monotonic() + cluster.start_timeout_s
    shown = ""
    last, came = len(head.roster.missing), time.monotonic()
    while missing := head.roster.missing:
        here = cluster.nodes - len(missing)
        if len(missing) != last:
            last, came = len(missing), time.monotonic()
        if here >= (cluster.min_nodes or cluster.nodes) and time.monotonic() - came > _OTHERS_S:
            emit(logging.INFO, f"beginning with {here} of {cluster.nodes} nodes")
            return
        line = f"{here}/{cluster.nodes} nodes, {num_envs * here // cluster.nodes}/{num_envs} environments, waiting for "
        line += ", ".join(_described(jobs, i) for i in missing[:5]) + (" ..." if len(missing) > 5 else "")
        if line != shown and time.monotonic() > deadline - cluster.start_timeout_s + 2.0:
            emit(logging.INFO, line)
            shown = line
        ended = {node: why for node, why in jobs.ended().items() if node in missing}
        refused = {node: head.refusals[node] for node in missing if node in head.refusals}
        if refused or ended:
            text = "; ".join(f"node {node} was refused: {why}" for node, why in refused.items())
            text = text or "; ".join(f"node {node} {why}" for node, why in ended.items())
            raise StartError(f"{text}{_tails(jobs, list(refused or ended))}")
        if time.monotonic() > deadline:
            raise StartError(
                f"{line} after {cluster.start_timeout_s:g} s. The head listens on {head.address}: nodes must be able "
                f"to dial it (bind=... chooses another address){_tails(jobs, missing)}"
            )
        head.pump(0.1)


def _described(jobs: Jobs, node: int) -> str:
    state = jobs.state(node)
    return f"node {node}: {state}" if state else f"node {node}"


def _tails(jobs: Jobs, nodes: list[int]) -> str:
    return "".join(f"\nlast words of node {node}:\n{jobs.log_tail(node)}" for node in nodes[:3])


def address_of(bind: str | None) -> str:
    """An address of this machine: as given, of a named interface, or the one that leads outside."""
    if bind is None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))  # nothing is sent: the kernel says which address it would use
            return str(probe.getsockname()[0])
        return "127.0.0.1"
    if bind in ("*", "0.0.0.0", "::"):
        raise SpecError(f"bind={bind!r} would listen on every network: name an address or an interface")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bind))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", bind.encode()[:15]))
    except OSError:
        names = [name for _, name in socket.if_nameindex()]
        raise SpecError(f"bind={bind!r} is no address and no interface with one; there are {names}") from None
    return socket.inet_ntoa(answer[20:24])


def read_tail(path: Path, size: int = 4000) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError:
        return f"(no log at {path})"
