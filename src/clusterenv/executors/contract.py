"""The contract between the driver and its executor, which starts workers, sends them requests, and receives answers.

`ProcessExecutor` runs them on this machine, `InlineExecutor` in this process, `RemoteExecutor` on the machines of a
cluster. The driver reads and writes one block of memory for rows and one for fragments; the executor ensures that
workers on other machines see the same. What only some executors can do has separate contracts: `Processes`, `Nodes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from clusterenv.cluster.overview import NodeView
from clusterenv.engine.collecting.weights import Transfer
from clusterenv.engine.requests import Request
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.rows import Layout
from clusterenv.wire.requests import Reply

__all__ = ["Executor", "Nodes", "Printed", "Processes", "is_plain"]


class Printed(NamedTuple):
    """What a worker wrote to its stdout and stderr: whole lines."""

    text: str
    dropped: int
    """Number of lines before these that were dropped, because nobody read them in time."""


class Executor(Protocol):
    @property
    def processes(self) -> Processes | None:
        """Operations on worker processes; None if the calling process is the worker."""
        ...

    @property
    def nodes(self) -> Nodes | None:
        """Operations on the nodes of a cluster; None if there is only this machine."""
        ...

    def start(self, index: int) -> None: ...
    def is_running(self, index: int) -> bool: ...
    def allocate(self, layout: Layout) -> Any: ...
    def allocate_arena(self, layout: ArenaLayout) -> Any: ...
    def put_weights(self, transfer: Transfer) -> bool:
        """Transfer weights to where the workers of their machine read them. True: they have arrived; otherwise `poll`
        reports the progress (`WeightsSent`, `WeightsHeld`, `WeightsRefused`)."""
        ...

    def send(self, index: int, message: Any, request: Request | None = None) -> None:
        """Send a message; `request`: its entry in the ledger, None if it is not answered."""
        ...

    def step_all(self, number: int) -> tuple[int, list[tuple[int, Any]]] | None:
        """Make every worker step all its slots, and wait for their answers unless something unusual happens.

        Returns None if every worker answered with the bare number. Otherwise the number of workers, counted from the
        first, that have done the step, and the messages received: replies of workers that are done bring infos or
        objects, those of others are unusual. All other messages come with `poll`; after an exception, all messages do.
        Returns early, without losing anything, when a Ctrl-C is pending.
        """
        ...

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Return (worker, message) pairs, possibly none: an int is a quick reply, an `Exit` the end of that worker.
        Worker -1: the message is not about a worker."""
        ...

    def progress(self, index: int) -> tuple[int, int, int]:
        """Return (slot, phase, step of a fragment) that the worker is in; slot -1 before the first."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return this executor's own counters."""
        ...

    def close(self, timeout_s: float) -> None: ...


class Processes(Protocol):
    """Operations on workers that are separate processes."""

    def pid(self, index: int) -> int | None: ...
    def kill(self, index: int) -> None:
        """Kill a hung worker; its `Exit` says where it hung."""
        ...

    def stack(self, index: int) -> None:
        """Request the worker's stack; answered by a `Stack`, unless the worker ends first."""
        ...


class Nodes(Protocol):
    """Operations that only clusters have."""

    def can_start(self, index: int) -> bool:
        """Return whether there is a node for this worker now."""
        ...

    def is_leaving(self, index: int) -> bool:
        """Return whether this worker moves once its requests are done: request no more fragments from it."""
        ...

    def scale(self, nodes: int) -> None:
        """Run on this number of machines."""
        ...

    def overview(self) -> list[NodeView]:
        """Describe the nodes. Any thread may call this and the next one."""
        ...

    def log_tail(self, node: int) -> str:
        """Return the last lines that a node's agent wrote, or where to find them."""
        ...

    def need_packages(self, names: tuple[str, ...]) -> None:
        """Raise PolicyError if a machine lacks these packages, or has versions that do not fit those here."""
        ...


def is_plain(message: Any, number: int) -> bool:
    """Return whether this answers a whole step, without faults."""
    if message == number:
        return True
    return isinstance(message, Reply) and message.request == number and message.last and not message.faults
