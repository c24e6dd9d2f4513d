"""Find out how a run ends: normally, or with an exception. The head tells nodes, which exit with a matching code."""

from __future__ import annotations

import sys
import threading
import traceback

from clusterenv.system.teardown import current_exception

_LIMIT = 500  # characters of an exception that are sent


class Ending:
    """Made when a run begins; `error` is called in the thread that closes the run, or in its teardown thread."""

    def __init__(self) -> None:
        # Only its id: a reference would keep the frames of that exception alive.
        self._handled = id(sys.exc_info()[1])

    def error(self) -> str:
        """Return the exception that ends the run, as text; empty if the run is closed normally.

        It is the exception that is propagating where the run is closed (`with`, `finally`), unless it was already being
        handled when the run began; or, at interpreter exit, the one that has ended the script.
        """
        error = current_exception()
        if id(error) == self._handled:
            error = None
        if error is None and not threading.main_thread().is_alive():
            error = getattr(sys, "last_value", None)
        if error is None or isinstance(error, (GeneratorExit, StopIteration)):
            return ""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return ""
        return traceback.format_exception_only(error)[-1].strip()[:_LIMIT]
