"""What the head is given by a backend: its times, and who has nodes started."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Timing(NamedTuple):
    beat_s: float
    dead_after_s: float
    lease_s: float
    move_after_s: float | None


class Supervisor(Protocol):
    """Who has nodes started and let go. Nothing here may wait."""

    over: dict[int, str]
    """Nodes whose agent is known to be over, and why."""

    def want(self, node: int) -> None: ...

    def let_go(self, node: int) -> None: ...
