"""`Manual`: prints the command to run on each machine. For schedulers that we do not know, and for two desktops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterenv.backends.remote import Remote
from clusterenv.events import instruct

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clusterenv.backends.cluster import Plan
    from clusterenv.driver import Pool
    from clusterenv.events import EventLog
    from clusterenv.recovery import Recovery
    from clusterenv.spec import Blueprint

__all__ = ["Manual"]


@dataclass(frozen=True)
class Manual(Remote):
    """Prints one command per machine, and waits until all have joined.

    Args:
        nodes: how many machines.
        others: as in `Remote`, which see.
    """

    nodes: int

    def __post_init__(self) -> None:
        self._check(self.nodes)

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Pool:
        return self.start_with(self.nodes, _ByHand, blueprint, mode, recovery, events)


class _ByHand:
    """`Jobs` that the user runs."""

    def __init__(self, plan: Plan) -> None:
        self._lines = [" ".join(["clusterenv node --join", path.name, *plan.options]) for path in plan.files]
        self._files, self._shown = plan.files, set[int]()
        instruct(
            f"The nodes dial {plan.address}. Copy each key file from {plan.folder} to its machine "
            "(scp keeps it private), and start there:"
        )

    @property
    def note(self) -> dict[str, Any]:
        return {}

    def look(self) -> dict[int, str]:
        return {}  # nobody knows

    def has_job(self, node: int) -> bool:
        return False  # the user sees whether it runs, and is told at once

    def start(self, node: int) -> None:
        what = f"clusterenv: node {node} is wanted" if node in self._shown else f"  node {node}"
        self._shown.add(node)
        instruct(f"{what}: {self._lines[node]}    # {self._files[node]}")

    def drop(self, node: int) -> None:
        return None

    def state(self, node: int) -> str:
        return ""

    def log_tail(self, node: int) -> str:
        return "(in the terminal where it was started)"

    def describe(self) -> str:
        return ""

    def stop(self, deadline: float) -> None:
        return None
