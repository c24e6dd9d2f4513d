"""`Keeper`: the one thread of a run that asks its scheduler, so that nobody else waits for an answer.

What the head wants of nodes enters here and is queued; which nodes are known to be over leaves, in `over`. How they are
started and looked after is the backend's: `Jobs`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from clusterenv.errors import StartError
from clusterenv.events import emit

if TYPE_CHECKING:
    from clusterenv.backends.network import Jobs

__all__ = ["Keeper", "start_first"]

_LOOK_S = 0.5
_AGAIN_S = 2.0
"""How soon a start that failed is tried again."""

_LAST_ANSWER_S = 60.0
"""How long `stop` waits for a scheduler that was just asked, before it goes on without the answer."""


def start_first(jobs: Jobs, nodes: int) -> None:
    """Those that are wanted at first. Where one cannot be started, nothing is left of the others."""
    try:
        for node in range(nodes):
            jobs.start(node)
    except BaseException:
        jobs.stop()
        raise


class Keeper:
    def __init__(self) -> None:
        self.over: dict[int, str] = {}
        """Nodes whose agent is known to be over, and why; not those that are let go. Replaced whole, never changed."""
        self._orders: deque[tuple[int, bool]] = deque()  # node, whether it is wanted
        self._wanted: dict[int, float] = {}  # node → when to start it at the earliest
        self._let_go: set[int] = set()
        self._jobs: Jobs | None = None
        self._quit = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, jobs: Jobs) -> None:
        """Look after these from now on."""
        self._jobs = jobs
        self._thread = threading.Thread(target=self._run, args=(jobs,), name="clusterenv-keeper", daemon=True)
        self._thread.start()

    def want(self, node: int) -> None:
        """Have this node started, for the first time or again, as soon as it has no job or its job is over.

        One that is alive joins anew by itself: then there is nothing to do.
        """
        self._orders.append((node, True))

    def let_go(self, node: int) -> None:
        """This node is not wanted any more, and was told so."""
        self._orders.append((node, False))

    def stop(self) -> None:
        """Nothing may be left. Idempotent, and bounded."""
        self._quit.set()
        if self._thread is not None:
            self._thread.join(_LAST_ANSWER_S)
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.stop()

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self, jobs: Jobs) -> None:
        while not self._quit.wait(_LOOK_S):
            try:
                self._obey(jobs)
                self._look(jobs)
            except StartError as error:  # a scheduler that is busy, or restarting: later
                emit(logging.DEBUG, str(error))
            except Exception as error:  # its client may raise anything; this thread must go on
                emit(logging.WARNING, f"while asking the backend: {_told(error)}")

    def _obey(self, jobs: Jobs) -> None:
        while self._orders:
            node, is_wanted = self._orders.popleft()
            if is_wanted:
                self._let_go.discard(node)
                self._wanted.setdefault(node, 0.0)
            else:
                self._let_go.add(node)
                self._wanted.pop(node, None)
                jobs.drop(node)

    def _look(self, jobs: Jobs) -> None:
        over, now = jobs.look(), time.monotonic()
        due = [n for n, at in self._wanted.items() if now >= at and (n in over or not jobs.has_job(n))]
        # Before the first start: nobody may take a new agent, which joins at once, for the one that is over.
        self.over = {node: why for node, why in over.items() if node not in due and node not in self._let_go}
        for node in due:
            if self._quit.is_set():
                return
            try:
                jobs.start(node)
            except Exception as error:  # a quota, rights taken away: tried again, and worth knowing
                self._wanted[node] = time.monotonic() + _AGAIN_S
                emit(logging.WARNING, f"node {node} could not be started: {_told(error)}")
            else:
                del self._wanted[node]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
