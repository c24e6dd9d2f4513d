"""Find which call of a run the script is in, from the stacks of this process' threads: costs the calls nothing."""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import clusterenv
from clusterenv.driver import Driver

__all__ = ["CallWatch"]

_PACKAGE = str(Path(clusterenv.__file__).parent)
_FILES = ("clusterenv/env.py", "clusterenv/collector.py", "clusterenv/vector/async_calls.py")


class CallWatch:
    """Track the current call of one run."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._frame: Any = None
        self._since = time.monotonic()

    def look(self) -> tuple[str, float]:
        """Return the name of the call ("": none, the script does something else), and for how long it has been so.

        The time counts from when it was first seen here.
        """
        found = self._outermost()
        # Frames are reused by later calls: between two of them, something was delivered.
        key = None if found is None else (id(found), found.f_code.co_name, self._driver.rows.deliveries)
        if key != self._frame:
            self._frame, self._since = key, time.monotonic()
        name = "" if found is None else found.f_code.co_name.lstrip("_").replace("batches", "stream")
        return name, time.monotonic() - self._since

    def _outermost(self) -> FrameType | None:
        """Return the frame of the call that the script made, in whichever thread.

        Reading a frame's `f_locals` stores a copy of them in the frame until it ends. A generator's frame lives on
        between its calls, and would keep a batch alive: whose it is, is found from what it has called.
        """
        for frame in list(sys._current_frames().values()):
            found, is_own = None, False
            at: FrameType | None = frame
            while at is not None:
                code = at.f_code
                if code.co_filename.startswith(_PACKAGE):
                    if not code.co_flags & inspect.CO_GENERATOR:
                        is_own = self._is_own(at, is_own)
                    if is_own and code.co_filename.endswith(_FILES):
                        found = at
                at = at.f_back
            if found is not None:
                return found
        return None

    def _is_own(self, frame: FrameType, default: bool) -> bool:
        owner = frame.f_locals.get("self")
        driver = owner if isinstance(owner, Driver) else getattr(owner, "_driver", None)
        return default if driver is None else driver is self._driver
