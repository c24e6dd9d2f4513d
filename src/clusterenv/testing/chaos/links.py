"""Breakable links between head and nodes: a proxy for each node, and the faults that it can cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from clusterenv.backends.contract import Plan
from clusterenv.backends.loopback import AgentProcesses, Loopback
from clusterenv.testing.chaos.faults import Fault, Kind
from clusterenv.testing.chaos.injector import Act, Later
from clusterenv.testing.chaos.proxy import Proxy
from clusterenv.testing.chaos.strangers import stranger_acts
from clusterenv.transport.keys import read_joining, write_joining

__all__ = ["LinkedLoopback", "divert", "link_acts"]

_DELAYED_S = 3.0


def divert(plan: Plan, connect: Callable[[int, tuple[str, int]], Proxy]) -> list[Proxy]:
    """Make each node of a run dial its own proxy; called from `launch` of a backend.

    `connect` makes the proxy of a node, given the node's number and the address of the head.
    """
    proxies = []
    for node, path in enumerate(plan.files):
        joining = read_joining(path)
        host, port = joining.address.removeprefix("tcp://").rsplit(":", 1)
        proxies.append(connect(node, (host, int(port))))
        path.unlink()
        write_joining(path, msgspec.structs.replace(joining, address="tcp://{}:{}".format(*proxies[-1].address)))
    return proxies


@dataclass(frozen=True)
class LinkedLoopback(Loopback):
    """`Loopback` whose nodes each dial the head through a proxy.

    Once it runs, `links[node]` is that proxy, and `acts` holds the functions for the kinds of `LINK` and `NETWORK`.

    Example:
        >>> import clusterenv as ce
        >>> from clusterenv.testing import chaos
        >>> backend = chaos.LinkedLoopback(nodes=2)
        >>> with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=backend) as envs:
        ...     obs, _ = envs.reset(seed=1)
        ...     backend.links[1].delay(0.05)
        ...     _ = envs.step(envs.action_space.sample())
        ...     backend.links[1].counts().open
        1
    """

    links: list[Proxy] = field(default_factory=list, kw_only=True)
    acts: dict[Kind, Act] = field(default_factory=dict, kw_only=True)

    def launch(self, plan: Plan) -> AgentProcesses:
        self.links[:] = divert(plan, lambda node, head: Proxy(head))
        self.acts.update(link_acts(self.links))
        self.acts.update(stranger_acts(plan))
        return _LinkedProcesses(plan, self.heartbeat_s[1], self.links)


class _LinkedProcesses(AgentProcesses):
    def __init__(self, plan: Plan, dead_after_s: float, links: list[Proxy]) -> None:
        super().__init__(plan, dead_after_s)
        self._links = links

    def stop(self, deadline: float) -> None:
        super().stop(deadline)
        for link in self._links:
            link.close()


def link_acts(links: Sequence[Proxy]) -> dict[Kind, Act]:
    """Return functions for the kinds of `LINK` with these proxies, one per node; `Fault.random` chooses the proxy."""

    def stall(fault: Fault) -> Later:
        link = _of(links, fault)
        link.stall()
        return fault.amount, link.go_on

    def delay(fault: Fault) -> Later:
        link = _of(links, fault)
        link.delay(fault.amount)
        return _DELAYED_S, lambda: link.delay(0.0)

    def reset(fault: Fault) -> None:
        _of(links, fault).cut_after(int(fault.amount), "to_target" if fault.random & 1 else "to_client")

    def refuse(fault: Fault) -> Later:
        link = _of(links, fault)
        link.refuse(True)
        link.cut()
        return fault.amount, lambda: link.refuse(False)

    return {Kind.STALL: stall, Kind.DELAY: delay, Kind.RESET: reset, Kind.REFUSE: refuse}


def _of(links: Sequence[Proxy], fault: Fault) -> Proxy:
    return links[(fault.random >> 1) % len(links)]
