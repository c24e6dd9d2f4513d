"""All exceptions: each message says whose fault it is, which slot or worker, and what to do next.

Errors also inherit from the matching built-in or Gymnasium class, so that code written for Gymnasium
(`except ValueError`, `except ClosedEnvironmentError`) keeps working.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError


class ClusterEnvError(Exception):
    """Root of everything that this package raises on purpose."""

    def __reduce__(self) -> Any:
        # By default the class is called with `args`, which fails where it has keyword arguments too, and breaks a
        # process pool whose task raises such an error.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[ClusterEnvError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ClusterEnvError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class SpecError(ClusterEnvError, ValueError):
    """An argument is of the wrong kind or value, or the environments do not fit together (a thunk, their spaces)."""


class ArgumentTypeError(SpecError, TypeError):
    """An argument is of a type for which Gymnasium raises TypeError."""


class SpacesError(SpecError, RuntimeError):
    """The environments' spaces do not fit together."""


class ActionError(ClusterEnvError, ValueError):
    """The actions do not fit the action space. No environment was stepped."""


class ActionTypeError(ActionError, TypeError):
    """The actions are not a batch at all. No environment was stepped."""


class UsageError(ClusterEnvError, RuntimeError):
    """A call is not possible in this state (step before reset, a step still in flight)."""


class ClosedError(UsageError, ClosedEnvironmentError):
    """The environments were closed."""


class PendingCallError(AlreadyPendingCallError, UsageError):
    """A call came while another one is pending.

    Attributes:
        name: the pending one: "step" (from `send` or `step_async`), "reset", "call", "rollout" or "stream".
    """


class NoPendingCallError(NoAsyncCallError, UsageError):
    """The results of a call were asked for that is not pending.

    Attributes:
        name: the call that would have to be pending: "step" (for `recv` too), "reset" or "call".
    """


class EnvError(ClusterEnvError, RuntimeError):
    """The user's environment raised, or returned what its spaces do not allow.

    Attributes:
        slot: global index of the environment.
        phase: "init", "reset", "step" or "call".
        remote_traceback: the traceback of the worker, as text.
    """

    def __init__(self, message: str, *, slot: int, phase: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.slot = slot
        self.phase = phase
        self.remote_traceback = remote_traceback


class PolicyError(ClusterEnvError, ValueError):
    """The policy cannot act here: its shape is not known, its outputs do not fit, or it failed on a worker.

    Attributes:
        remote_traceback: the traceback of the worker, as text, where it failed there.
    """

    def __init__(self, message: str, *, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback


class CrashLoopError(ClusterEnvError, RuntimeError):
    """A slot or worker failed again and again; its history is in the message."""


class WorkerLostError(ClusterEnvError, RuntimeError):
    """A worker died and was not (or could not be) replaced.

    Attributes:
        slots: the slots that it ran.
        rows: the rows of the other slots, if the call had any: `(obs, rewards, terminations, truncations, infos)`.
    """

    def __init__(self, message: str, *, slots: tuple[int, ...], rows: Any = None) -> None:
        super().__init__(message)
        self.slots = slots
        self.rows = rows


class DeadlineError(ClusterEnvError, TimeoutError, multiprocessing.TimeoutError):
    """A call's deadline passed. The message names who was awaited; the request is still under way."""


class StartError(ClusterEnvError, RuntimeError):
    """The workers or nodes could not be started. The message names a limit of the machine, or the nodes that are
    missing and what is known of them."""


class KeyFileError(ClusterEnvError, OSError):
    """Others can read a key file, or could have made it: nothing was started with it."""


class NotPlainError(ClusterEnvError, TypeError):
    """Something other than plain data was to be sent over the network; the message says where it is."""


class ProtocolError(ClusterEnvError, ValueError):
    """The other side of a connection sent what the protocol does not allow."""
