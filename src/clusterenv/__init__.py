"""ClusterEnv: Gymnasium environments on a cluster, while the learner stays yours."""

import sys
from typing import TYPE_CHECKING, Any

from clusterenv._version import __version__
from clusterenv.backends import Kubernetes, Local, Loopback, Manual, Ray, Slurm
from clusterenv.backends.contract import Backend
from clusterenv.collector import Collector
from clusterenv.env import ClusterEnv
from clusterenv.errors import ActionError as ActionError  # importable from here as ever; `clusterenv.errors` lists them
from clusterenv.errors import ClosedError as ClosedError
from clusterenv.errors import ClusterEnvError, DeadlineError, EnvError, StartError, WorkerLostError
from clusterenv.errors import CrashLoopError as CrashLoopError
from clusterenv.errors import KeyFileError as KeyFileError
from clusterenv.errors import NotPlainError as NotPlainError
from clusterenv.errors import PolicyError as PolicyError
from clusterenv.errors import ProtocolError as ProtocolError
from clusterenv.errors import SpecError as SpecError
from clusterenv.errors import UsageError as UsageError
from clusterenv.events import Event
from clusterenv.making import make_vec
from clusterenv.policy.acting.base import Policy
from clusterenv.policy.acting.numpy import NumpyPolicy, RandomPolicy
from clusterenv.policy.sync.rules import APS, Always, Every, Never, Standing
from clusterenv.recovery import Recovery
from clusterenv.rollout import Evaluation, Receipt, Rollout
from clusterenv.spec import Vector

if TYPE_CHECKING:  # torch is imported by those who use it: __getattr__ below
    from clusterenv.policy.acting.torch import TorchPolicy

__all__ = [
    "ClusterEnv",
    "make_vec",
    "Collector",
    "Rollout",
    "Receipt",
    "Evaluation",
    "Policy",
    "TorchPolicy",
    "NumpyPolicy",
    "RandomPolicy",
    "APS",
    "Always",
    "Every",
    "Never",
    "Standing",
    "Backend",
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
    "DeadlineError",
    "EnvError",
    "StartError",
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
