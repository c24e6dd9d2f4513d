"""`Ray`: run node agents as actors on an existing Ray cluster, or on one started for the run.

An actor runs the agent as a child process, which keeps its own signal handlers and main loop, and ends with the actor.
The key goes through a pipe, so that a killed actor leaves no file. Ray is imported when a run begins.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from clusterenv.arguments import expect
from clusterenv.backends.contract import Plan, agent_command, ended
from clusterenv.backends.launch.logs import read_tail
from clusterenv.backends.remote import Remote
from clusterenv.errors import StartError

_STOP_S = 3.0
_NAMESPACE = "clusterenv"  # the Ray namespace of the actors' names, for all runs


@dataclass(frozen=True)
class Ray(Remote):
    """Run nodes as Ray actors.

    Args:
        nodes: number of actors; Ray spreads them over its machines as far as it can.
        cpus_per_node: cores that Ray reserves for each node; None: one per worker.
        resources: custom Ray resources that each node needs.
        address: of the Ray cluster; "auto" finds the one on this machine, "local" starts one for this run.
        others: as in `Remote`.
    """

    cpus_per_node: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str = "auto"
    name: ClassVar[str] = "ray"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("Ray", "cpus_per_node", self.cpus_per_node, float | None, least=0)

    def resolved(self, num_envs: int) -> Remote:
        # The nodes of a cluster started for the run are processes on this machine.
        is_here = self.address == "local" and self.bind is None and not _imported().is_initialized()
        return replace(self, bind="127.0.0.1") if is_here else self

    def launch(self, plan: Plan) -> _Actors:
        ray = _imported()
        is_ours = not ray.is_initialized()
        if is_ours:
            host, _, port = self.address.rpartition(":")
            if host and port.isdecimal() and "/" not in host:
                _probe(self.address)
            _init(self.address)
        return _Actors(self, plan, ray, is_ours)

    @staticmethod
    def collect_garbage(note: Mapping[str, Any], deadline: float) -> str:
        return _kill_actors(note["address"], note["prefix"])


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise StartError('Ray(...) needs Ray: pip install "clusterenv[ray]"') from None
    return ray


def _init(address: str) -> None:
    try:
        _imported().init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        raise StartError(f"Ray({address!r}) cannot be reached: {error}") from None


def _probe(address: str) -> None:
    """Raise StartError if nothing listens at "host:port"; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise StartError(f"Ray({address!r}) cannot be reached: {error.strerror or error}") from error


class NodeActor:
    """Run a node agent on a Ray node, in its own process."""

    def __init__(self, key: bytes, options: Sequence[str]) -> None:
        command = agent_command(Path("-"), ["--with-parent", *options])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # unnamed, so that a killed actor leaves no file
        self._agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log)
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._agent.stdin as pipe:  # `poll` reports an early exit
            pipe.write(key)

    def poll(self) -> tuple[int | None, str]:
        """Return the agent's exit code, if it has ended, and the last lines that it wrote."""
        # Reopened by path for its own file offset: seeking in the shared one would move where the agent writes.
        return self._agent.poll(), read_tail(Path(f"/proc/self/fd/{self._log.fileno()}"))

    def stop(self) -> None:
        self._agent.terminate()
        try:
            self._agent.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        self._log.close()


class _Actors:
    """Implement `Jobs` with Ray actors."""

    def __init__(self, backend: Ray, plan: Plan, ray: Any, is_ours: bool) -> None:
        self._ray, self._backend, self._plan, self._is_ours = ray, backend, plan, is_ours
        cpus = backend.workers_per_node if backend.cpus_per_node is None else backend.cpus_per_node
        options: dict[str, Any] = {"num_cpus": cpus, "resources": dict(backend.resources) or None, "max_restarts": 0}
        self._class, self._options = ray.remote(NodeActor), {"scheduling_strategy": "SPREAD", **options}
        self._prefix = f"clusterenv-{plan.run}-"
        self._said: dict[int, tuple[int | None, str]] = {}
        self._over: dict[int, str] = {}
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}
        self._count = 0

    def note(self) -> dict[str, Any]:
        return {"address": self._ray.get_runtime_context().gcs_address, "prefix": self._prefix}

    def look(self) -> dict[int, str]:
        """Read the poll results that have arrived, poll those agents again, and return the nodes that have ended."""
        asked = {node: reference for node, reference in self._asked.items() if node not in self._over}
        references = list(asked.values())
        ready = self._ray.wait(references, num_returns=len(asked), timeout=0, fetch_local=False)[0] if asked else []
        for node, reference in asked.items():
            if reference not in ready:
                continue
            try:
                self._said[node] = code, _ = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._over[node] = f"ended: {str(error).strip().splitlines()[0]}"
                continue
            if code is None:
                self._asked[node] = self._actors[node].poll.remote()
            else:
                self._over[node] = ended(code)
        return dict(self._over)

    def start(self, node: int) -> None:
        self._kill(node)
        # The key is an argument, sent over Ray's own channels: docs/security.md says how safe that is.
        self._count += 1
        name = f"{self._prefix}{node}-{self._count}"
        named = self._class.options(name=name, namespace=_NAMESPACE, **self._options)
        self._actors[node] = named.remote(self._plan.files[node].read_bytes(), self._plan.options)
        self._asked[node] = self._actors[node].poll.remote()
        self._over.pop(node, None)
        self._said.pop(node, None)

    def drop(self, node: int) -> None:
        self._kill(node)
        self._asked.pop(node, None)
        self._over.pop(node, None)

    def _kill(self, node: int) -> None:
        actor = self._actors.pop(node, None)
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)

    def state(self, node: int) -> str:
        if node in self._said:
            return "started"
        free: Mapping[str, float] = self._ray.available_resources()
        return f"not placed by Ray yet, which has {free.get('CPU', 0):g} CPU free"

    def log_tail(self, node: int) -> str:
        return self._said.get(node, (None, f"({self.state(node)})"))[1]

    def describe(self) -> str:
        return f"{len(self._actors)} Ray actors named {self._prefix}*"

    def stop(self, deadline: float) -> None:
        """Stop the agents and kill the actors. Ray's calls have no timeout: `Supervisor` waits until `deadline`."""
        stopping = [actor.stop.remote() for node, actor in self._actors.items() if node in self._said]
        if stopping:
            patience_s = max(0.1, min(_STOP_S + 1.0, deadline - 2.0 - time.monotonic()))
            self._ray.wait(stopping, num_returns=len(stopping), timeout=patience_s)
        for actor in self._actors.values():  # kept in the dict: `describe` still lists them if Ray hangs here
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        if self._is_ours:
            self._ray.shutdown()


def _kill_actors(address: str, prefix: str) -> str:
    """Kill the actors of a run, and return a line that says so. Raises if that fails.

    Ray itself ends them only with the script that created them.
    """
    ray = _imported()
    from ray.util import list_named_actors

    try:
        _probe(address)
    except StartError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            return f"the Ray cluster at {address} is no longer running"
        raise
    is_ours = not ray.is_initialized()
    if is_ours:
        _init(address)
    try:
        names = [item["name"] for item in list_named_actors(all_namespaces=True) if item["namespace"] == _NAMESPACE]
        names = [name for name in names if name.startswith(prefix)]
        for name in names:
            with contextlib.suppress(ValueError):  # it has ended since it was listed
                ray.kill(ray.get_actor(name, namespace=_NAMESPACE))
    except ray.exceptions.RayError as error:
        raise StartError(f"Ray({address!r}) says: {error}") from None
    finally:
        if is_ours:
            ray.shutdown()
    return f"{len(names)} Ray actors named {prefix}* are killed"
