"""ClusterEnv: Gymnasium environments on a cluster, while the learner stays yours."""

import sys
from typing import TYPE_CHECKING, Any

from clusterenv._version import __version__
from clusterenv.backends import Kubernetes, Local, Loopback, Manual, Ray, Slurm
from clusterenv.collector import Collector
from clusterenv.env import ClusterEnv
from clusterenv.errors import (
    ActionError,
    ClosedError,
    ClusterEnvError,
    CrashLoopError,
    DeadlineError,
    EnvError,
    KeyFileError,
    NotPlainError,
    PolicyError,
    ProtocolError,
    SpecError,
    StartError,
    UsageError,
    WorkerLostError,
)
from clusterenv.events import Event
from clusterenv.making import make_vec
from clusterenv.policy.acting.numpy import NumpyPolicy, RandomPolicy
from clusterenv.policy.sync.rules import APS, Always, Every, Never
from clusterenv.recovery import Recovery
from clusterenv.rollout import Rollout
from clusterenv.spec import Vector

if TYPE_CHECKING:  # torch is imported by those who use it: __getattr__ below
    from clusterenv.policy.acting.torch import TorchPolicy

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
    "Loopback",
    "Manual",
    "Slurm",
    "Ray",
    "Kubernetes",
    "Recovery",
    "Vector",
    "Event",
    "ClusterEnvError",
    "ActionError",
    "ClosedError",
    "CrashLoopError",
    "DeadlineError",
    "EnvError",
    "KeyFileError",
    "NotPlainError",
    "PolicyError",
    "ProtocolError",
    "SpecError",
    "StartError",
    "UsageError",
    "WorkerLostError",
    "__version__",
]


if not TYPE_CHECKING:  # or a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "TorchPolicy":
            from clusterenv.policy.acting.torch import TorchPolicy

            return TorchPolicy
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted(__all__)
