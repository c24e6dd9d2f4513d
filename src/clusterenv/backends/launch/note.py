"""`Note`: write a file in a run's folder that identifies its head, and names what else must be removed.

The head writes it before it starts anything, and touches it regularly. `clusterenv gc` reads it, on any machine that
sees the folder.
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

from clusterenv.system.identity import machine, process_start

NAME = "head.json"

_BEAT_S = 15.0
_SLACK_S = 120.0
"""Added to the lease, for network file systems that cache attributes (up to 60 s), and for clock differences."""


class Note:
    """The note of this process, the head of a run.

    Args:
        journal: the journal from which another head may take over the nodes; "": none can.
        jobs: the jobs that an earlier head started.
    """

    def __init__(
        self, folder: Path, run: str, lease_s: float, journal: str = "", jobs: Mapping[str, Any] | None = None
    ) -> None:
        self._path = folder / NAME
        pid = os.getpid()
        self._fields: dict[str, Any] = {
            "run": run,
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": pid,
            "started": process_start(pid),
            "lease_s": lease_s,
            "jobs": dict(jobs or {}),
            "left": "",
            "journal": journal,
        }
        self._write()
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="clusterenv-note", daemon=True)
        self._thread.start()

    def add_jobs(self, jobs: Mapping[str, Any]) -> None:
        """Add jobs for `clusterenv gc` to remove: a backend's name, and what its `collect_garbage` needs."""
        self._fields["jobs"] = dict(jobs)
        self._write()

    def end(self, left: str = "") -> None:
        """Stop touching the note. `left`: why it is kept, for `clusterenv gc`; "": the folder is removed next."""
        self._quit.set()
        self._thread.join(1.0)
        if left:
            self._fields["left"] = left
            with contextlib.suppress(OSError):  # a full disk: `gc` removes the run once this process has ended
                self._write()

    def touch(self) -> None:
        """Update the note's time, to show that the head is alive."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._fields))
        new.replace(self._path)  # atomic: never a partial note, even on a full disk

    def _beat(self) -> None:
        while not self._quit.wait(_BEAT_S):
            self.touch()


class Life(NamedTuple):
    """The known state of a run's head."""

    is_over: bool
    is_certain: bool
    """True: known from this machine's process table, or from the head itself; False: judged by the note's age."""
    text: str


def life(note: Mapping[str, Any], age_s: float) -> Life:
    """Return whether the head that wrote this note is running. `age_s`: time since the note was touched."""
    who = f"process {note['pid']} on {note['host']}"
    if note["left"]:
        return Life(True, True, f"closed by {who}: {note['left']}")
    if note["machine"] == machine():
        if process_start(note["pid"]) == note["started"]:
            return Life(False, True, f"its head is running ({who})")
        if note.get("journal") and age_s <= note["lease_s"] + _SLACK_S:
            text = f"its head has ended ({who}), but another one may go on with its nodes, by resume={note['journal']}"
            return Life(False, False, text)
        return Life(True, True, f"its head has ended ({who})")
    over = age_s > note["lease_s"] + _SLACK_S
    seen = f"{who}, last seen {age_s:.0f} s ago"
    return Life(over, False, f"its head has ended ({seen})" if over else f"its head may be running ({seen})")


def now_there(folder: Path) -> float:
    """Return the current time of the clock that dates files in this folder, which may be a file server's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()
