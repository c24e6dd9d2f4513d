"""Find runs by name: one file per run in `~/.clusterenv/runs`, readable by this user only.

While a run lives, its file says where its socket is and with which key. When it ends, the file holds what the report
of the run shows, so that `clusterenv report` works later; only the newest of these are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from pathlib import Path

import msgspec
import psutil

from clusterenv.monitor.sample import EventRecord, FragmentRecord, Point, RunInfo, Sample

__all__ = [
    "Finished",
    "Live",
    "finished",
    "folder",
    "free_name",
    "is_killed",
    "live",
    "prune",
    "read_finished",
    "remove_live",
    "write",
]

_KEEP = 20
"""Number of finished runs whose data is kept."""


class Live(msgspec.Struct, frozen=True):
    """A run whose script may still be there."""

    info: RunInfo
    address: str
    """Path of its socket."""
    key: str


class Finished(msgspec.Struct, frozen=True):
    """What is kept of a run that has ended."""

    info: RunInfo
    sample: Sample
    points: list[Point]
    events: list[EventRecord]
    fragments: list[FragmentRecord]


def folder() -> Path:
    """Return the folder of all runs of this user; the variable CLUSTERENV_HOME names another place."""
    return Path(os.environ.get("CLUSTERENV_HOME") or "~/.clusterenv").expanduser() / "runs"


def free_name(wanted: str) -> str:
    """Return a name for a new run that no other has: the wanted one, or with a number behind it."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-.")[:60] or "run"
    name, number = base, 1
    while _live_path(name).exists() or _finished_path(name).exists():
        number += 1
        name = f"{base}-{number}"
    return name


def write(record: Live | Finished) -> Path:
    """Write the record of a run, replacing an earlier one. Raises OSError."""
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = msgspec.json.encode(record)
    path = _live_path(record.info.name)
    if isinstance(record, Finished):
        path, data = _finished_path(record.info.name), zlib.compress(data)
    partial = path.with_suffix(f".{os.getpid()}.new")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)
    return path


def remove_live(name: str) -> None:
    with contextlib.suppress(OSError):
        _live_path(name).unlink()


def live() -> list[Live]:
    """Return the runs of this user that have not ended, oldest first: also those on other hosts, or killed."""
    found = []
    for path in _files("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Live))
    return sorted(found, key=lambda record: record.info.began_at)


def is_killed(record: Live) -> bool:
    """Return whether the script of this run is known to be gone."""
    if record.info.host != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(record.info.pid).create_time() > record.info.began_at + 1.0)
    except psutil.Error:
        return True


def finished() -> list[str]:
    """Return the names of the finished runs whose data is kept, oldest first."""
    return [path.name.removesuffix(".run") for path in _finished_files()]


def read_finished(name: str) -> Finished | None:
    """Return what is kept of this run; None: nothing."""
    try:
        return msgspec.json.decode(zlib.decompress(_finished_path(name).read_bytes()), type=Finished)
    except (OSError, zlib.error, msgspec.MsgspecError):
        return None


def prune() -> None:
    """Remove the records of runs whose script was killed, and the oldest of the finished ones."""
    for record in live():
        if is_killed(record):
            remove_live(record.info.name)
            with contextlib.suppress(OSError):
                Path(record.address).unlink()
                Path(record.address).parent.rmdir()
    for path in _finished_files()[:-_KEEP]:
        with contextlib.suppress(OSError):
            path.unlink()


def _finished_files() -> list[Path]:
    ages = []
    for path in _files("*.run"):
        with contextlib.suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(ages)]


def _files(pattern: str) -> list[Path]:
    try:
        return list(folder().glob(pattern))
    except OSError:
        return []


def _live_path(name: str) -> Path:
    return folder() / f"{name}.json"


def _finished_path(name: str) -> Path:
    return folder() / f"{name}.run"
