"""`Loopback`: run node agents as processes on this machine, over TCP, to try the network path without a cluster."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from clusterenv.backends.contract import Plan, ended
from clusterenv.backends.launch.logs import read_tail, start_logged
from clusterenv.backends.remote import Remote
from clusterenv.errors import SpecError
from clusterenv.system.cpus import usable_cores


@dataclass(frozen=True)
class Loopback(Remote):
    """Run nodes as processes on this machine, connected over TCP like the nodes of a cluster, to try that path.

    Args:
        nodes: number of node processes.
        others: as in `Remote`; `oversubscribe` is True here.

    Example:
        >>> import clusterenv as ce
        >>> envs = ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Loopback(nodes=2))
        >>> envs.reset(seed=1)[0].shape
        (4, 4)
        >>> envs.close()
    """

    bind: str | None = field(default="127.0.0.1", kw_only=True)
    start_timeout_s: float = field(default=60.0, kw_only=True)
    oversubscribe: bool = field(default=True, kw_only=True)
    can_reattach: ClassVar[bool] = True

    def launch(self, plan: Plan) -> AgentProcesses:
        return AgentProcesses(plan, dead_after_s=self.heartbeat_s[1])

    def script(self, plan: Plan) -> str:
        return shlex.join(plan.command(0))


class AgentProcesses:
    """Implement `Jobs` on this host. They end when their lease on the head expires, so `gc` has nothing to remove."""

    def __init__(self, plan: Plan, dead_after_s: float) -> None:
        self._plan = plan
        self._options = ["--lease-s", str(plan.lease_s), "--dead-after-s", str(max(dead_after_s, plan.lease_s))]
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        self._agents[node] = start_logged([*self._plan.command(node), *self._options], self._log(node))

    def look(self) -> dict[int, str]:
        codes = {node: agent.poll() for node, agent in self._agents.items()}
        return {node: ended(code) for node, code in codes.items() if code is not None}

    def state(self, node: int) -> str:
        agent = self._agents.get(node)
        return f"process {agent.pid}" if agent is not None else ""

    def log_tail(self, node: int) -> str:
        return read_tail(self._log(node))

    def describe(self) -> str:
        return f"{len(self._agents)} processes on this machine; logs in {self._plan.folder}"

    def stop(self, deadline: float) -> None:
        patience = min(deadline - 1.0, time.monotonic() + 3.0)
        for agent in self._agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.05, patience - time.monotonic()))
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()

    def _log(self, node: int) -> Path:
        return self._plan.folder / f"node-{node}.log"


# -- the deprecated `Local(network=True)` -------------------------------------------------------------------------


@dataclass(frozen=True)
class _AsManyAsFit(Loopback):
    """Use one worker per CPU that this process may use, at most one per environment, spread over the nodes."""

    def resolved(self, num_envs: int) -> Remote:
        return replace(self, workers_per_node=max(1, min(usable_cores(), num_envs) // self.nodes))


def from_local(given: dict[str, Any]) -> Loopback:
    """Return the backend for `Local(network=True, ...)` with these options, and warn that this form is deprecated."""
    text = "Local(network=True, workers=..., nodes=...) is deprecated: write Loopback(nodes=..., workers_per_node=...)"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    workers, nodes = given.pop("workers", None), given.pop("nodes", 1)
    if "heartbeat" in given:
        given["heartbeat_s"] = given.pop("heartbeat")
    if workers is None:
        return _AsManyAsFit(nodes, **given)
    if workers % nodes or not workers:
        raise SpecError(f"Local(workers={workers}, nodes={nodes}): every node has as many workers, at least one")
    return Loopback(nodes, workers_per_node=workers // nodes, **given)
