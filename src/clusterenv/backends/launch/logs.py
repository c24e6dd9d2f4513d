"""Start node agents with a log, and read its last lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def start_logged(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program that appends its output to `log`, in its own session so that Ctrl-C reaches only the head."""
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def read_tail(path: Path, size: int = 4000) -> str:
    """Return the last `size` bytes of a log as text, or a placeholder if the log is empty or missing."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError:
        return f"(no log at {path})"
