"""What every backend over a network shares: keys, a listening head, nodes that are awaited, a pool over them.

A backend brings `Jobs`: how node agents are started, looked after and ended. It sees no message.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gymnasium.vector import AutoresetMode

from clusterenv.backends.addresses import dialled, listening_address, parse_advertise, parse_port
from clusterenv.backends.folder import RunFolder
from clusterenv.backends.local import split
from clusterenv.backends.remote import Remote
from clusterenv.backends.supervisor import Hopeless, Keeper
from clusterenv.cluster.head import Head, Timing
from clusterenv.driver import Pool
from clusterenv.errors import SpecError, StartError
from clusterenv.events import Event, EventLog, emit, emit_progress
from clusterenv.executors.remote import RemoteCrew
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.system.open_files import allow_open_files
from clusterenv.system.teardown import Teardown
from clusterenv.transport.keys import make_keys
from clusterenv.worker.setup import WorkerConfig

__all__ = ["Jobs", "Plan", "agent_command", "start"]

_QUIET_S = 2.0
"""How long nodes are awaited before anything is logged about it."""

_CLEAN_UP_S = 8.0
"""What may be spent on ending the jobs of a run that could not be started."""

_LEASE_S = 60.0
"""The lease of a node that is not told another (`clusterenv node --lease-s`)."""

_TRIES = 3
"""A node that ends so often while no node has ever come is taken for a mistake that all of them share."""

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
    address: str
    """What nodes dial."""
    closing: threading.Event
    """Set when the run is over: a question to the scheduler that is under way need not be answered."""
    digests: tuple[str, ...] = ()
    """SHA-256 of each key file, where its owner says nothing."""

    def command(self, node: int, python: str | None = None, options: Sequence[str] = ()) -> list[str]:
        """Return the command that starts the agent of this node on a machine that sees the same files."""
        digest = ["--key-sha256", self.digests[node]] if self.digests else []
        return agent_command(self.files[node], [*digest, *self.options, *options], python)

    @property
    def options(self) -> list[str]:
        lease = [] if self.lease_s == _LEASE_S else ["--lease-s", f"{self.lease_s:g}"]
        return [*lease, *([] if self.allow_pickle else ["--no-pickle"])]


def agent_command(key: Path, options: Sequence[str] = (), python: str | None = None) -> list[str]:
    """Return the command that starts a node agent; `python`: an interpreter other than this one."""
    return [python or sys.executable, "-m", "clusterenv", "node", "--join", str(key), *options]


class Jobs(Protocol):
    """The node agents of one run, as its scheduler has them.

    Nothing is started when it is made. `Keeper`'s thread alone calls it, but for `state`, `log_tail` and `describe`.
    """

    @property
    def note(self) -> Mapping[str, Any]:
        """What `clusterenv gc` needs to end these: {"slurm": {...}}; empty where nothing outlives the nodes."""
        ...

    def look(self) -> dict[int, str]:
        """Ask the scheduler: nodes whose agent is known to be over, and why. May be slow, may raise.

        A `Hopeless` reason ends a start at once that needs this node; any other job is started again.
        """
        ...

    def has_job(self, node: int) -> bool:
        """Whether this node was started, and not dropped since: then it is not started again before that is over."""
        ...

    def start(self, node: int) -> None:
        """Start this node, for the first time or in place of a job that is over."""
        ...

    def drop(self, node: int) -> None:
        """It is not wanted any more, and was told so."""
        ...

    def state(self, node: int) -> str:
        """What the scheduler says of a node that has not come yet ("PENDING (Resources)"); may be empty."""
        ...

    def log_tail(self, node: int) -> str:
        """The last words of a node, or where they are."""
        ...

    def describe(self) -> str:
        """What was started, in the scheduler's own names; may be empty."""
        ...

    def stop(self, deadline: float) -> None:
        """End everything by `deadline` (of the monotonic clock). Raises where something may be left.

        Called once, when nothing else will be.
        """
        ...


def start(
    remote: Remote,
    nodes: int,
    launch: Callable[[Plan], Jobs],
    blueprint: Blueprint,
    mode: AutoresetMode | None,
    recovery: Recovery,
    events: EventLog,
) -> Pool:
    """Listen, have node agents started, wait for them all, and make the pool."""
    host = listening_address(type(remote).__name__, remote.bind)
    advertised = parse_advertise(remote.advertise)
    most, each = remote.max_nodes or nodes, remote.workers_per_node
    workers = most * each
    if workers > blueprint.num_envs:
        raise SpecError(
            f"{most} nodes with {each} workers each are {workers} workers for {blueprint.num_envs} environments: "
            f"ask for fewer"
        )
    # A connection for each node, a second one for a moment while it dials, and the sockets of the head.
    allow_open_files(f"{most} nodes", more=2 * most + 24)
    timing = Timing(*remote.heartbeat, remote.move_after_s)
    folder = RunFolder(remote.folder, timing.lease_s, remote.owner_squashed)
    keeper = Keeper(events)
    head: Head | None = None
    jobs: Jobs | None = None
    ending = threading.Lock()

    def stop(deadline: float) -> None:
        with ending:
            if head is not None:
                head.close()
            left = keeper.stop(deadline)
            if folder.end(left) and left:
                events.add(Event("jobs_left", _left_behind(folder, left, jobs, timing.lease_s)))
        clean_up.forget()

    clean_up = Teardown(lambda: stop(time.monotonic() + _CLEAN_UP_S), _CLEAN_UP_S + 2.0)
    try:
        keys, node_keys = make_keys(), [make_keys() for _ in range(most)]
        head = Head(
            keys,
            [pair.public for pair in node_keys],
            host,
            parse_port(remote.port),
            timing,
            events,
            keeper,
            cores=1 if remote.oversubscribe else each,
            sends_pickle=remote.allow_pickle,
            invited=nodes,
        )
        address = dialled(head.address, advertised)
        folder.write_keys(address, keys.public, node_keys)
        with folder.writing():
            plan = Plan(
                folder.run,
                folder.path,
                folder.files,
                timing.lease_s,
                remote.allow_pickle,
                nodes,
                address,
                keeper.closing,
                folder.digests if remote.owner_squashed else (),
            )
            jobs = launch(plan)
            folder.note.add_jobs(jobs.note)
            keeper.keep(jobs, nodes)
        if described := jobs.describe():
            emit(logging.INFO, described)
        head.needed_nodes = remote.min_nodes or nodes
        _await(head, address, keeper, jobs, remote, nodes, blueprint.num_envs)
        head.share_out()
        slots_of = split(blueprint.num_envs, workers)
        seat_of = [worker // each for worker in range(workers)]
        config = WorkerConfig(mode, recovery.check, remote.threads_per_worker, remote.preload, remote.other_infos)
        crew = RemoteCrew(head, blueprint, slots_of, seat_of, config, stop)
        pool = Pool(crew, slots_of, mode, recovery, blueprint=blueprint, events=events, node_of=seat_of)
        head.needed_nodes = 1  # from now on, the others take over whatever a node leaves
        return pool
    except BaseException:
        clean_up()
        raise


def _left_behind(folder: RunFolder, left: str, jobs: Jobs | None, lease_s: float) -> str:
    described = jobs.describe() if jobs is not None else ""
    return (
        f"run {folder.run} is closed, but not all of it could be removed: {left}. It had: "
        f"{described or 'node agents'}. Nodes that are running end by themselves within {lease_s:g} s; "
        f"`clusterenv gc --folder {folder.path.parent}` removes the rest"
    )


def _await(head: Head, address: str, keeper: Keeper, jobs: Jobs, remote: Remote, nodes: int, num_envs: int) -> None:
    """Wait until every node is here, or `min_nodes` are and no other comes, with a line that says who is missing.

    Jobs that end before their node has come are started again (`Roster.gone`) until the timeout.
    """
    deadline = time.monotonic() + remote.start_timeout_s
    shown = ""
    where = address if address == head.address else f"{address} (the head listens on {head.address})"
    last, came = len(head.roster.missing), time.monotonic()
    while missing := head.roster.missing:
        here = nodes - len(missing)
        if len(missing) != last:
            last, came = len(missing), time.monotonic()
        over = {node: why for node, why in keeper.over.items() if node in missing}
        hopeless = _hopeless(head, over, missing)
        if nodes - len(hopeless) < head.needed_nodes:
            text = "; ".join(f"node {node} {why}" for node, why in hopeless.items())
            raise StartError(f"{text}{_tails(jobs, list(hopeless))}")
        if here >= head.needed_nodes and (len(hopeless) == len(missing) or time.monotonic() - came > _OTHERS_S):
            emit_progress(f"beginning with {here} of {nodes} nodes")
            return
        line = f"{here}/{nodes} nodes, {num_envs * here // nodes}/{num_envs} environments, waiting for "
        line += ", ".join(_described(jobs, i, over) for i in missing[:5]) + (" ..." if len(missing) > 5 else "")
        if line != shown and time.monotonic() > deadline - remote.start_timeout_s + _QUIET_S:
            if not shown:
                emit_progress(f"waiting for {len(missing)} nodes at {where}")
            emit_progress(line)
            shown = line
        if time.monotonic() > deadline:
            raise StartError(
                f"{line} after {remote.start_timeout_s:g} s. The nodes dial {where}: check that they can reach it; "
                f"bind= and port= choose where the head listens, advertise= what nodes dial{_tails(jobs, missing)}"
            )
        head.pump(0.1)


def _hopeless(head: Head, over: Mapping[int, str], missing: Sequence[int]) -> dict[int, str]:
    """Return the nodes that will not come however long they are awaited, and why."""
    refused = {node: f"was refused: {head.refusals[node]}" for node in missing if node in head.refusals}
    if refused:
        return refused
    if head.roster.has_met_any:
        return {node: why for node, why in over.items() if isinstance(why, Hopeless)}
    return {
        node: why if isinstance(why, Hopeless) else f"{why} ({_TRIES} times, and no node has come yet)"
        for node, why in over.items()
        if isinstance(why, Hopeless) or head.roster.times_asked(node) >= _TRIES - 1
    }


def _described(jobs: Jobs, node: int, over: Mapping[int, str]) -> str:
    state = f"{over[node]}, to be started again" if node in over else jobs.state(node)
    return f"node {node}: {state}" if state else f"node {node}"


def _tails(jobs: Jobs, nodes: list[int]) -> str:
    return "".join(f"\nlast words of node {node}:\n{jobs.log_tail(node)}" for node in nodes[:3])


def read_tail(path: Path, size: int = 4000) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError:
        return f"(no log at {path})"
