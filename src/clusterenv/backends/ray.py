"""`Ray`: node agents as actors, placed by Ray on a cluster that is there already, or on one started for the run.

An actor writes its key into a private folder and runs the agent as a process of its own, which ends with the actor: the
agent's signals and its loop are not Ray's. Ray itself is imported when a run begins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterenv.arguments import expect
from clusterenv.backends.keeper import start_first
from clusterenv.backends.remote import Remote
from clusterenv.errors import StartError
from clusterenv.events import emit
from clusterenv.pool.ends import how_it_ended

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clusterenv.backends.network import Plan
    from clusterenv.events import EventLog
    from clusterenv.pool import Pool
    from clusterenv.recovery import Recovery
    from clusterenv.spec import Blueprint

__all__ = ["NodeActor", "Ray"]

_STOP_S = 5.0


@dataclass(frozen=True)
class Ray(Remote):
    """Nodes as Ray actors.

    Args:
        nodes: how many; Ray spreads them over its machines as far as it can.
        cpus_per_node: cores that Ray reserves for each; None: one per worker.
        resources: custom resources that each needs, as Ray names them.
        address: of the Ray cluster; "auto" finds the one of this machine, "local" starts one for this run.
        others: as in `Remote`, which see.
    """

    nodes: int
    cpus_per_node: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str = "auto"

    def __post_init__(self) -> None:
        self._check(self.nodes)
        expect("Ray", "cpus_per_node", self.cpus_per_node, float | None, least=0)

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Pool:
        try:
            import ray
        except ImportError:
            raise StartError('Ray(...) needs Ray: pip install "clusterenv[ray]"') from None
        is_ours = not ray.is_initialized()
        if is_ours:
            _probe(self.address)
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
                raise StartError(f"Ray({self.address!r}) cannot be reached: {error}") from None
        # The nodes of a cluster that was started for the run are processes of this machine.
        is_here = is_ours and self.address == "local"
        remote = replace(self, bind="127.0.0.1") if is_here and self.bind is None else self
        try:
            return remote.start_with(
                self.nodes, lambda plan: _Actors(self, plan, is_ours), blueprint, mode, recovery, events
            )
        except BaseException:
            if is_ours:
                ray.shutdown()
            raise


def _probe(address: str) -> None:
    """Ray itself would try an address where nobody is for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError as error:
            raise StartError(f"Ray({address!r}) cannot be reached: {error.strerror or error}") from None


class NodeActor:
    """What runs on a Ray node: a node agent in a process of its own."""

    def __init__(self, key: bytes, options: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="clusterenv-ray-")  # mode 0700
        path = Path(self._folder.name)
        fd = os.open(path / "node.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(key)
        self._log = path / "log"
        command = [sys.executable, "-m", "clusterenv", "node", "--join", str(path / "node.key"), "--with-parent"]
        with self._log.open("ab") as log:
            self._agent = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def poll(self) -> tuple[int | None, str]:
        """The agent's exit code, if it is over, and its last words."""
        from clusterenv.backends.network import read_tail

        return self._agent.poll(), read_tail(self._log)

    def stop(self) -> None:
        self._agent.terminate()
        try:
            self._agent.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        self._folder.cleanup()


class _Actors:
    """`Jobs` of Ray."""

    def __init__(self, backend: Ray, plan: Plan, is_ours: bool) -> None:
        import ray

        self._ray, self._backend, self._plan, self._is_ours = ray, backend, plan, is_ours
        cpus = backend.workers_per_node if backend.cpus_per_node is None else backend.cpus_per_node
        options: dict[str, Any] = {"num_cpus": cpus, "resources": dict(backend.resources) or None, "max_restarts": 0}
        self._class = ray.remote(NodeActor).options(scheduling_strategy="SPREAD", **options)
        self._said: dict[int, tuple[int | None, str]] = {}
        self._over: dict[int, str] = {}
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}
        start_first(self, plan.nodes)

    def look(self) -> dict[int, str]:
        """Take the answers that are there, and ask again."""
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
                self._over[node] = f"ended: {how_it_ended(code)}"
        return dict(self._over)

    def has_job(self, node: int) -> bool:
        return node in self._actors

    def start(self, node: int) -> None:
        self._kill(node)
        # The key goes as an argument, through Ray's own channels: docs/security.md says what that is worth.
        self._actors[node] = self._class.remote(self._plan.files[node].read_bytes(), self._plan.options)
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

    def stop(self) -> None:
        stopping = [actor.stop.remote() for node, actor in self._actors.items() if node in self._said]
        deadline = time.monotonic() + _STOP_S
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=max(0.1, deadline - time.monotonic()))
        for node in list(self._actors):
            self._kill(node)
        if self._is_ours:
            self._ray.shutdown()
        emit(logging.DEBUG, "Ray actors ended")
