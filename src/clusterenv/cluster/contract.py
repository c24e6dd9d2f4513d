"""What a backend passes to the head: its timing, and a supervisor that starts nodes."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Timing(NamedTuple):
    beat_s: float
    dead_after_s: float
    lease_s: float
    move_after_s: float | None


class Supervisor(Protocol):
    """Starts nodes and lets them go. No method may block."""

    over: dict[int, str]  # nodes whose agent has ended, and why

    def want(self, node: int) -> None: ...

    def let_go(self, node: int) -> None: ...
