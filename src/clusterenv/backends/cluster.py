"""Start a run of any backend over a network: make keys, listen, start the nodes, and return the driver.

Called by `Remote.start`. The backend's `Jobs` (`contract.py`) start, watch and end node agents; they see no messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gymnasium.vector import AutoresetMode

from clusterenv.backends import gc
from clusterenv.backends.contract import CollectsGarbage, DescribesJobs, Hopeless, Jobs, LeavesJobs, Plan, ScheduledJobs
from clusterenv.backends.launch.addresses import dialled, listening_address, parse_advertise, parse_port
from clusterenv.backends.launch.folder import RunFolder, key_file, run_path
from clusterenv.backends.launch.reattach import Identity, await_return, new_identity, obstacle, reopen
from clusterenv.backends.launch.supervisor import Supervisor
from clusterenv.backends.local import split
from clusterenv.backends.remote import Remote
from clusterenv.cluster.contract import Timing
from clusterenv.cluster.head import Head
from clusterenv.cluster.peers import Admission
from clusterenv.driver import Driver
from clusterenv.engine.requests import Requests
from clusterenv.errors import SpecError, StartError
from clusterenv.events import Event, EventLog, emit, emit_progress
from clusterenv.executors.remote import RemoteExecutor
from clusterenv.journal import ClusterRecord, Journal
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.system import termination
from clusterenv.system.open_files import allow_open_files
from clusterenv.system.teardown import Teardown, precede_exit_handlers
from clusterenv.transport.sockets import listening_on
from clusterenv.worker.setup import WorkerConfig

_QUIET_S = 2.0  # how long to wait for nodes before logging progress

_CLEAN_UP_S = 8.0  # time limit for ending the jobs of a run that failed to start

_TRIES = 3  # the start fails if a node ends this often before any node has joined: the others would end too

_COMPRESS: dict[Any, Literal["auto", "always", "never"]] = {"auto": "auto", True: "always", False: "never"}

_OTHERS_S = 5.0  # how long to wait for further nodes once `min_nodes` have joined


def start(
    remote: Remote,
    blueprint: Blueprint,
    mode: AutoresetMode | None,
    recovery: Recovery,
    events: EventLog,
    journal: Journal | None = None,
) -> Driver:
    """Listen, start the node agents, wait for them, and make the driver."""
    host = listening_address(type(remote).__name__, remote.bind)
    most, each = remote.max_nodes or remote.nodes, remote.workers_per_node
    if most * each > blueprint.num_envs:
        raise SpecError(
            f"{most} nodes with {each} workers each are {most * each} workers for {blueprint.num_envs} environments: "
            f"ask for fewer"
        )
    # One connection per node, a second one briefly while it dials, and the head's own sockets.
    allow_open_files(f"{most} nodes", more=2 * most + 24)
    timing = Timing(*remote.heartbeat_s, remote.move_after_s)
    run = _identify(remote, host, most, timing.lease_s, events, journal)
    folder, nodes = run.folder, run.nodes
    supervisor = Supervisor(events)
    head: Head | None = None
    jobs: Jobs | None = None
    ending = threading.Lock()

    def stop(deadline: float) -> None:
        is_left = journal is not None and remote.can_reattach and termination.is_terminated()
        with ending:
            if head is not None:
                head.close(is_over=not is_left)
            left = supervisor.stop(deadline, is_left)
            if folder.end(left, is_left) and left:
                events.add(Event("jobs_left", _left_behind(folder, left, jobs, timing.lease_s)))
            if journal is not None and not is_left:
                journal.forget_cluster()
        termination.unwatch(folder)
        clean_up.forget()

    clean_up = Teardown(lambda: stop(time.monotonic() + _CLEAN_UP_S), _CLEAN_UP_S + 2.0)
    try:
        termination.watch(folder)
        compress = _COMPRESS[remote.compress]
        admission = Admission(run.node_keys, 1 if remote.oversubscribe else each, remote.allow_pickle, compress)
        head = Head(run.keys, host, run.ports, admission, timing, events, supervisor, invited=nodes)
        address = dialled(head.address, parse_advertise(remote.advertise))
        _write_down(run, address, head, remote.nodes, journal)
        with folder.writing():
            jobs = _launch(remote, folder, timing.lease_s, address, supervisor.closing)
            supervisor.keep(jobs, nodes, await_return(head, nodes) if run.pairs is None else ())
        if isinstance(jobs, DescribesJobs):
            emit(logging.INFO, jobs.describe())
            head.job_state, head.job_log = jobs.state, jobs.log_tail
        head.needed_nodes = remote.min_nodes or nodes
        _await(head, address, supervisor, jobs, remote, nodes, blueprint.num_envs)
        head.share_out()
        driver = _make_driver(head, remote, blueprint, mode, recovery, events, stop, journal)
        head.needed_nodes = 1  # from now on, other nodes take over the shards of a lost node
        return driver
    except BaseException:
        clean_up()
        raise


def _identify(
    remote: Remote, host: str, most: int, lease_s: float, events: EventLog, journal: Journal | None
) -> Identity:
    """Return the identity of the run's last head if its nodes may still wait for a new head, else a new identity."""
    ports, record = parse_port(remote.port), None if journal is None else journal.cluster
    if record is not None:
        assert journal is not None
        address = dialled(listening_on(host, record.port), parse_advertise(remote.advertise))
        why = obstacle(record, most, host, ports, address) if remote.can_reattach else "their backend cannot"
        if not why:
            return reopen(record, remote.nodes, lease_s, journal.path, remote.owner_squashed)
        text = f"the nodes of the last head cannot be reused, starting new ones: {why}"
        events.add(Event("nodes_not_resumed", text))
        gc.remove(
            [Path(record.folder).parent],
            False,
            lambda said: emit(logging.INFO, said),
            record.run,
            remote.owner_squashed,
        )
    path = "" if journal is None or not remote.can_reattach else str(journal.path)
    folder = RunFolder(remote.folder, lease_s, remote.owner_squashed, path)
    return new_identity(folder, ports, remote.nodes, most)


def _write_down(run: Identity, address: str, head: Head, nodes: int, journal: Journal | None) -> None:
    """Write the files that nodes need to join, and the record with which a later head can accept the same nodes."""
    folder, keys, port = run.folder, run.keys, int(head.address.rpartition(":")[2])
    if run.pairs is not None:
        folder.write_keys(address, keys.public, run.pairs)
    if journal is not None:
        known = (keys.public, keys.secret, tuple(run.node_keys))
        journal.keep_cluster(ClusterRecord(folder.run, str(folder.path), address, port, *known, nodes, run.nodes))


def _make_driver(
    head: Head,
    remote: Remote,
    blueprint: Blueprint,
    mode: AutoresetMode | None,
    recovery: Recovery,
    events: EventLog,
    stop: Callable[[float], None],
    journal: Journal | None,
) -> Driver:
    each = remote.workers_per_node
    workers = (remote.max_nodes or remote.nodes) * each
    slots_of = split(blueprint.num_envs, workers)
    shard_of = [worker // each for worker in range(workers)]
    config = WorkerConfig(mode, recovery.check, remote.threads_per_worker, remote.preload, remote.other_infos)
    requests = Requests(slots_of)
    executor = RemoteExecutor(head, blueprint, requests, slots_of, shard_of, config, stop)
    return Driver(
        executor,
        requests,
        mode,
        recovery,
        blueprint=blueprint,
        events=events,
        node_of=shard_of,
        journal=journal,
    )


def example_plan(remote: Remote) -> Plan:
    """Return a plan for `script`: a run named RUN, with files and an address that do not exist."""
    folder = run_path(remote.folder, "RUN")
    files = tuple(key_file(folder, node) for node in range(remote.max_nodes or remote.nodes))
    return Plan("RUN", folder, files, remote.heartbeat_s[2], remote.allow_pickle, "tcp://HEAD:PORT")


def _launch(remote: Remote, folder: RunFolder, lease_s: float, address: str, closing: threading.Event) -> Jobs:
    """Return the jobs of the run, after writing the note from which `clusterenv gc` can end leftover jobs."""
    digests = folder.digests if remote.owner_squashed else ()
    plan = Plan(folder.run, folder.path, folder.files, lease_s, remote.allow_pickle, address, closing, digests)
    jobs = remote.launch(plan)
    precede_exit_handlers()
    try:
        if isinstance(jobs, LeavesJobs):
            if not isinstance(remote, CollectsGarbage):
                name = type(remote).__name__
                raise SpecError(f"{name}: its jobs have note(), so it needs `name` and collect_garbage(note, deadline)")
            folder.note.add_jobs({remote.name: dict(jobs.note())})
    except BaseException:
        if isinstance(jobs, ScheduledJobs):  # closes its connections
            jobs.stop(time.monotonic() + _CLEAN_UP_S)
        raise
    return jobs


def _left_behind(folder: RunFolder, left: str, jobs: Jobs | None, lease_s: float) -> str:
    described = jobs.describe() if isinstance(jobs, DescribesJobs) else "node agents"
    return (
        f"run {folder.run} is closed, but not all of it could be removed: {left}. It had: "
        f"{described}. Nodes that are running end by themselves within {lease_s:g} s; "
        f"`clusterenv gc --folder {folder.path.parent}` removes the rest"
    )


def _await(
    head: Head, address: str, supervisor: Supervisor, jobs: Jobs, remote: Remote, nodes: int, num_envs: int
) -> None:
    """Wait until every node has joined, or `min_nodes` have and no further one joins; log the missing nodes.

    Jobs that end before their node has joined are started again (`Roster.gone`) until the timeout.
    """
    deadline = time.monotonic() + remote.start_timeout_s
    shown = ""
    where = address if address == head.address else f"{address} (the head listens on {head.address})"
    last, came = len(head.roster.missing), time.monotonic()
    while missing := head.roster.missing:
        here = nodes - len(missing)
        if len(missing) != last:
            last, came = len(missing), time.monotonic()
        over = {node: why for node, why in supervisor.over.items() if node in missing}
        hopeless = _hopeless(head, over, missing)
        if nodes - len(hopeless) < head.needed_nodes:
            text = "; ".join(f"node {node} {why}" for node, why in hopeless.items())
            raise StartError(f"{text}{_tails(jobs, list(hopeless))}")
        if here >= head.needed_nodes and (len(hopeless) == len(missing) or time.monotonic() - came > _OTHERS_S):
            emit_progress(f"starting with {here} of {nodes} nodes")
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
    """Return the nodes that will never join, and why."""
    refused = {node: f"was refused: {head.refusals[node]}" for node in missing if node in head.refusals}
    if refused:
        return refused
    if head.roster.has_met_any:
        return {node: why for node, why in over.items() if isinstance(why, Hopeless)}
    return {
        node: why if isinstance(why, Hopeless) else f"{why} ({_TRIES} times, and no node has joined yet)"
        for node, why in over.items()
        if isinstance(why, Hopeless) or head.roster.times_asked(node) >= _TRIES - 1
    }


def _described(jobs: Jobs, node: int, over: Mapping[int, str]) -> str:
    state = f"{over[node]}, to be started again" if node in over else ""
    if not state and isinstance(jobs, DescribesJobs):
        state = jobs.state(node)
    return f"node {node}: {state}" if state else f"node {node}"


def _tails(jobs: Jobs, nodes: list[int]) -> str:
    if not isinstance(jobs, DescribesJobs):
        return ""
    return "".join(f"\nlast log lines of node {node}:\n{jobs.log_tail(node)}" for node in nodes[:3])
