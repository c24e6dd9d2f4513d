"""A disk that is full or read-only: training goes on, with one warning and a count of what was not written."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys

import pytest

from clusterenv import journal as journals
from clusterenv.events import EventLog, emit, emit_output
from clusterenv.journal import Journal

pytestmark = [pytest.mark.network, pytest.mark.guarantee(26)]

# Journal, node logs and stderr are on the disk, which is full from the first step on. Environments print and fail.
SCRIPT = """
import json, os, sys
from pathlib import Path
import gymnasium as gym
import numpy as np
import clusterenv as ce
from clusterenv.engine import incarnations

class Bad(gym.Wrapper):
    t = 0

    def step(self, action):
        print("a line")
        self.t += 1
        if self.t % 3 == 0:
            raise ValueError("bad")
        return super().step(action)

incarnations._BLOCK = 1  # the journal is written at every other failure
disk = Path(sys.argv[1])
recovery = ce.Recovery(max_restarts=1000, backoff_s=(0.01, 0.01))
backend = ce.Loopback(nodes=1, folder=str(disk / "run"))
with ce.ClusterEnv([lambda: Bad(gym.make("CartPole-v1"))] * 2, backend=backend, recovery=recovery,
                   resume=disk / "journal") as envs:
    envs.reset(seed=1)
    for _ in range(300):  # past to the end of the reserved incarnations
        envs.step(np.zeros(2, np.int64))
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    for descriptor in (filler, 2):  # also the last block of stderr
        try:
            while True:
                os.write(descriptor, b"filled " * 100)
        except OSError as error:
            reason = error.strerror
    print(reason)
    lost = 0
    for _ in range(60):
        infos = envs.step(np.zeros(2, np.int64))[4]
        lost += "transition_valid" in infos
    batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(16)
    kinds = [event.kind for event in envs.events()]
    stats = envs.stats()
    print(json.dumps([lost, bool(batch.valid[:2].all()), kinds, stats["log_lines_lost"], stats["events"]]))
"""


@pytest.fixture
def disk(tmp_path):
    """A file system of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_no_run(disk):
    with (disk / "stderr").open("wb") as stderr:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(disk)], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=100
        )
    full, line = done.stdout.splitlines()
    assert full == os.strerror(errno.ENOSPC)
    lost, is_valid, kinds, lines_lost, counts = json.loads(line)
    assert lost >= 10 and is_valid, "faults are survived as ever"
    assert lines_lost >= 60 and kinds.count("log_not_written") == 1
    assert counts["journal_not_written"] >= 2
    told = (disk / "stderr").read_text(errors="replace")
    assert "journal_not_written" not in told, "this disk is full, too"


def read_only(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_read_only_disk_is_one_warning_and_counted(tmp_path, monkeypatch, caplog):
    """Nobody can make a disk read-only whose files are open: here, the system calls say so."""
    caplog.set_level(logging.WARNING, "clusterenv")
    events = EventLog()
    journal = Journal(tmp_path / "journal", events)

    def not_written():
        return sum("journal_not_written" in record.getMessage() for record in caplog.records)

    with monkeypatch.context() as patched:
        patched.setattr(journals, "_write", read_only)
        for incarnation in (200, 300, 400):
            journal.reserve(incarnation)
        assert (events.counts["journal_not_written"], not_written()) == (3, 1)
    journal.reserve(500)
    with monkeypatch.context() as patched:
        patched.setattr(journals, "_write", read_only)
        journal.reserve(600)
        assert (events.counts["journal_not_written"], not_written()) == (4, 2), "it could be written in between"
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", read_only)
        journal.end(is_clean=True)
    assert events.counts["journal_not_written"] == 5 and "cannot be removed" in events()[-1].reason
    again = Journal(tmp_path / "journal", events)  # it is not locked
    assert again.is_resumed
    again.end(is_clean=True)


class Full:
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_that_are_lost_are_counted_and_reported_once(monkeypatch):
    monkeypatch.setattr(logging.getLogger("clusterenv"), "propagate", False)  # to what pytest has put there
    emit(logging.WARNING, "before")
    events = EventLog()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Full())
        emit(logging.INFO, "not for a log that shows warnings")
        assert events.lost_lines == 0
        for _ in range(3):
            emit(logging.WARNING, "a")
            emit_output("b")
    assert events.lost_lines == 6
    assert [(event.kind, event.reason) for event in events()] == [
        ("log_not_written", "lines of the log are lost: OSError: [Errno 28] No space left on device")
    ]
    emit(logging.WARNING, "after")
    assert events.lost_lines == 6 and len(events()) == 1 and not EventLog()()
