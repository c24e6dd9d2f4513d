"""The contract between the driver and whoever does its I/O: workers that are started, asked, and heard.

`ProcessExecutor` has them on this machine, `InlineExecutor` in this process, `RemoteExecutor` on the machines of a
cluster. The driver reads and writes one block of memory for rows and one for fragments; the executor sees to it that
workers elsewhere see the same. What only some executors can do stands in contracts of its own: `Processes`, `Nodes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

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
    """Lines before these that were dropped, because nobody read them in time."""


class Executor(Protocol):
    @property
    def processes(self) -> Processes | None:
        """Workers as processes that can be watched and ended; None where the caller's process is the worker."""
        ...

    @property
    def nodes(self) -> Nodes | None:
        """The machines of a cluster; None where there is only this one."""
        ...

    def start(self, index: int) -> None: ...
    def is_running(self, index: int) -> bool: ...
    def allocate(self, layout: Layout) -> Any: ...
    def allocate_arena(self, layout: ArenaLayout) -> Any: ...
    def put_weights(self, transfer: Transfer) -> bool:
        """Bring weights to where the workers of their machine read them. True: they lie there now; otherwise `poll`
        reports what becomes of them (`WeightsSent`, `WeightsHeld`, `WeightsRefused`)."""
        ...

    def send(self, index: int, message: Any, request: Request | None = None) -> None:
        """Send a message; `request`: the ledger's entry for it, None where nothing is answered."""
        ...

    def step_all(self, number: int) -> tuple[int, list[tuple[int, Any]]] | None:
        """Have every worker step all its slots, and wait for their answers as long as all is well.

        Returns None when every worker answered with the bare number. Otherwise the number of workers, counted from the
        first, that have done the step, and the messages heard: replies of workers that are done bring infos or objects,
        those of others are something unusual. What is not in there comes with `poll`; after an exception, all of it.
        Ends early, in order, when a Ctrl-C is pending.
        """
        ...

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        """(worker, message) pairs; an int is a quick reply, an `Exit` the end of that worker, and -1 stands for none.
        May be empty."""
        ...

    def progress(self, index: int) -> tuple[int, int, int]:
        """(slot, phase, step of a fragment) that the worker is in; slot -1 before it began."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return this executor's own counters."""
        ...

    def close(self, timeout_s: float) -> None: ...


class Processes(Protocol):
    """Workers that are processes of their own."""

    def pid(self, index: int) -> int | None: ...
    def kill(self, index: int) -> None:
        """End a hung worker; where it hung comes with its `Exit`."""
        ...

    def stack(self, index: int) -> None:
        """Ask where this worker is; answered by a `Stack`, unless it ends before."""
        ...


class Nodes(Protocol):
    """What only clusters can do."""

    def can_start(self, index: int) -> bool:
        """Whether there is a place for this worker now."""
        ...

    def is_leaving(self, index: int) -> bool:
        """It goes on elsewhere as soon as what it was asked is done: ask no more fragments of it."""
        ...

    def scale(self, nodes: int) -> None:
        """Run on so many machines."""
        ...

    def need_packages(self, names: tuple[str, ...]) -> None:
        """Raise PolicyError where a machine does not have these packages, or not in versions that fit those here."""
        ...


def is_plain(message: Any, number: int) -> bool:
    """Whether this answers a whole step, with nothing wrong in it."""
    if message == number:
        return True
    return isinstance(message, Reply) and message.request == number and message.last and not message.faults
