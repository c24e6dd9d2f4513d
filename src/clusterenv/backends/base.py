"""The contract of a backend: turn a blueprint into a running pool."""

from __future__ import annotations

from typing import Protocol

from gymnasium.vector import AutoresetMode

from clusterenv.events import EventLog
from clusterenv.pool import Pool
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint

__all__ = ["Backend"]


class Backend(Protocol):
    @property
    def is_remote(self) -> bool:
        """Whether code has to travel to machines that may not have the user's files."""
        ...

    @property
    def allow_pickle(self) -> bool:
        """Whether code may travel at all."""
        ...

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Pool: ...
