"""ClusterEnv: Gymnasium environments on a cluster, while the learner stays yours.

Names are imported on first use: a worker process imports this package too, and needs nothing of the head.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clusterenv import backends as backends
    from clusterenv import errors as errors
    from clusterenv.backends.command import Command
    from clusterenv.backends.contract import Backend
    from clusterenv.backends.kubernetes import Kubernetes
    from clusterenv.backends.local import Local
    from clusterenv.backends.loopback import Loopback
    from clusterenv.backends.manual import Manual
    from clusterenv.backends.ray import Ray
    from clusterenv.backends.slurm import Slurm
    from clusterenv.collector import Collector
    from clusterenv.env import ClusterEnv
    from clusterenv.errors import ActionError as ActionError
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
    from clusterenv.integrations.loggers import log_to
    from clusterenv.making import make_vec
    from clusterenv.policy.acting.base import Policy
    from clusterenv.policy.acting.numpy import NumpyPolicy, RandomPolicy
    from clusterenv.policy.acting.torch import TorchPolicy
    from clusterenv.policy.sync.rules import APS, Always, Every, Never, Standing
    from clusterenv.recovery import Recovery
    from clusterenv.rollout import Evaluation, Receipt, Rollout
    from clusterenv.spec import Vector

__all__ = [
    "ClusterEnv",
    "make_vec",
    "Collector",
    "Rollout",
    "Receipt",
    "Evaluation",
    "log_to",
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
    "Command",
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


_MODULES = {
    "backends.command": ("Command",),
    "backends.contract": ("Backend",),
    "backends.kubernetes": ("Kubernetes",),
    "backends.local": ("Local",),
    "backends.loopback": ("Loopback",),
    "backends.manual": ("Manual",),
    "backends.ray": ("Ray",),
    "backends.slurm": ("Slurm",),
    "collector": ("Collector",),
    "env": ("ClusterEnv",),
    "errors": ("ClusterEnvError", "DeadlineError", "EnvError", "StartError", "WorkerLostError"),
    "events": ("Event",),
    "integrations.loggers": ("log_to",),
    "making": ("make_vec",),
    "policy.acting.base": ("Policy",),
    "policy.acting.numpy": ("NumpyPolicy", "RandomPolicy"),
    "policy.acting.torch": ("TorchPolicy",),
    "policy.sync.rules": ("APS", "Always", "Every", "Never", "Standing"),
    "recovery": ("Recovery",),
    "rollout": ("Evaluation", "Receipt", "Rollout"),
    "spec": ("Vector",),
}
_UNLISTED_ERRORS = (
    "ActionError",
    "ClosedError",
    "CrashLoopError",
    "KeyFileError",
    "NotPlainError",
    "PolicyError",
    "ProtocolError",
    "SpecError",
    "UsageError",
)
"""Importable from here, but not in `__all__`; `clusterenv.errors` lists them."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_MODULE_OF |= dict.fromkeys(_UNLISTED_ERRORS, "errors")

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in ("backends", "errors"):
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
