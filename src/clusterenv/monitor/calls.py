"""Find which call of a run the script is in, from the stacks of this process' threads: costs the calls nothing."""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

__all__ = ["CallWatch"]

_FILES = ("clusterenv/env.py", "clusterenv/collector.py", "clusterenv/vector/async_calls.py")


class CallWatch:
    """Track the current call of one run."""

    def __init__(self, driver: Any) -> None:
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
        for frame in list(sys._current_frames().values()):
            found = None
            at: FrameType | None = frame
            while at is not None:
                if at.f_code.co_filename.endswith(_FILES) and self._is_own(at):
                    found = at
                at = at.f_back
            if found is not None:
                return found
        return None

    def _is_own(self, frame: FrameType) -> bool:
        return getattr(frame.f_locals.get("self"), "_driver", None) is self._driver
