"""Plan which faults happen when, from a seed. Pure."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ENVIRONMENT", "LINK", "NETWORK", "NODE", "WORKER", "Fault", "Kind", "plan_faults"]


class Kind(enum.StrEnum):
    """Kinds of faults. Those before STALL need only the processes of the run."""

    KILL = "a worker process is killed"
    STOP = "a worker process is stopped, and goes on later"
    SEGFAULT = "an environment dereferences a null pointer"
    EXIT = "an environment ends its process"
    HANG = "an environment hangs"
    HANG_WITH_GIL = "an environment hangs and holds the interpreter's lock"
    RAISE = "an environment raises"
    NAN = "an environment returns NaN"
    SLOW = "a step of an environment takes long"
    STDERR = "an environment writes much to standard error"
    KILL_NODE = "a node agent is killed"
    STOP_NODE = "a node agent is stopped, and goes on later"
    TERMINATE_NODE = "a node agent is asked to leave"
    STALL = "a link forwards nothing for a while"
    DELAY = "a link is slow for a while"
    RESET = "a connection is reset at some byte"
    REFUSE = "a link is cut, and refuses connections for a while"
    PARTITION = "a machine is cut off for a while, without a sign"
    GARBAGE = "a stranger sends bytes that are no message"
    STRANGER = "a stranger with a key of its own knocks"
    LIE = "a node with a valid key lies"
    DISK_FULL = "the disk of the logs is full for a while"
    CLOCK = "the wall clock of the nodes jumps"


WORKER = (Kind.KILL, Kind.STOP)
ENVIRONMENT = (
    Kind.SEGFAULT,
    Kind.EXIT,
    Kind.HANG,
    Kind.HANG_WITH_GIL,
    Kind.RAISE,
    Kind.NAN,
    Kind.SLOW,
    Kind.STDERR,
)
NODE = (Kind.KILL_NODE, Kind.STOP_NODE, Kind.TERMINATE_NODE)
LINK = (Kind.STALL, Kind.DELAY, Kind.RESET, Kind.REFUSE)
NETWORK = (Kind.GARBAGE, Kind.STRANGER)

_AMOUNTS: dict[Kind, tuple[float, float]] = {
    Kind.STOP: (0.1, 3.0),
    Kind.HANG: (1000.0, 1000.0),
    Kind.HANG_WITH_GIL: (1000.0, 1000.0),
    Kind.SLOW: (0.1, 1.0),
    Kind.STDERR: (1e3, 1e6),
    Kind.STOP_NODE: (0.1, 5.0),
    Kind.STALL: (0.1, 5.0),
    Kind.DELAY: (0.001, 0.2),
    Kind.RESET: (1.0, 1e5),
    Kind.REFUSE: (0.1, 3.0),
    Kind.PARTITION: (0.1, 6.0),
    Kind.GARBAGE: (1.0, 1e5),
    Kind.STRANGER: (1.0, 30.0),
    Kind.DISK_FULL: (1.0, 5.0),
    Kind.CLOCK: (-1e5, 1e5),
}
"""Range of the amount of a fault: seconds, bytes or connections."""


class Fault(NamedTuple):
    at_s: float
    """Time since the start."""
    kind: Kind
    slot: int
    """The fault hits this slot's environment, its worker or its node."""
    amount: float
    """Duration in seconds, bytes or connections, depending on the kind; 0 if the kind has none."""
    random: int
    """Seed for further choices."""

    def __str__(self) -> str:
        amount = f" ({self.amount:.4g})" if self.amount else ""
        return f"{self.at_s:.1f} s: {self.kind.name.lower()} at slot {self.slot}{amount}"


def plan_faults(
    seed: int, seconds: float, *, num_envs: int, kinds: Sequence[Kind], every_s: float = 5.0
) -> list[Fault]:
    """Return faults of these kinds, about one in `every_s`, ordered by time. The same seed gives the same plan.

    Example:
        >>> from clusterenv.testing import chaos
        >>> plan = chaos.plan_faults(7, 60, num_envs=8, kinds=chaos.WORKER + chaos.ENVIRONMENT)
        >>> plan == chaos.plan_faults(7, 60, num_envs=8, kinds=chaos.WORKER + chaos.ENVIRONMENT)
        True
    """
    draw = random.Random(seed)
    plan: list[Fault] = []
    at_s = 0.0
    while (at_s := at_s + draw.uniform(0.5, 1.5) * every_s) < seconds:
        kind = draw.choice(list(kinds))
        amount = draw.uniform(*_AMOUNTS.get(kind, (0.0, 0.0)))
        plan.append(Fault(at_s, kind, draw.randrange(num_envs), amount, draw.getrandbits(32)))
    return plan
