"""Node agents as processes of this machine, over TCP on loopback: the cluster's path without a cluster."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import Any

from clusterenv.backends.cluster import Plan, read_tail
from clusterenv.backends.supervisor import Hopeless
from clusterenv.system.exits import NEVER, how_it_ended

__all__ = ["AgentProcesses"]


class AgentProcesses:
    """`Jobs` on this host."""

    def __init__(self, plan: Plan, dead_after_s: float) -> None:
        self._plan = plan
        self._options = ["--lease-s", str(plan.lease_s), "--dead-after-s", str(max(dead_after_s, plan.lease_s))]
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def note(self) -> dict[str, Any]:
        return {}  # they end with their lease on the head

    def look(self) -> dict[int, str]:
        codes = {node: agent.poll() for node, agent in self._agents.items()}
        return {
            node: (Hopeless if code == NEVER else str)(f"ended: {how_it_ended(code)}")
            for node, code in codes.items()
            if code is not None
        }

    def has_job(self, node: int) -> bool:
        return node in self._agents

    def start(self, node: int) -> None:
        with (self._plan.folder / f"node-{node}.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                [*self._plan.command(node), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches the head alone, which then closes
            )

    def drop(self, node: int) -> None:
        return None  # it was told to leave; `stop` makes sure

    def state(self, node: int) -> str:
        return ""

    def log_tail(self, node: int) -> str:
        return read_tail(self._plan.folder / f"node-{node}.log")

    def describe(self) -> str:
        return ""

    def stop(self, deadline: float) -> None:
        patience = min(deadline - 1.0, time.monotonic() + 3.0)
        for agent in self._agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.05, patience - time.monotonic()))
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()
