"""Write a run's page as one HTML file that opens without a network: `write_report(source, path)`."""

from __future__ import annotations

import os
from pathlib import Path

from clusterenv.monitor.encoding import to_json
from clusterenv.monitor.page.assets import inline
from clusterenv.monitor.page.data import Updates
from clusterenv.monitor.source import Source

__all__ = ["write_report"]


def write_report(source: Source, path: str | os.PathLike[str]) -> Path:
    """Write the page with all data of the run that is kept, and return the file's path.

    A file that exists is replaced, as a whole: a report that is being read is never half one.
    """
    path = Path(path)
    text = inline(to_json(Updates(source).read()))
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
