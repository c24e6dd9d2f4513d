"""ClusterEnv: Gymnasium environments on a cluster, while the learner stays yours."""

from clusterenv.backends import Local
from clusterenv.env import ClusterEnv, make_vec
from clusterenv.errors import (
    ActionError,
    ClosedError,
    ClusterEnvError,
    CrashLoopError,
    DeadlineError,
    EnvError,
    SpecError,
    UsageError,
    WorkerLostError,
)
from clusterenv.events import Event
from clusterenv.recovery import Recovery
from clusterenv.spec import Vector

__version__ = "0.1.0"

__all__ = [
    "ClusterEnv",
    "make_vec",
    "Local",
    "Recovery",
    "Vector",
    "Event",
    "ClusterEnvError",
    "ActionError",
    "ClosedError",
    "CrashLoopError",
    "DeadlineError",
    "EnvError",
    "SpecError",
    "UsageError",
    "WorkerLostError",
]
