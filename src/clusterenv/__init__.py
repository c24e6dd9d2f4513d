"""ClusterEnv: Gymnasium environments on a cluster, while the learner stays yours."""

from typing import Any

from clusterenv._version import __version__
from clusterenv.backends import Kubernetes, Local, Manual, Ray, Slurm
from clusterenv.batch import Rollout
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
from clusterenv.policy.numpy import NumpyPolicy, RandomPolicy
from clusterenv.policy.sync import APS, Always, Every, Never
from clusterenv.recovery import Recovery
from clusterenv.spec import Vector

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


def __getattr__(name: str) -> Any:
    if name == "TorchPolicy":  # torch is imported by those who use it
        from clusterenv.policy.torch import TorchPolicy

        return TorchPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
