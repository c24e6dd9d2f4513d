"""`Note`: a file in a run's folder that says whose run it is, whether its head lives, and what else must be removed.

The head writes it before anything is started, and touches it while it lives. `clusterenv gc` reads it, on any machine
that sees the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

NAME = "head.json"

_BEAT_S = 15.0
_SLACK_S = 120.0
"""On top of the lease: for attributes that a network file system caches (up to 60 s), and for clocks."""


class Note:
    """The note of a run whose head is this process."""

    def __init__(self, folder: Path, run: str, lease_s: float) -> None:
        self._path = folder / NAME
        pid = os.getpid()
        self._fields: dict[str, Any] = {
            "run": run,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": pid,
            "started": _started(pid),
            "lease_s": lease_s,
            "jobs": {},
            "left": "",
        }
        self._write()
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="clusterenv-note", daemon=True)
        self._thread.start()

    def add_jobs(self, jobs: Mapping[str, Any]) -> None:
        """Have `clusterenv gc` remove these: a backend's name, and what its `collect_garbage` needs."""
        self._fields["jobs"] = dict(jobs)
        self._write()

    def end(self, left: str = "") -> None:
        """The run is over. `left`: why the note stays, for `clusterenv gc` to go by; "": the folder is removed next."""
        self._quit.set()
        self._thread.join(1.0)
        if left:
            self._fields["left"] = left
            with contextlib.suppress(OSError):  # a full disk: then it is removed when this process has ended
                self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._fields))
        new.replace(self._path)  # never half a note, also on a full disk

    def _beat(self) -> None:
        while not self._quit.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)


class Life(NamedTuple):
    """What can be said of a run's head."""

    is_over: bool
    is_certain: bool
    """Seen in the process table of this machine, or said by the head itself; else judged by the age of the note."""
    text: str


def life(note: Mapping[str, Any], age_s: float) -> Life:
    """Whether the head that wrote this note lives. `age_s`: since the note was touched."""
    who = f"process {note['pid']} on {note['host']}"
    if note["left"]:
        return Life(True, True, f"closed by {who}: {note['left']}")
    if note["machine"] == _machine():
        if _started(note["pid"]) == note["started"]:
            return Life(False, True, f"its head is running ({who})")
        return Life(True, True, f"its head has ended ({who})")
    over = age_s > note["lease_s"] + _SLACK_S
    seen = f"{who}, last seen {age_s:.0f} s ago"
    return Life(over, False, f"its head has ended ({seen})" if over else f"its head may be running ({seen})")


def now_there(folder: Path) -> float:
    """The time by the clock that dates the files in this folder, which may be a file server's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()


def _machine() -> str:
    """Where process numbers mean the same: one boot of one machine, and one process namespace of it."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {os.urandom(8).hex()}"  # equal to no other


def _started(pid: int) -> str:
    """When this process started, in the kernel's own count; tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""
