"""Clusters for tests whose machines are network namespaces, in which the test starts node agents."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import clusterenv as ce
from clusterenv.backends.contract import Plan
from clusterenv.backends.launch.logs import read_tail
from clusterenv.backends.remote import Remote
from clusterenv.testing import chaos
from netns import Host, Network

PROGRAM = ("-m", "clusterenv", "node")


def agent_command(
    plan_or_path: Any,
    node: int = 0,
    lease_s: float = 60.0,
    dead_after_s: float | None = None,
    program: Sequence[str] = PROGRAM,
) -> list[str]:
    import sys

    path = plan_or_path.files[node] if isinstance(plan_or_path, Plan) else plan_or_path
    limits = ["--lease-s", str(lease_s), "--dead-after-s", str(lease_s if dead_after_s is None else dead_after_s)]
    return [sys.executable, *program, "--join", str(path), *limits]


class Proxy(chaos.Proxy):
    """A proxy on a machine of a `Network`."""

    def __init__(self, host: Host, target: tuple[str, int], listen: tuple[str, int] | None = None) -> None:
        super().__init__(target, listen or (host.address, 0), host.popen)


class NamespaceJobs:
    """`Jobs` whose machines are namespaces."""

    def __init__(
        self, net: Network, plan: Plan, dead_after_s: float | None = None, program: Sequence[str] = PROGRAM
    ) -> None:
        self.net, self.plan, self.dead_after_s, self.program = net, plan, dead_after_s, program
        self.agents: dict[int, subprocess.Popen[Any]] = {}
        self.is_full = False  # whether no machine is free

    def look(self) -> dict[int, str]:
        codes = {node: agent.poll() for node, agent in self.agents.items()}
        return {node: f"exited with {code}" for node, code in codes.items() if code is not None}

    def start(self, node: int) -> None:
        if self.is_full:
            raise ce.StartError("no machine is free")
        with (self.plan.folder / f"node-{node}.log").open("ab") as log:
            command = agent_command(self.plan, node, self.plan.lease_s, self.dead_after_s, self.program)
            self.agents[node] = self.net.nodes[node % len(self.net.nodes)].popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def state(self, node: int) -> str:
        return ""

    def log_tail(self, node: int) -> str:
        return read_tail(self.plan.folder / f"node-{node}.log")

    def describe(self) -> str:
        return f"{len(self.agents)} node agents in namespaces"

    def stop(self, deadline: float) -> None:
        deadline = min(deadline, time.monotonic() + 3)
        for agent in self.agents.values():
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


@dataclass(frozen=True)
class Namespaces(Remote):
    """A backend over the machines of a `Network`; `jobs[0]` are its agents once it runs."""

    nodes: int = field(init=False)
    net: Network
    through_proxy: bool | Literal["each"] = False
    """Whether all nodes dial the head through one proxy on the first node's machine, or "each" through its own."""
    dead_after_s: float | None = None
    program: tuple[str, ...] = PROGRAM
    """Arguments of Python that run the agent."""
    jobs: list[NamespaceJobs] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)
    start_timeout_s: float = field(default=60.0, kw_only=True)
    heartbeat_s: tuple[float, float, float] = field(default=(0.2, 1.5, 3.0), kw_only=True)
    oversubscribe: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", len(self.net.nodes))
        super().__post_init__()

    def start(self, *args: Any) -> Any:
        return self.net.head.call(super().start, *args)

    def launch(self, plan: Plan) -> NamespaceJobs:
        if self.through_proxy:
            chaos.divert(plan, self._proxy)
        self.jobs[:] = [NamespaceJobs(self.net, plan, self.dead_after_s, self.program)]
        return self.jobs[0]

    def _proxy(self, node: int, head: tuple[str, int]) -> Proxy:
        if self.through_proxy == "each" or not self.proxies:
            self.proxies.append(Proxy(self.net.nodes[node % self.nodes], head))
        return self.proxies[-1]


def pods(cluster: Any, nodes: int = 2, **kwargs: Any) -> ce.Kubernetes:
    """Return a backend over pods of a `KubeCluster`, which see this interpreter and these files (perhaps root's)."""
    import os
    import sys

    settings: dict[str, Any] = {
        "image": cluster.image,
        "kubeconfig": str(cluster.kubeconfig),
        "bind": cluster.host_address,
        "python": sys.executable,
        "cpu": 0.2,
        "grace_s": 5,
        "pod_overrides": {
            "volumes": cluster.volumes,
            "container": {"volumeMounts": cluster.volume_mounts, "imagePullPolicy": "Never"},
        },
        "run_as_user": os.getuid(),
        "oversubscribe": True,
    }
    return ce.Kubernetes(nodes=nodes, **{**settings, **kwargs})


@dataclass(frozen=True)
class ByHand:
    """Runs `Manual` like a user, with a thread that runs its commands on the machines of a `Network`."""

    net: Network
    folder: Path
    is_remote = True
    allow_pickle = True

    def start(self, *args: Any) -> Any:
        head = self.net.head
        manual = ce.Manual(
            nodes=len(self.net.nodes),
            bind=head.address,
            folder=str(self.folder),
            start_timeout_s=60,
            oversubscribe=True,
        )
        typist = threading.Thread(target=self._type)
        typist.start()
        try:
            return head.call(manual.start, *args)
        finally:
            typist.join()

    def _type(self) -> None:
        for i, host in enumerate(self.net.nodes):
            deadline = time.monotonic() + 30
            while not (found := list(self.folder.glob(f"*/node-{i}.key"))) and time.monotonic() < deadline:
                time.sleep(0.02)
            path = found[0]
            while not path.stat().st_size and time.monotonic() < deadline:
                time.sleep(0.02)
            quiet = subprocess.DEVNULL
            host.popen(agent_command(path), stdin=quiet, stdout=quiet, stderr=quiet)
