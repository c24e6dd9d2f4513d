"""Find runs by name: one file per run in `~/.clusterenv/runs`, readable by this user only.

While a run lives, its file says where its socket is and with which key. When it ends, the file holds what the report
of the run shows, so that `clusterenv report` works later; only the newest of these are kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from clusterenv.monitor.encoding import to_json
from clusterenv.monitor.sample import EventRecord, FragmentRecord, Point, RunInfo, Sample
from clusterenv.system.identity import machine, process_start

__all__ = [
    "Finished",
    "Live",
    "claim",
    "finished",
    "folder",
    "is_here",
    "is_killed",
    "keep",
    "live",
    "prune",
    "read_finished",
    "remove_live",
    "touch",
]

_KEEP = 20
"""Number of finished runs whose data is kept."""
_SILENT_S = 900.0
"""A run of another machine whose file was not touched for so long is gone; runs touch theirs every minute."""


class Live(msgspec.Struct, frozen=True):
    """A run whose script may still be there."""

    info: RunInfo
    address: str
    """Path of its socket."""
    key: str
    machine: str
    """Where its process number is valid."""
    started: str
    """When its process started, to distinguish it from a later one with the same number."""


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


def claim(info: RunInfo, address: str, key: str) -> RunInfo:
    """Write the record of a new run of this process. Return its info, with a name that no other run has.

    Raises OSError.
    """
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _names(info.name):
        if _finished_path(name).exists():
            continue
        named = msgspec.structs.replace(info, name=name)
        data = to_json(Live(named, address, key, machine(), process_start(info.pid)))
        with contextlib.suppress(FileExistsError):  # another run has this name, perhaps since a moment ago
            _write(_live_path(name), data, os.O_EXCL)
            return named
    raise AssertionError


def _names(wanted: str) -> Iterator[str]:
    """Yield names for a run: the wanted one, as a file may be named, then with numbers behind it."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-.")[:60] or "run"
    yield base
    for number in itertools.count(2):
        yield f"{base}-{number}"


def keep(record: Finished) -> None:
    """Write what is kept of a run that has ended. Raises OSError."""
    path = _finished_path(record.info.name)
    partial = path.with_suffix(f".{os.getpid()}.new")
    _write(partial, zlib.compress(to_json(record)), os.O_TRUNC)
    partial.replace(path)


def _write(path: Path, data: bytes, flag: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600), "wb") as file:
        try:
            file.write(data)
            file.flush()
        except OSError:
            path.unlink()
            raise


def touch(name: str) -> None:
    """Show the user's other machines that this run is alive."""
    with contextlib.suppress(OSError):
        os.utime(_live_path(name))


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


def is_here(record: Live) -> bool:
    """Return whether this run is on this machine, so that its socket can be reached."""
    return record.machine == machine()


def is_killed(record: Live) -> bool:
    """Return whether the script of this run is gone, as far as is known here."""
    if is_here(record):
        return process_start(record.info.pid) != record.started
    try:
        return time.time() > _live_path(record.info.name).stat().st_mtime + _SILENT_S
    except OSError:
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
            if is_here(record):
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
