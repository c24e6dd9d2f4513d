"""`Manual`: print the command to run on each machine, for other schedulers or for two desktops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clusterenv.backends.contract import Plan
from clusterenv.backends.remote import Remote
from clusterenv.events import instruct


@dataclass(frozen=True)
class Manual(Remote):
    """Print one command per machine, and wait until all have joined.

    Args:
        nodes: number of machines.
        others: as in `Remote`.
    """

    can_reattach: ClassVar[bool] = True

    def launch(self, plan: Plan) -> _ByHand:
        return _ByHand(plan)

    def script(self, plan: Plan) -> str:
        return _line(plan, 0)


def _line(plan: Plan, node: int) -> str:
    return " ".join(["clusterenv node --join", plan.files[node].name, *plan.options])


class _ByHand:
    """Implement `Jobs` that the user starts: a missing node is requested again at once."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._shown = plan, set[int]()
        instruct(
            f"The nodes dial {plan.address}. Copy each key file from {plan.folder} to its machine "
            "(scp keeps it private), and start there:"
        )

    def start(self, node: int) -> None:
        what = f"clusterenv: node {node} is wanted" if node in self._shown else f"  node {node}"
        self._shown.add(node)
        instruct(f"{what}: {_line(self._plan, node)}    # {self._plan.files[node]}")
