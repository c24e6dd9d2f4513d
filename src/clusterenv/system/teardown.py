"""`Teardown`: end a run once, in a thread that Ctrl-C does not interrupt.

`close()` calls it and waits. Garbage collection begins it from any thread, at any moment, and does not wait. When the
interpreter exits, it is begun unless it has been, and awaited.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from clusterenv.system import termination
from clusterenv.system.interrupts import restore_handler


class OwnThread(threading.Thread):
    """A thread of a run. A teardown may join it, so it must never wait for a teardown."""

    def __init__(self, target: Callable[[], None], name: str, exception: BaseException | None = None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.exception = exception  # the one being handled where this thread was started


def current_exception() -> BaseException | None:
    """Return the exception being handled in this thread or, in an `OwnThread`, where that thread was started."""
    thread = threading.current_thread()
    return thread.exception if isinstance(thread, OwnThread) else sys.exc_info()[1]


class Teardown:
    """Run `action` once, and let callers wait for it.

    Args:
        action: must end by itself, in about `timeout_s`.
        timeout_s: the longest that callers wait for it.
    """

    def __init__(self, action: Callable[[], None], timeout_s: float) -> None:
        self._action = action
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self._once = threading.Lock()  # acquired by the thread that runs the action, and never released
        self._done = threading.Event()
        self.has_begun = False
        self._num_waiting = 0
        self._error: BaseException | None = None
        _PENDING.append(self)
        precede_exit_handlers()

    def __call__(self) -> None:
        """Begin, unless begun, and wait for the end; raise what the action raised. An interrupt only ends the wait."""
        if os.getpid() != self._owner:
            return  # a fork of the owner must not end the run
        self._num_waiting += 1
        try:
            self.begin()
            if not isinstance(threading.current_thread(), OwnThread):
                self._done.wait(self._timeout_s)
        finally:
            self._num_waiting -= 1
            restore_handler()
            termination.restore_handler()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def begin(self) -> None:
        """Begin, unless begun; in this thread only if no other can be started."""
        if os.getpid() != self._owner or self.has_begun:
            return
        try:
            OwnThread(self._run, "clusterenv-teardown", sys.exc_info()[1]).start()
        except RuntimeError:  # too many threads, or the interpreter is exiting
            self._run()

    def forget(self) -> None:
        """Do nothing at exit: the run was ended elsewhere."""
        if self in _PENDING:
            _PENDING.remove(self)

    def finish(self) -> None:
        """Begin, unless begun, and wait for the end despite interrupts."""
        deadline = time.monotonic() + self._timeout_s
        while not self.has_begun and os.getpid() == self._owner:
            with contextlib.suppress(KeyboardInterrupt):
                self.begin()
                break
        while self._owner == os.getpid() and not self._done.is_set() and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(KeyboardInterrupt):
                self._done.wait(left_s)

    def _run(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        self.has_begun = True
        try:
            self._action()
        except BaseException as error:
            if self._num_waiting:
                self._error = error
            else:
                with contextlib.suppress(Exception):  # stderr may be closed
                    traceback.print_exc()
        finally:
            self.forget()
            self._done.set()


_PENDING: list[Teardown] = []  # teardowns that are not done, oldest first


def _at_exit() -> None:
    for teardown in reversed(_PENDING.copy()):
        teardown.finish()


def _at_exit_first() -> None:
    _at_exit()


def precede_exit_handlers() -> None:
    """End runs before the exit handlers that others have registered so far; called when a backend has connected.

    Handlers run in reverse order, and that of the Kubernetes client deletes the certificates that it needs to connect.
    """
    atexit.unregister(_at_exit_first)
    atexit.register(_at_exit_first)


atexit.register(_at_exit)  # for runs that begin in an exit handler: what is registered there is not called
