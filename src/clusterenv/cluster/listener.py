"""The thread that reads the head's socket while the caller's thread does something else.

The two take turns by a lock. The caller's thread has precedence: `with listener` wakes the other one and takes the
lock. An error in the listening thread is raised by the caller's next `with`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from clusterenv.errors import ClusterEnvError
from clusterenv.system.teardown import OwnThread

_AWAY_S = 0.02  # after the caller's thread was away for this long, the other one listens

_LISTEN_S = 0.25
_JOIN_S = 2.0  # how long `stop` waits for the thread, which may be in a log handler that hangs


class Listener:
    """Share the socket between the caller's thread and the listening thread.

    Args:
        read: waits at most this many seconds for messages, and handles them; called with the lock held.
    """

    def __init__(self, read: Callable[[float], None]) -> None:
        self._read = read
        # Reentrant: after a Ctrl-C between taking it and the body of the `with`, the next call must not block.
        self._lock = threading.RLock()
        self._is_awaited = False  # by the caller's thread
        self._used_at = time.monotonic()
        self._quit = threading.Event()
        self._failure: BaseException | None = None
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when `read` is to return
        self._thread = OwnThread(self._listen, "clusterenv-head")

    def start(self) -> None:
        self._thread.start()

    def __enter__(self) -> None:
        if self._failure is not None:
            error = self._failure
            raise ClusterEnvError(
                f"the thread that listens to the nodes failed ({type(error).__name__}: {error}). This is a defect of "
                "clusterenv. The run cannot go on: close() it"
            ) from error
        self._used_at = time.monotonic()
        if not self._lock.acquire(blocking=False):
            self._is_awaited = True
            try:
                os.eventfd_write(self.wake, 1)
                self._lock.acquire()
            finally:
                self._is_awaited = False

    def __exit__(self, *_: object) -> None:
        self._used_at = time.monotonic()
        self._lock.release()

    def was_woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def _listen(self) -> None:
        try:
            while not self._quit.is_set():
                if self._is_awaited or time.monotonic() - self._used_at < _AWAY_S:
                    self._quit.wait(_AWAY_S)
                elif self._lock.acquire(timeout=_LISTEN_S):
                    try:
                        self._read(_LISTEN_S)
                    finally:
                        self._lock.release()
        except BaseException as error:
            if not self._quit.is_set():  # else the socket was closed
                self._failure = error

    def stop(self) -> None:
        """End the thread; from then on only the caller uses the socket. Idempotent, callable in any thread."""
        self._quit.set()
        if self.wake >= 0:
            os.eventfd_write(self.wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        # Not for ever: a thread that was interrupted after taking the lock never releases it.
        if self._lock.acquire(timeout=_JOIN_S):
            self._lock.release()

    def close(self) -> None:
        """Close the descriptor, after `stop`."""
        wake, self.wake = self.wake, -1
        if wake >= 0:
            os.close(wake)
