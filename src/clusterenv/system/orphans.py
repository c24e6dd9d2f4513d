"""Find and end processes that environments started and left behind.

Workers and the fork server are child subreapers: the descendants of an environment stay below its worker, even if they
become daemons. When that worker ends, the kernel makes them children of the fork server, before the server is notified
of the end. The children of the fork server are therefore workers, processes that the server itself started, and
orphans of workers that ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make this process adopt descendants whose parents end. Forks do not inherit this."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(pid: int) -> bool:
    """Kill an unreaped child, and its process group if it leads one. Return False if not permitted (setuid)."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            try:
                kill(pid, signal.SIGKILL)
            except PermissionError:
                return False
    return True


class Orphans:
    """The children of the fork server that are not workers."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._cannot_kill: set[int] = set()

    def spare_present(self) -> None:
        """Keep the present children until `end_all`: modules that the server imported started them, not workers."""
        self._own = _children()

    def end(self, workers: Collection[int]) -> bool:
        """Kill and reap the orphans. Return True if some may remain, so that it must be called again soon.

        A killed orphan takes a moment to end, and its own children become orphans only then.
        """
        orphans = _children().difference(workers, self._own, self._cannot_kill)
        for pid in orphans:
            if not kill_group(pid):
                self._cannot_kill.add(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return bool(orphans)

    def end_all(self, timeout_s: float) -> None:
        """Kill and reap every child."""
        self._own.clear()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            is_more = self.end(())
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if not is_more and self._cannot_kill:
                return
            time.sleep(0.002)


def _children() -> set[int]:
    pids: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:  # noqa: PTH123  fewer imports before the fork
            pids.update(map(int, file.read().split()))
    return pids
