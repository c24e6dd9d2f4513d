"""What is known about a run at one moment: `Sample` and its parts, as plain data that can be written as JSON.

`collect.py` makes them in the head; the history keeps them; the page, `top`, `doctor`, Prometheus and the report read
them. Times are seconds, sizes bytes, shares between 0 and 1. None: not known.
"""

from __future__ import annotations

from typing import Any

import msgspec

from clusterenv.system.host_load import HostSample

__all__ = ["EventRecord", "FragmentRecord", "HostSample", "NodeSample", "Point", "RunInfo", "Sample", "WorkerSample"]


class RunInfo(msgspec.Struct, frozen=True):
    """What does not change during a run."""

    name: str
    env: str
    """The environment's id, or the name of what makes it."""
    num_envs: int
    backend: str
    host: str
    pid: int
    command: str
    began_at: float
    """Unix time."""
    version: str
    """Of clusterenv."""


class NodeSample(msgspec.Struct, frozen=True):
    """A machine of the run; `Local()` has one, the head's own."""

    node: int
    state: str
    """"joined", "missing" (it was there, or is to come), "released"."""
    scheduler: str = ""
    """The scheduler's state of its job with the reason, such as "PENDING (Resources)"."""
    job: str = ""
    host_name: str = ""
    pid: int | None = None
    time_left_s: float | None = None
    """Until the scheduler ends its job."""
    silent_s: float | None = None
    """Since its last message."""
    host: HostSample | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    version: int | None = None
    """Version of the weights that it has."""
    drift: float | None = None
    drift_se: float | None = None
    pulls: int = 0
    forms: dict[str, int] = {}
    """Codec → number of pulls."""
    weight_bytes: int = 0
    lags: dict[int, int] = {}
    """Versions behind the newest → number of fragments."""


class WorkerSample(msgspec.Struct, frozen=True):
    """A worker process."""

    worker: int
    node: int
    slots: tuple[int, int]
    """Its first and its last slot."""
    state: str
    """"running", "absent" or "killed"."""
    pid: int | None = None
    slot: int | None = None
    """Which of its environments it is in, if in any."""
    phase: str = ""
    """What it does there: "init", "reset", "step", "call" or "policy"."""
    stuck_s: float = 0.0
    """How long it has shown the same progress while something was requested from it."""
    is_busy: bool = False
    """Something is requested from it. In a step of all slots, this is seen after a quarter of a second."""
    step_s: float | None = None
    """Time for one step of all its slots, in recent fragments."""
    steps_per_s: float | None = None
    environment: float | None = None
    """Share of its recent time in its environments; below, in the policy and waiting."""
    policy: float | None = None
    waiting: float | None = None
    losses: int = 0
    """How often its process ended, or one of its environments failed."""
    cpu: float | None = None
    """Share of one core that its process used; of local workers only, like the memory."""
    memory: int | None = None


class FragmentRecord(msgspec.Struct, frozen=True):
    """A fragment of a rollout or stream, for the timeline."""

    worker: int
    asked_at: float
    arrived_at: float
    """Unix times."""
    environment_s: float
    policy_s: float
    num_steps: int
    version: int | None = None


class EventRecord(msgspec.Struct, frozen=True):
    """An `Event` as plain data; `number` counts the events of the run."""

    number: int
    kind: str
    reason: str
    time_s: float
    slots: tuple[int, ...] = ()
    worker: int | None = None
    phase: str | None = None
    seed: int | None = None
    incarnation: int | None = None
    step: int | None = None
    detail: str = ""


class Point(msgspec.Struct, frozen=True):
    """One moment of the history: the numbers that are drawn over time."""

    time_s: float
    """Unix time."""
    steps: int = 0
    steps_per_s: float = 0.0
    """Over the time since the last point."""
    environment: float | None = None
    policy: float | None = None
    waiting: float | None = None
    episodes: int = 0
    episode_return: float | None = None
    """Mean of the last 100 episodes, as the length below."""
    episode_length: float | None = None
    version: int | None = None
    held_version: int | None = None
    drift: float | None = None
    drift_se: float | None = None
    threshold: float | None = None
    """Drift above which the rule pulls."""
    pulls: int = 0
    weight_bytes: int = 0
    pushed_bytes: int = 0
    """What `Always` with whole weights would have sent at the same requests."""
    fragment_bytes: int = 0
    invalid_rows: int = 0
    losses: int = 0
    """How often a worker process ended, or an environment failed."""
    sent_bytes: int = 0
    received_bytes: int = 0
    cpu: float | None = None
    """Share of the head's cores."""
    memory: int | None = None
    """Of the head's process."""


class Sample(msgspec.Struct, frozen=True):
    """Everything about the present moment."""

    point: Point
    call: str
    """The call that the script is in: "step", "rollout", "stream", ..., or "" (the learner works)."""
    call_s: float
    """How long it has been in it, or out of any."""
    nodes: list[NodeSample]
    workers: list[WorkerSample]
    step_s: list[float]
    """Of each slot, for one step; 0: not measured."""
    incarnations: list[int]
    slow: list[int]
    """Slots that are much slower than the others."""
    last_loss: dict[int, str]
    """Slot → reason of its last loss."""
    event_counts: dict[str, int]
    policy: dict[str, Any] = {}
    """`collector.stats()["policy"]`: family, runtime, reason."""
    is_over: bool = False
    """The run has ended."""
