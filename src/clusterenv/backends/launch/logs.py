"""Read the last lines of a node agent's log."""

from __future__ import annotations

import os
from pathlib import Path


def read_tail(path: Path, size: int = 4000) -> str:
    """Return the last `size` bytes of a log as text, or a text for a log that is empty or missing."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError:
        return f"(no log at {path})"
