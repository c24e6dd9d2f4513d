"""What the doctor finds: a `Finding` names a cause, its subject, the evidence, and what to do. Plain data."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Cause", "Evidence", "Finding", "Severity", "Subject"]

Evidence = dict[str, float | int | str]
"""Name of what was measured → its value; the names end with their unit."""


class Severity(enum.Enum):
    """How much a finding matters; the order is that of the list."""

    ERROR = "error"
    """Something is dead or does not return: the run waits for it, or loses its rows."""
    WARNING = "warning"
    """The run is slower, or its data staler, than it should be."""
    ADVICE = "advice"
    """Nothing is wrong; another setting would be faster."""


class Cause(enum.Enum):
    """Why something is slow, stale or dead."""

    HEAD_STOPPED = "the script's process is stopped"
    WORKER_STOPPED = "a worker's process is stopped"
    ENV_HANGS = "an environment does not return from one call"
    CRASH_LOOP = "an environment or worker fails again and again"
    LOSS = "an environment or worker failed"
    WORKER_ABSENT = "a worker has no process"
    NODE_PREEMPTED = "the scheduler took a node away"
    NODE_LOST = "a node is gone"
    NODE_SILENT = "a node sends nothing"
    NODE_REFUSED = "a node cannot run the environments"
    PENDING = "the scheduler has not started a node"
    SCHEDULER_LOST = "the scheduler does not answer"
    SWAPPING = "a machine moves memory to and from disk"
    CPU_THROTTLED = "a control group's CPU quota throttles the workers"
    OVERSUBSCRIBED = "more processes want to run than there are cores"
    SLOW_ENV = "one environment's steps take long"
    SLOW_RESET = "resets take long"
    SLOW_WORKER = "one worker is slower than the others in everything"
    ENV_WAITS = "the environments wait instead of computing"
    MEMORY_GROWS = "the memory of workers grows"
    CHILD_PROCESSES = "processes of environments take the cores"
    SLOW_LINK = "the link to a node is slow"
    WAITING_FOR_WEIGHTS = "workers wait for weights"
    STALE_WEIGHTS = "workers act with old weights"
    NEVER_PUBLISHED = "no new weights are published"
    INVALID_ROWS = "rows are invalid"
    MISSING_KEY = "infos do not have a key that was asked for"
    NOT_WRITTEN = "a log or journal cannot be written"
    DAMAGED = "weights arrived damaged, or were refused"
    LEARNER = "workers wait for the learner"
    POLICY = "the policy takes most of the workers' time"
    LOCKSTEP = "all workers wait for the slowest"
    STARTING = "the run is starting"


class Subject(msgspec.Struct, frozen=True):
    """What a finding is about: the run, or a numbered node, worker or slot."""

    kind: str = "run"
    """"run", "node", "worker" or "slot"."""
    number: int | None = None

    def __str__(self) -> str:
        return self.kind if self.number is None else f"{self.kind} {self.number}"


class Finding(msgspec.Struct, frozen=True):
    """One cause, with what shows it."""

    severity: Severity
    cause: Cause
    subject: Subject
    text: str
    """One line: what is wrong."""
    advice: str
    """What to do."""
    evidence: Evidence = {}
    lost: float = 0.0
    """Estimated share of the run's throughput that it costs, between 0 and 1."""
    workers: tuple[int, ...] = ()
    """Workers that it slows down or stops."""
    detail: str = ""
    """Traceback or stack, if there is one."""
