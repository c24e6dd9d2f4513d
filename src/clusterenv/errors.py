"""Define all exceptions. Each message says whose fault it is, which slot or worker, and what to do next.

Errors also inherit from the matching built-in or Gymnasium class, so that code written for Gymnasium
(`except ValueError`, `except ClosedEnvironmentError`) keeps working.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError


class ClusterEnvError(Exception):
    """The base class of all errors that this package raises deliberately."""

    def __reduce__(self) -> Any:
        # By default, unpickling calls the class with `args` alone. That fails if it has keyword arguments too, and
        # breaks a process pool whose task raises such an error.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[ClusterEnvError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ClusterEnvError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class SpecError(ClusterEnvError, ValueError):
    """An argument has the wrong type or value, or the environments do not fit together."""


class ArgumentTypeError(SpecError, TypeError):
    """An argument has a type for which Gymnasium raises TypeError."""


class SpacesError(SpecError, RuntimeError):
    """The environments' spaces do not fit together."""


class ActionError(ClusterEnvError, ValueError):
    """The actions do not fit the action space. No environment was stepped."""


class ActionTypeError(ActionError, TypeError):
    """The actions are not a batch. No environment was stepped."""


class UsageError(ClusterEnvError, RuntimeError):
    """The call is not possible in this state (step before reset, a step still in flight)."""


class ClosedError(UsageError, ClosedEnvironmentError):
    """The environments were closed."""


class PendingCallError(AlreadyPendingCallError, UsageError):
    """A call was made while another one is pending.

    Attributes:
        name: the pending call: "step" (from `send` or `step_async`), "reset", "call", "rollout" or "stream".
    """


class NoPendingCallError(NoAsyncCallError, UsageError):
    """The results of a call were requested, but no such call is pending.

    Attributes:
        name: the call that must be pending: "step" (for `recv` too), "reset" or "call".
    """


class EnvError(ClusterEnvError, RuntimeError):
    """The user's environment raised, or returned values that its spaces do not allow.

    Attributes:
        slot: global index of the environment.
        phase: "init", "reset", "step", "call" or "evaluate".
        remote_traceback: the worker's traceback, as text.
    """

    def __init__(self, message: str, *, slot: int, phase: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.slot = slot
        self.phase = phase
        self.remote_traceback = remote_traceback


class PolicyError(ClusterEnvError, ValueError):
    """The policy cannot act here: its shape is unknown, its outputs do not fit, or it failed on a worker.

    Attributes:
        remote_traceback: the worker's traceback, as text, if it failed on a worker.
    """

    def __init__(self, message: str, *, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback


class CrashLoopError(ClusterEnvError, RuntimeError):
    """A slot or worker failed too often; the message has its history."""


class WorkerLostError(ClusterEnvError, RuntimeError):
    """A worker died and was not, or could not be, replaced.

    Attributes:
        slots: the slots that it ran.
        rows: the rows of the other slots, if the call had any: `(obs, rewards, terminations, truncations, infos)`.
    """

    def __init__(self, message: str, *, slots: tuple[int, ...], rows: Any = None) -> None:
        super().__init__(message)
        self.slots = slots
        self.rows = rows


class DeadlineError(ClusterEnvError, TimeoutError, multiprocessing.TimeoutError):
    """A call's deadline passed. The message names the awaited slots or workers; the request is still pending."""


class StartError(ClusterEnvError, RuntimeError):
    """The workers or nodes could not be started. The message names a limit of the machine, or the missing nodes with
    their state."""


class JournalError(StartError):
    """The file that `resume=` names cannot be used: another head uses it, it is damaged, or it cannot be written."""


class KeyFileError(ClusterEnvError, OSError):
    """Other users can read a key file, or could have created it. Nothing was started with it."""


class NotPlainError(ClusterEnvError, TypeError):
    """A value to send over the network is not plain data; the message says where it is."""


class ProtocolError(ClusterEnvError, ValueError):
    """The peer sent something that the protocol does not allow."""
