"""Decide when to retry after an environment or a worker fails, from the user's options. Pure.

`Recovery` holds the options. `RestartBook` takes failures with their times, and returns when the next attempt may
start, or raises `CrashLoopError`. Neither starts or kills processes, or sleeps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal

from clusterenv.arguments import check_fields
from clusterenv.errors import CrashLoopError, SpecError

__all__ = ["Recovery", "RestartBook"]


@dataclass(frozen=True)
class Recovery:
    """Options for failures of environments and workers.

    Args:
        on_error: "restart": the failed slot ends its episode as truncated and invalid, and starts again. "raise": the
            call raises; the next reset starts the slot again.
        init_timeout_s: longest time that building one environment may take; None: no limit.
        reset_timeout_s: longest time for one `reset` of one environment; None: no limit.
        step_timeout_s: longest time for one `step` of one environment, one method called by `call`, or one forward pass
            of the policy; None: no limit. After it, the worker is killed and replaced.
        warn_after_s: warn, with slot and line, when one call of an environment takes longer, and again after twice that
            time; None: never. A signal asks the worker for the line: the simulator's own `poll` or `nanosleep` may
            return EINTR.
        recovery_timeout_s: longest wait for a replacement, before `WorkerLostError`.
        max_restarts: more failures than this of one slot or worker within `restart_window_s` raise `CrashLoopError`.
        restart_window_s: time in which failures of one slot or worker are counted together.
        backoff_s: wait before the second restart in the window, doubled for each further one up to the second value.
        check: refuse actions outside their space; flag observations and rewards that are NaN, infinite or (of the
            discrete spaces) out of bounds. Shapes and dtypes are always checked.

    Example:
        >>> from clusterenv import Recovery
        >>> Recovery(step_timeout_s=30).on_error
        'restart'
    """

    on_error: Literal["restart", "raise"] = "restart"
    init_timeout_s: float | None = 600.0
    reset_timeout_s: float | None = 600.0
    step_timeout_s: float | None = 600.0
    warn_after_s: float | None = 30.0
    recovery_timeout_s: float = 600.0
    max_restarts: int = 5
    restart_window_s: float = 600.0
    backoff_s: tuple[float, float] = (1.0, 60.0)
    check: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            is_limit = name.endswith("_timeout_s") or name == "warn_after_s"
            if is_limit and value is not None and not value > 0:
                raise SpecError(f"Recovery({name}={value!r}): must be a positive number of seconds")
        if self.max_restarts < 0:
            raise SpecError(f"Recovery(max_restarts={self.max_restarts!r}): must be 0 or more")
        if min(self.backoff_s) < 0:
            raise SpecError(f"Recovery(backoff_s={self.backoff_s!r}): must be 0 or more seconds")

    def timeout_of(self, phase: str) -> tuple[str, float | None]:
        """Return the limit for one environment call in this phase: the name of the option, and its value."""
        name = f"{phase}_timeout_s"
        return (name, getattr(self, name)) if hasattr(self, name) else ("step_timeout_s", self.step_timeout_s)


class RestartBook:
    """Track the failures of each subject (a slot or a worker) within the window."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._failures: defaultdict[str, deque[tuple[float, str]]] = defaultdict(deque)

    def failed(self, subject: str, reason: str, now_s: float) -> float:
        """Record a failure; return the time at which the next attempt may start."""
        recovery = self._recovery
        history = self._failures[subject]
        while history and history[0][0] < now_s - recovery.restart_window_s:
            history.popleft()
        history.append((now_s, reason))
        if len(history) > recovery.max_restarts:
            lines = "\n".join(f"  {now_s - when:7.1f} s ago: {why}" for when, why in history)
            raise CrashLoopError(
                f"{subject} failed {len(history)} times within {recovery.restart_window_s:.0f} s "
                f"(Recovery(max_restarts={recovery.max_restarts})):\n{lines}"
            )
        if len(history) == 1:
            return now_s
        first, last = recovery.backoff_s
        return now_s + min(first * 2.0 ** (len(history) - 2), last)
