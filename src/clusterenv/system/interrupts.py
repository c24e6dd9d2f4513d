"""Ctrl-C, at a moment when it tears nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["held_back"]


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A Ctrl-C within the block is handled at its end, so the block must be short.

    By another handler, not by a mask: a signal that the main thread masks is delivered to any other thread, and Python
    then raises in the main thread all the same.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # nobody is interrupted here
        return
    caught: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(signal.SIGINT, caught[0])
