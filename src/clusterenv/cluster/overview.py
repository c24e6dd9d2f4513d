"""Describe the nodes of a run for those who watch it. Any thread may call it: it only reads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from clusterenv.cluster.roster import NodeState
from clusterenv.system.host_load import HostSample

if TYPE_CHECKING:
    from clusterenv.cluster.head import Head

__all__ = ["NodeView", "overview"]


class NodeView(NamedTuple):
    """One node, as the head knows it."""

    node: int
    state: str
    """"joined", "missing", "unfit" or "released"."""
    scheduler: str
    """The scheduler's state of its job, if the backend can tell."""
    job: str
    host_name: str
    pid: int | None
    ends_at: float | None
    silent_s: float | None
    load: HostSample | None
    sent_bytes: int
    received_bytes: int


def overview(head: Head) -> list[NodeView]:
    """Return every node that takes part in the run, or has."""
    roster, traffic, now = head.roster, head.traffic, time.monotonic()
    views = []
    for node in range(roster.num_nodes):
        is_here = roster.state(node) is NodeState.ACTIVE
        hello = head.admission.hello(node)
        state = "joined" if is_here else "unfit" if roster.state(node) is NodeState.UNFIT else "missing"
        if not roster.is_invited(node):
            if hello is None:
                continue
            state = "released"
        views.append(
            NodeView(
                node,
                state,
                "" if is_here or state == "released" else head.job_state(node),
                "" if hello is None else hello.job,
                "" if hello is None else hello.host,
                None if hello is None else hello.pid,
                hello.ends_at if hello is not None and is_here else None,
                now - roster.heard_at(node) if is_here else None,
                head.progress.loads.get(node) if is_here else None,
                traffic.sent_bytes[node],
                traffic.received_bytes[node],
            )
        )
    return views
