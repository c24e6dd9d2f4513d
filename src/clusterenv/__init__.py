"""ClusterEnv: Gymnasium environments on a cluster, while the learner stays yours."""

from typing import Any

from clusterenv.backends import Local
from clusterenv.batch import Rollout
from clusterenv.collector import Collector
from clusterenv.env import ClusterEnv, make_vec
from clusterenv.errors import (
    ActionError,
    ClosedError,
    ClusterEnvError,
    CrashLoopError,
    DeadlineError,
    EnvError,
    PolicyError,
    SpecError,
    UsageError,
    WorkerLostError,
)
from clusterenv.events import Event
from clusterenv.policy.numpy import NumpyPolicy, RandomPolicy
from clusterenv.policy.sync import APS, Always, Every, Never
from clusterenv.recovery import Recovery
from clusterenv.spec import Vector

__version__ = "0.1.0"

__all__ = [
    "ClusterEnv",
    "make_vec",
    "Collector",
    "Rollout",
    "TorchPolicy",
    "NumpyPolicy",
    "RandomPolicy",
    "APS",
    "Always",
    "Every",
    "Never",
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
    "PolicyError",
    "SpecError",
    "UsageError",
    "WorkerLostError",
]


def __getattr__(name: str) -> Any:
    if name == "TorchPolicy":  # torch is imported by those who use it
        from clusterenv.policy.torch import TorchPolicy

        return TorchPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
