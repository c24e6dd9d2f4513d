"""`clusterenv gc`: what a dead head left is removed, wherever it ran; nobody else's, and nothing by halves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from clusterenv.backends.launch import note as notes
from clusterenv.backends.launch.note import Note
from clusterenv.cli import main
from clusterenv.events import EventLog
from clusterenv.journal import ClusterRecord, Journal
from clusterenv.system.identity import machine

LEASE_S = 60.0


def run_folder(folder, name, age_s=0.0, **changes):
    """As a head leaves it that was killed; `changes` to its note, which was last touched so long ago."""
    path = folder / f"clusterenv-{name}"
    path.mkdir(parents=True)
    (path / "node-0.key").write_text("secret")
    Note(path, name, LEASE_S).end()
    note = json.loads((path / "head.json").read_text())
    (path / "head.json").write_text(json.dumps({**note, **changes}))
    os.utime(path / "head.json", (time.time() - age_s,) * 2)
    return path


@pytest.fixture(scope="module")
def dead():
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_gc(tmp_path, capsys, dead):
    gone = run_folder(tmp_path, "gone", pid=dead)
    reused = run_folder(tmp_path, "reused", started="1")
    running = run_folder(tmp_path, "running", age_s=1e6)
    other = tmp_path / "clusterenv-other"
    other.mkdir()
    (tmp_path / "clusterenv-link").symlink_to(gone)
    assert main(["gc", "--folder", str(tmp_path), "--dry-run"]) == 0
    assert gone.exists() and "2 runs without a head" in capsys.readouterr().out
    assert main(["gc", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert not gone.exists() and not reused.exists()
    assert running.exists() and f"its head is running (process {os.getpid()} on " in told, (
        "seen here: its age is nothing"
    )
    assert other.exists(), "no folder of a run"
    assert main(["gc", "--folder", str(tmp_path), "--run", "running"]) == 0 and running.exists()


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"host": "compute-17", "machine": "another boot pid:[4026531836]"}, id="compute node"),
        pytest.param({"host": "head-pod", "machine": "{boot} pid:[1]", "pid": 1}, id="pod on this machine"),
    ],
)
def test_heads_that_ran_elsewhere(tmp_path, capsys, where):
    """Process numbers mean nothing here: a head that lives touches its note."""
    boot = machine().split()[0]
    where = {**where, "machine": where["machine"].format(boot=boot)}
    fresh = run_folder(tmp_path, "fresh", age_s=LEASE_S, **where)
    stale = run_folder(tmp_path, "stale", age_s=LEASE_S + 200, **where)
    assert main(["gc", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert (
        not stale.exists() and f"its head has ended (process {where.get('pid', os.getpid())} on {where['host']}" in told
    )
    assert fresh.exists() and "its head may be running" in told and "clusterenv gc --run fresh" in told
    another = run_folder(tmp_path, "another", age_s=LEASE_S, **where)
    assert main(["gc", "--folder", str(tmp_path), "--run", "fresh"]) == 0
    assert not fresh.exists() and another.exists(), "the user knows about the one that he names"


def test_a_note_is_touched_while_its_head_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(notes, "_BEAT_S", 0.02)
    note = Note(tmp_path, "run", LEASE_S)
    try:
        os.utime(tmp_path / "head.json", (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / "head.json").stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        note.end()


def test_nodes_that_another_head_may_go_on_with_are_left_to_it(tmp_path, capsys, dead):
    """For as long as their lease may last; the journal itself is the user's, but for its keys."""

    def left(name, age_s):
        journal = Journal(tmp_path / f"{name}.journal", EventLog())
        journal.keep_cluster(ClusterRecord(name, "/x", "tcp://x:1", 1, "public", "secret", ("a",), 1, 1))
        journal.end(is_clean=False)
        return run_folder(tmp_path, name, age_s, pid=dead, journal=str(journal.path)), journal.path

    waits, waiting = left("waits", LEASE_S)
    over, resumable = left("over", LEASE_S + 200)
    named, given_up = left("named", LEASE_S)
    assert main(["gc", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert waits.exists() and f"may go on with its nodes, by resume={waiting}" in told
    assert "clusterenv gc --run waits" in told and b"secret" in waiting.read_bytes()
    assert not over.exists() and b"secret" not in resumable.read_bytes() and "has no keys any more" in told
    assert main(["gc", "--folder", str(tmp_path), "--run", "named"]) == 0
    assert not named.exists() and not given_up.exists()
    held = Journal(waiting, EventLog())
    assert main(["gc", "--folder", str(tmp_path), "--run", "waits"]) == 0
    assert not waits.exists() and waiting.exists() and "its journal is kept" in capsys.readouterr().out
    held.end(is_clean=True)


@contextlib.contextmanager
def without_rights():
    """As a user to whom permissions apply: root reads everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folders_of_other_users_are_skipped(capsys, monkeypatch, dead):
    place = Path(tempfile.mkdtemp())  # not below one that only its owner may enter
    try:
        place.chmod(0o755)
        foreign = run_folder(place, "foreign", pid=dead)
        foreign.chmod(0)
        monkeypatch.setattr(os, "getuid", lambda: 4321)
        with without_rights():
            assert main(["gc", "--folder", str(place)]) == 0
        assert foreign.exists() and "1 folders of other users were skipped" in capsys.readouterr().out
    finally:
        shutil.rmtree(place)


def test_a_file_system_that_shows_another_owner(tmp_path, capsys, monkeypatch, dead):
    """What is in a foreign folder is not trusted, unless the user says that it is his, and it is private."""
    private, public = (run_folder(tmp_path, name, pid=dead) for name in ("private", "public"))
    private.chmod(0o700)
    public.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert main(["gc", "--folder", str(tmp_path)]) == 0 and private.exists()
    assert main(["gc", "--folder", str(tmp_path), "--owner-squashed"]) == 0
    assert not private.exists() and public.exists()


def test_a_damaged_note_stops_nobody_else(tmp_path, capsys, dead):
    damaged = run_folder(tmp_path, "a")
    (damaged / "head.json").write_text("{")
    gone = run_folder(tmp_path, "b", pid=dead)
    assert main(["gc", "--folder", str(tmp_path)]) == 1
    assert damaged.exists() and not gone.exists() and "could not be removed: JSONDecodeError" in capsys.readouterr().out
