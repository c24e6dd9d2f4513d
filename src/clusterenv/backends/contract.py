"""The contract of a backend: turn a blueprint into a running pool."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from gymnasium.vector import AutoresetMode

from clusterenv.arguments import closest, fits, refused
from clusterenv.driver import Pool
from clusterenv.events import EventLog
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint

__all__ = ["Backend", "check_backend"]

_WRITTEN = {
    "Local": "Local()",
    "Manual": "Manual(nodes=...)",
    "Slurm": "Slurm(nodes=...)",
    "Kubernetes": "Kubernetes(nodes=..., image=...)",
    "Ray": "Ray(nodes=...)",
}


@runtime_checkable
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


def check_backend(backend: Any) -> None:
    """Raise SpecError unless this is a backend."""
    if fits(backend, Backend):
        return
    hint = ""
    if isinstance(backend, type):
        hint = f"this is the class, write backend={_WRITTEN.get(backend.__name__, f'{backend.__name__}(...)')}"
    elif isinstance(backend, str) and (name := closest(backend, _WRITTEN)) is not None:
        hint = f"write backend={_WRITTEN[name]}"
    raise refused("ClusterEnv", "backend", backend, f"a backend such as {', '.join(_WRITTEN.values())}", hint)
