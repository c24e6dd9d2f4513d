"""Handle SIGTERM to the head, which is sent when its job is preempted or somebody asks it to end.

By default SIGTERM ends Python at once, and the nodes of a cluster would only end when their lease expires. While a run
has nodes, it raises SystemExit instead, at the moments at which a Ctrl-C would raise KeyboardInterrupt: `with` and
`finally` blocks run, and the run is closed. The user's own handler is left in place.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any

from clusterenv.system import interrupts

_AGAIN_S = 15.0
"""A second SIGTERM within this time is ignored: a run is being closed, which takes at most 10 s."""

_CODE = 128 + signal.SIGTERM


class _State:
    def __init__(self) -> None:
        self.runs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.process = 0
        self.terminated_at_s: float | None = None


_STATE = _State()


def watch(run: Any) -> None:
    """Make SIGTERM close this run in order, until `unwatch`. Only the main thread can set the handler."""
    if not _STATE.runs:
        _STATE.terminated_at_s = None
    _STATE.runs.add(run)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _STATE.process = os.getpid()
        signal.signal(signal.SIGTERM, _on_terminate)


def unwatch(run: Any) -> None:
    """Forget this run, from any thread; call `restore_handler` next. Idempotent."""
    _STATE.runs.discard(run)


def restore_handler() -> None:
    """Restore the default action of SIGTERM if all runs are closed. Only works in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not _STATE.runs and is_main and signal.getsignal(signal.SIGTERM) is _on_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_terminated() -> bool:
    """Return whether this process received SIGTERM and is about to end."""
    return _STATE.terminated_at_s is not None


def _on_terminate(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _STATE.process or not _STATE.runs:  # a fork, which has no run, or all runs are closed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    now_s = time.monotonic()
    if _STATE.terminated_at_s is None or now_s - _STATE.terminated_at_s > _AGAIN_S:
        _STATE.terminated_at_s = now_s
        interrupts.strike(_exit, frame)


def _exit() -> None:
    raise SystemExit(_CODE)
