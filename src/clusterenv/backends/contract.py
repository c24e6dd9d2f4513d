"""Define the contract of a backend, as small protocols.

`Backend` is what `ClusterEnv` needs from any backend. Backends over a network derive from `Remote`, which implements
it, and add `launch(plan) -> jobs` (`ClusterBackend`). Each further ability of a backend or of its jobs is an optional
protocol. docs/backends.md has an example in one file; `clusterenv.testing.backends` has the tests that every backend
must pass.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from clusterenv.arguments import closest, fits, refused
from clusterenv.backends import registry
from clusterenv.system.exits import NEVER, how_it_ended

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clusterenv.driver import Driver
    from clusterenv.events import EventLog
    from clusterenv.journal import Journal
    from clusterenv.recovery import Recovery
    from clusterenv.spec import Blueprint

_LEASE_S = 60.0
"""The default of `clusterenv node --lease-s`."""


# -- backends -----------------------------------------------------------------------------------------------------


@runtime_checkable
class Backend(Protocol):
    """Where environments run: what `ClusterEnv(backend=...)` takes."""

    @property
    def is_remote(self) -> bool:
        """Whether code is sent to machines that may not have the user's files."""

    @property
    def allow_pickle(self) -> bool:
        """Whether code may be sent at all."""

    def start(
        self,
        blueprint: Blueprint,
        mode: AutoresetMode | None,
        recovery: Recovery,
        events: EventLog,
        journal: Journal | None = None,
    ) -> Driver:
        """Create the environments, and return the driver that steps them. `journal`: from `ClusterEnv(resume=...)`."""


@runtime_checkable
class ClusterBackend(Backend, Protocol):
    """A backend that starts node agents; derive from `Remote`, which implements everything but `launch`."""

    @property
    def nodes(self) -> int:
        """The number of nodes at the start."""

    def launch(self, plan: Plan) -> Jobs:
        """Return the jobs of a run without starting any: `Jobs.start` is called later for each node.

        Called once per run, in the user's thread. Raises `StartError` if the scheduler cannot be used from here.
        `ScheduledJobs.stop` closes whatever this opens.
        """


@runtime_checkable
class PrintsScript(Protocol):
    """Optional: a backend that submits text, which `clusterenv script NAME` prints."""

    def script(self, plan: Plan) -> str:
        """Return the text to submit for node 0 of this plan, whose files need not exist. Has no side effects."""


@runtime_checkable
class CollectsGarbage(Protocol):
    """Optional: a backend whose jobs can outlive a killed head (`LeavesJobs`), until `clusterenv gc` ends them."""

    name: ClassVar[str]
    """The entry point in the group `clusterenv.backends` through which `clusterenv gc` finds the class."""

    @staticmethod
    def collect_garbage(note: Mapping[str, Any], deadline: float) -> str:
        """End what is left of the run whose jobs wrote this note, by `deadline` (monotonic clock).

        Returns one line that says what was ended; jobs that are already gone are not an error. Raises `StartError` if
        something may be left: the note is then kept for the next attempt.
        """


# -- jobs ---------------------------------------------------------------------------------------------------------


class Jobs(Protocol):
    """The node agents of one run. A single thread, the supervisor's, calls `start`, `look`, `drop` and `stop`."""

    def start(self, node: int) -> None:
        """Start the agent of this node (`Plan.command`), for the first time or to replace one that has ended.

        May be slow. If it raises, it is called again some seconds later; during the first starts of a run, the error
        is raised to the user instead.
        """


class Hopeless(str):
    """The reason why a job has ended (`ScheduledJobs.look`), if starting it again would not help."""

    __slots__ = ()


def ended(code: int) -> str:
    """Return the reason that `ScheduledJobs.look` gives for an agent that ended with this exit code."""
    return (Hopeless if code == NEVER else str)(f"ended: {how_it_ended(code)}")


@runtime_checkable
class ScheduledJobs(Jobs, Protocol):
    """Optional: jobs whose state can be queried. Other jobs are started again whenever their node is missing."""

    def look(self) -> dict[int, str]:
        """Return the nodes whose agent is known to have ended, and why. Called twice a second; may be slow, may raise.

        With a `Hopeless` reason, a start that needs this node fails at once; any other job is started again.
        """

    def stop(self, deadline: float) -> None:
        """End everything by `deadline` (monotonic clock). Raises if something may be left.

        Called once, as the last call. Nodes were asked to leave just before, and usually end by themselves.
        """


@runtime_checkable
class CancelsJobs(Protocol):
    """Optional: jobs that can be ended one by one. Other jobs end after their node is asked to leave."""

    def drop(self, node: int) -> None:
        """End the job of this node, which was asked to leave; the job may still be queued."""


@runtime_checkable
class DescribesJobs(Protocol):
    """Optional: jobs that can be described to the user. Called by any thread."""

    def state(self, node: int) -> str:
        """Return the scheduler's state of a node that has not joined ("PENDING (Resources)"); may be empty."""

    def log_tail(self, node: int) -> str:
        """Return the last lines that a node's agent wrote, or where to find them."""

    def describe(self) -> str:
        """Return what was started, in the scheduler's terms."""


@runtime_checkable
class LeavesJobs(Protocol):
    """Optional: jobs that outlive a killed head. Node agents end by themselves; queued jobs and objects do not."""

    def note(self) -> Mapping[str, Any]:
        """Return what `CollectsGarbage.collect_garbage` needs, as JSON without secrets; called before any start."""


# -- arguments of a launch ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a backend needs to start node agents."""

    run: str
    """The run's name, eight hexadecimal digits; used in the names of jobs."""
    folder: Path
    """The run's folder (mode 0700) for logs and for files that nodes read; removed at the end."""
    files: tuple[Path, ...]
    """The key file of each of `max_nodes` nodes. Secret."""
    lease_s: float
    allow_pickle: bool
    address: str
    """The address that nodes dial."""
    closing: threading.Event = field(default_factory=threading.Event)
    """Set when the run ends: a pending call to the scheduler may be abandoned."""
    digests: tuple[str, ...] = ()
    """SHA-256 of each key file, for file systems that show a different owner."""

    def command(self, node: int, python: str | None = None, options: Sequence[str] = ()) -> list[str]:
        """Return the command that starts the agent of this node on a machine that sees the same files."""
        digest = ["--key-sha256", self.digests[node]] if self.digests else []
        return agent_command(self.files[node], [*digest, *self.options, *options], python)

    @property
    def options(self) -> list[str]:
        lease = [] if self.lease_s == _LEASE_S else ["--lease-s", f"{self.lease_s:g}"]
        return [*lease, *([] if self.allow_pickle else ["--no-pickle"])]


def agent_command(key: Path, options: Sequence[str] = (), python: str | None = None) -> list[str]:
    """Return the command that starts a node agent; `python`: an interpreter other than this one."""
    return [python or sys.executable, "-m", "clusterenv", "node", "--join", str(key), *options]


def check_backend(backend: Any) -> None:
    """Raise SpecError unless this is a backend."""
    if fits(backend, Backend):
        return
    hint = ""
    if isinstance(backend, type):
        hint = f"this is the class, write backend={registry.written(backend)}"
    elif isinstance(backend, str) and (name := closest(backend, registry.names())) is not None:
        hint = f"write backend={registry.written(registry.find(name))}"
    known = ", ".join(registry.written(registry.find(name)) for name in registry.OWN)
    raise refused("ClusterEnv", "backend", backend, f"a backend such as {known}", hint)
