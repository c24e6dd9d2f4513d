"""`Supervisor`: call the scheduler in one thread per run, so that a scheduler that hangs delays no other thread.

The head queues the nodes that it wants, and reads in `over` which nodes have ended. The backend's `contract.Jobs`
start, watch and end nodes; only this thread calls them, so that nothing is started after `stop`.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence

from clusterenv.backends.contract import CancelsJobs, Jobs, ScheduledJobs
from clusterenv.errors import StartError
from clusterenv.events import Event, EventLog, emit
from clusterenv.system.teardown import OwnThread

_LOOK_S = 0.5
_AGAIN_S = 2.0  # how soon a failed start is retried

_MARGIN_S = 0.5  # how much longer than `Jobs.stop` may take `stop` waits, to get its error text

_LATE_S = 30.0
"""How long `Jobs.stop` may take in the background if an earlier call returned after the deadline."""


class Supervisor:
    def __init__(self, events: EventLog) -> None:
        self.over: dict[int, str] = {}
        """Nodes whose agent has ended, and why; excludes nodes that were let go or are wanted again. Replaced, never
        mutated."""
        self.closing = threading.Event()
        """Set by `stop`. Backends may watch it, to abandon a call to the scheduler."""
        self._events = events
        self._lock = threading.Lock()  # for `over`, which two threads replace
        self._orders: deque[tuple[int, bool]] = deque()  # node, whether it is wanted
        self._wanted: dict[int, float] = {}  # node → the earliest time to start it
        self._let_go: set[int] = set()
        self._started: set[int] = set()  # nodes that have a job, even one that has ended, unless it was dropped
        self._trouble = ""  # the last error of the scheduler, until it answers again
        self._trouble_since = 0.0
        self._thread: threading.Thread | None = None
        self._begun, self._ended = threading.Event(), threading.Event()
        self._failure: BaseException | None = None  # of the first starts
        self._deadline = 0.0
        self._left = ""
        self._is_left = False  # whether the jobs are left to another head

    def keep(self, jobs: Jobs, nodes: int, here: Collection[int] = ()) -> None:
        """Start `nodes` nodes, and supervise them from now on. Raises what the backend raises in the first starts.

        `here`: nodes that an earlier head started; they are started only when they are wanted again.
        """
        missing = [node for node in range(nodes) if node not in here]
        self._thread = OwnThread(functools.partial(self._run, jobs, missing), "clusterenv-supervisor")
        self._thread.start()
        self._begun.wait()
        if self._failure is not None:
            raise self._failure

    def want(self, node: int) -> None:
        """Start this node, for the first time or again, as soon as it has no job or its job has ended.

        A node that is alive rejoins by itself.
        """
        with self._lock:  # `over` describes its last job, and must not be mistaken for the end of the next
            self._orders.append((node, True))
            self.over = {other: why for other, why in self.over.items() if other != node}

    def let_go(self, node: int) -> None:
        """Do not start this node again: it was asked to leave."""
        self._orders.append((node, False))

    def stop(self, deadline: float, is_left: bool = False) -> str:
        """End all jobs by `deadline` (monotonic clock); return why some may be left, or "". Idempotent.

        `is_left`: end none, because another head takes over the nodes.
        If a call to the scheduler hangs and returns later, the thread still ends the jobs while this process runs.
        """
        if self._thread is None:
            return ""
        if not self.closing.is_set():
            self._deadline, self._is_left = deadline, is_left
            self.closing.set()
        if not self._ended.wait(max(0.0, deadline - time.monotonic()) + _MARGIN_S):
            return self._trouble or "the scheduler did not answer in time"
        self._thread.join()
        return self._left

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self, jobs: Jobs, nodes: Sequence[int]) -> None:
        try:
            for node in nodes:
                if not self.closing.is_set():
                    self._start(jobs, node)
        except BaseException as error:
            self._failure = error
            self._begun.set()
            self.closing.wait()  # the caller of `keep` cleans up
        self._begun.set()
        while not self.closing.wait(_LOOK_S):
            self._attend(jobs)
        try:
            now = time.monotonic()
            if isinstance(jobs, ScheduledJobs) and not self._is_left:
                jobs.stop(self._deadline if now < self._deadline else now + _LATE_S)
        except Exception as error:  # a scheduler's client may raise anything; `stop` reports it
            self._left = _text_of(error)
        finally:
            self._ended.set()

    def _start(self, jobs: Jobs, node: int) -> None:
        jobs.start(node)
        self._started.add(node)

    def _attend(self, jobs: Jobs) -> None:
        try:
            self._obey(jobs)
            self._look(jobs)
        except Exception as error:  # a scheduler that is busy or restarting; its client may raise anything
            self._in_trouble(_text_of(error))
        else:
            self._answered()

    def _in_trouble(self, text: str) -> None:
        if self.closing.is_set():
            return  # `stop` reports what is left
        if not self._trouble:
            self._trouble_since = time.monotonic()
        is_new = _without_numbers(text) != _without_numbers(self._trouble)
        self._trouble = text
        if is_new:
            what = "the scheduler does not answer, so lost nodes are not replaced"
            self._events.add(Event("scheduler_lost", f"{what}: {text}"))

    def _answered(self) -> None:
        if self._trouble:
            seconds = time.monotonic() - self._trouble_since
            self._trouble = ""
            self._events.add(Event("scheduler_back", f"the scheduler answers again, after {seconds:.0f} s"))

    def _obey(self, jobs: Jobs) -> None:
        while self._orders and not self.closing.is_set():
            node, is_wanted = self._orders.popleft()
            if is_wanted:
                self._let_go.discard(node)
                self._wanted.setdefault(node, 0.0)
            else:
                self._let_go.add(node)
                self._wanted.pop(node, None)
                if isinstance(jobs, CancelsJobs):
                    jobs.drop(node)
                    self._started.discard(node)

    def _look(self, jobs: Jobs) -> None:
        is_known = isinstance(jobs, ScheduledJobs)
        over = jobs.look() if isinstance(jobs, ScheduledJobs) else {}
        now = time.monotonic()
        due = [
            node
            for node, at in self._wanted.items()
            if now >= at and (node in over or node not in self._started or not is_known)
        ]
        # Before the first start: a new agent, which joins at once, must not be mistaken for the one that has ended.
        with self._lock:
            not_shown = {*self._let_go, *self._wanted, *(node for node, is_wanted in self._orders if is_wanted)}
            self.over = {node: why for node, why in over.items() if node not in not_shown}
        for node in due:
            if self.closing.is_set():
                return
            try:
                self._start(jobs, node)
            except Exception as error:  # a quota or revoked rights: retry, and warn the user
                self._wanted[node] = time.monotonic() + _AGAIN_S
                emit(logging.WARNING, f"node {node} could not be started: {_text_of(error)}")
            else:
                del self._wanted[node]


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"


def _without_numbers(text: str) -> str:
    """Return the text without addresses, ports and times, to compare two errors."""
    return re.sub(r"0x[0-9a-f]+|\d+", "", text)
