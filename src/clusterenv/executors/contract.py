"""The contract between a pool and whoever does its I/O: workers that are started, told things, and heard.

`ProcessCrew` has them on this machine, `InlineCrew` in this process, `RemoteCrew` on the machines of a cluster. The
pool reads and writes one block of memory for rows and one for fragments; that workers elsewhere see the same is the
crew's business.
"""

from __future__ import annotations

from typing import Any, Protocol

from clusterenv.engine.requests import Request
from clusterenv.engine.weights import Transfer
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.rows import Layout

__all__ = ["Crew"]


class Crew(Protocol):
    is_inline: bool

    def can_start(self, index: int) -> bool:
        """Whether there is a place for this worker now."""
        ...

    def start(self, index: int) -> None: ...
    def allocate(self, layout: Layout) -> Any: ...
    def allocate_arena(self, layout: ArenaLayout) -> Any: ...
    def put_weights(self, transfer: Transfer) -> bool:
        """Bring weights to where the workers of their machine read them. True: they lie there now; otherwise `wait`
        reports what becomes of them (`WeightsSent`, `WeightsHeld`, `WeightsRefused`)."""
        ...

    def send(self, index: int, message: Any, request: Request | None = None) -> None:
        """Send a message; `request`: the ledger's entry for it, None where nothing is answered."""
        ...

    def ring(self, request: int) -> None:
        """The hot loop's request to every worker: step all your slots."""
        ...

    def take(self, index: int) -> list[Any]:
        """What this worker says next; empty where it says nothing for a while, or is gone: `wait` tells."""
        ...

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        """(worker, message) pairs; an int is a quick reply, an `Exit` the end of that worker, and -1 stands for none.
        May be empty."""
        ...

    def progress(self, index: int) -> tuple[int, int, int]: ...
    def stats(self) -> dict[str, Any]:
        """What only this kind of crew counts."""
        ...

    def scale(self, nodes: int) -> None:
        """Run on so many machines; UsageError where there is one."""
        ...

    def need_packages(self, names: tuple[str, ...]) -> None:
        """Raise PolicyError where a machine does not have these packages, or not in versions that fit those here."""
        ...

    def is_leaving(self, index: int) -> bool:
        """It goes on elsewhere as soon as what it was asked is done: ask no more fragments of it."""
        ...

    def is_running(self, index: int) -> bool: ...
    def pid(self, index: int) -> int | None: ...
    def kill(self, index: int) -> None: ...
    def stack(self, index: int) -> None:
        """Ask where this worker is; answered by a `Stack`, unless it ends before."""
        ...

    def close(self, timeout_s: float) -> None: ...
