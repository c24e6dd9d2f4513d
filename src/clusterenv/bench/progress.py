"""Show what is being measured, on one line of a terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO


class Progress:
    """Writes a line that replaces the one before; writes nothing if `file` is not a terminal."""

    def __init__(self, file: IO[str], seconds: float) -> None:
        self._file, self._seconds = file, seconds
        self._begin = time.monotonic()
        self._is_shown = file.isatty()

    def __call__(self, text: str) -> None:
        if self._is_shown:
            spent = time.monotonic() - self._begin
            self._file.write(f"\r\x1b[K{spent:3.0f} of about {self._seconds:.0f} s: {text}")
            self._file.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._file.write("\r\x1b[K")
            self._file.flush()
