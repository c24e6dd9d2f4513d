"""`Monitor`: sample a run once a second, keep the history, and serve both to whoever watches.

Its thread begins with the run and does nothing in the first second, so that short runs leave no trace. Nothing that
fails here may disturb the run: it is logged once, and the run goes on unwatched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterenv import __version__
from clusterenv.driver import Driver
from clusterenv.errors import UsageError
from clusterenv.events import emit, instruct
from clusterenv.monitor.history import History
from clusterenv.monitor.sample import EventRecord, FragmentRecord, Point, RunInfo, Sample
from clusterenv.system.teardown import OwnThread

__all__ = ["Monitor", "is_wanted"]

_EVERY_S = 1.0
_STACK_S = 10.0
"""How long `stack` waits for an answer."""
_JOIN_S = 2.0
_TOUCH_S = 60.0


def is_wanted() -> bool:
    """Return whether runs are monitored: unless the variable CLUSTERENV_MONITOR is 0."""
    return os.environ.get("CLUSTERENV_MONITOR", "1") != "0"


class Monitor:
    """Watch one run. Implements `Source` and what its socket serves.

    Args:
        env: what runs, in words.
        name: of the run; None: that of the script.
        dashboard: also show the page, from this process.
    """

    def __init__(self, driver: Driver, env: str, backend: str, name: str | None, dashboard: bool) -> None:
        script = Path(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-", "-c") else "python").stem
        self._driver = driver
        self._info = RunInfo(
            name=name or script,
            env=env,
            num_envs=driver.num_envs,
            backend=backend,
            host=socket.gethostname(),
            pid=os.getpid(),
            command=shlex.join(sys.argv)[:1000],
            began_at=time.time(),
            version=__version__,
        )
        self._owner = os.getpid()
        self._history = History()
        self._sample: Sample | None = None
        self._probe: Any = None  # imports psutil, in the thread
        self._closers: list[Callable[[], None]] = []
        self._is_registered = False
        self._touched_at = 0.0
        self._quit = threading.Event()
        self._is_sampled = threading.Event()  # the last sample was taken: the driver may be closed
        self._failed = False
        if dashboard:
            self._show_page()
        self._thread = OwnThread(self._run, "clusterenv-monitor")
        self._thread.start()

    # -- the thread: all that touches files is here, because a home folder on a network may hang ----------------

    def _run(self) -> None:
        while not self._quit.wait(_EVERY_S):
            self._guarded(self._advance)
        if self._probe is not None:
            self._guarded(lambda: self._take(is_over=True))
        self._is_sampled.set()
        if self._is_registered:
            self._guarded(self._keep)
        for closer in reversed(self._closers):
            with contextlib.suppress(Exception):
                closer()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._failed:
                self._failed = True
                emit(logging.WARNING, f"this run cannot be watched: {type(error).__name__}: {error}")

    def _advance(self) -> None:
        self._take(is_over=False)
        if not self._is_registered:
            self._register()
        elif time.monotonic() > self._touched_at + _TOUCH_S:
            from clusterenv.monitor import records

            records.touch(self._info.name)
            self._touched_at = time.monotonic()

    def _take(self, is_over: bool) -> None:
        if self._probe is None:
            from clusterenv.monitor.collect import Probe

            self._probe = Probe(self._driver)
        self._sample = self._probe.sample(is_over)
        self._history.add(self._sample.point)

    def _register(self) -> None:
        """Make this run known to the user's other terminals."""
        from clusterenv.monitor import records
        from clusterenv.monitor.server import Server

        records.prune()
        server = Server(self)
        try:
            self._info = records.claim(self._info, server.address, server.key)
        except BaseException:
            server.close()
            raise
        self._closers.append(server.close)
        self._is_registered = True

    def _keep(self) -> None:
        """Replace the record of a live run by what a report of it needs."""
        from clusterenv.monitor import records

        assert self._sample is not None
        records.remove_live(self._info.name)
        records.keep(records.Finished(self._info, self._sample, self.points(), self.events(), self.fragments()))

    # -- the script's side ------------------------------------------------------------------------------------

    def _show_page(self) -> None:
        from clusterenv.monitor.page.serve import start

        served = start(self)
        self._closers.append(served.close)
        instruct(f"the page of this run: {served.url}")  # not to a log, which others may read: it has the token

    def end(self) -> None:
        """Take the last sample. Afterwards the driver may be closed; then call `join`. Never raises."""
        if os.getpid() == self._owner:
            self._quit.set()
            self._is_sampled.wait(_JOIN_S)

    def join(self) -> None:
        """Wait until watchers know that the run is over, and its data is kept; not for a home folder that hangs."""
        if os.getpid() == self._owner:
            self._thread.join(_JOIN_S)

    # -- what is served ---------------------------------------------------------------------------------------

    def info(self) -> RunInfo:
        return self._info

    def sample(self) -> Sample | None:
        return self._sample

    def points(self, after_s: float = 0.0) -> list[Point]:
        return self._history.points(after_s)

    def events(self, after: int = -1) -> list[EventRecord]:
        return [] if self._probe is None else self._probe.events(after)

    def fragments(self, after_s: float = 0.0) -> list[FragmentRecord]:
        return [] if self._probe is None else self._probe.fragments(after_s)

    def log(self, node: int) -> str:
        """Return the end of a node's log."""
        nodes = self._driver.executor.nodes
        if nodes is None:
            raise UsageError("this run has no nodes: its workers write to the script's own output")
        count = 1 + max(self._driver.node_of)
        if not 0 <= node < count:
            raise UsageError(f"there is no node {node}: the run has {count}")
        return nodes.log_tail(node) or f"the backend knows no log of node {node}"

    def stack(self, slot: int) -> str:
        """Return where the environment of this slot is right now."""
        if not 0 <= slot < self._driver.num_envs:
            raise UsageError(f"there is no slot {slot}: the run has {self._driver.num_envs}")
        if self._driver.executor.processes is None:
            raise UsageError("Local(workers=0): the environments run in the script itself")
        worker = self._driver.workers.of_slot(slot).index
        known = max((event.number for event in self.events()), default=-1)
        self._driver.wanted_stacks.append(worker)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline and not self._quit.wait(0.1):
            for event in self.events(known):
                if event.kind == "stack" and event.worker == worker:
                    return f"{event.reason}, in {event.phase}() of slot {(event.slots or (slot,))[0]}\n{event.detail}"
        call = self._sample.call if self._sample is not None else ""
        why = f"in {call}()" if call else "in none of the run's calls: its learner works, and the answer waits for it"
        raise UsageError(f"worker {worker} has not answered within {_STACK_S:g} s; the script is {why}")
