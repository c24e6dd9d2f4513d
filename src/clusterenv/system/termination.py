"""SIGTERM to the head: its own job is preempted, or somebody has asked it to end.

By itself SIGTERM ends Python at once, and the nodes of a cluster would learn of it by their lease only. While a run has
nodes, it raises SystemExit instead, at the moments at which a Ctrl-C would raise KeyboardInterrupt: `with` and
`finally` are carried out, and the run is closed. A handler of the user's own is left alone.
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
"""A second SIGTERM within this time changes nothing: a run is being closed, in 10 s at most."""

_CODE = 128 + signal.SIGTERM


class _State:
    def __init__(self) -> None:
        self.runs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.process = 0
        self.terminated_at_s: float | None = None


_STATE = _State()


def watch(run: Any) -> None:
    """Have SIGTERM end this run in order, until `unwatch`. Only the main thread can."""
    if not _STATE.runs:
        _STATE.terminated_at_s = None
    _STATE.runs.add(run)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _STATE.process = os.getpid()
        signal.signal(signal.SIGTERM, _on_terminate)


def unwatch(run: Any) -> None:
    """Forget this run, from any thread; `restore_handler` follows. Idempotent."""
    _STATE.runs.discard(run)


def restore_handler() -> None:
    """Give SIGTERM back to Python when the last run is closed. Only the main thread can."""
    is_main = threading.current_thread() is threading.main_thread()
    if not _STATE.runs and is_main and signal.getsignal(signal.SIGTERM) is _on_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_terminated() -> bool:
    """Whether this process was sent SIGTERM, and is about to end by it."""
    return _STATE.terminated_at_s is not None


def _on_terminate(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _STATE.process or not _STATE.runs:  # a fork, which has no run; or all runs are closed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    now_s = time.monotonic()
    if _STATE.terminated_at_s is None or now_s - _STATE.terminated_at_s > _AGAIN_S:
        _STATE.terminated_at_s = now_s
        interrupts.strike(_exit, frame)


def _exit() -> None:
    raise SystemExit(_CODE)
