"""The journal of a run: readable whenever its head is killed, private, and of one head at a time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clusterenv.engine.incarnations import Incarnations
from clusterenv.engine.instructions import Reserve
from clusterenv.errors import JournalError, StartError
from clusterenv.events import EventLog
from clusterenv.journal import BLOCK, ClusterRecord, Journal, discard

pytestmark = pytest.mark.guarantee(13)

_CLUSTER = ClusterRecord("0a1b2c3d", "/nowhere", "tcp://10.0.0.1:5000", 5000, "public", "secret", ("a", "b"), 2, 2)

_KILLED = """
import os, random, signal, sys, time
from clusterenv.events import EventLog
from clusterenv.journal import Journal

dice, before = random.Random(1), -1
for _ in range(int(sys.argv[2])):
    read, write = os.pipe()
    writer = os.fork()
    if writer == 0:
        journal = Journal(sys.argv[1], EventLog())
        number = journal.incarnations[1]
        while True:
            number += 1
            journal.reserve(number)
            os.write(write, b"%d\\n" % number)
    os.close(write)
    said = os.read(read, 100)
    time.sleep(dice.uniform(0.0, 0.01))  # to be killed at any moment of a write
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    with os.fdopen(read, "rb") as rest:
        reserved = int((said + rest.read()).split()[-1])
    journal = Journal(sys.argv[1], EventLog())
    assert journal.is_resumed and journal.incarnations[0] > reserved > before, (journal.incarnations, reserved, before)
    before = reserved
    journal.end(is_clean=False)
"""

_HOLDER = """
import sys
from clusterenv.events import EventLog
from clusterenv.journal import Journal
journal = Journal(sys.argv[1], EventLog())
print("here", flush=True)
sys.stdin.read()
journal.end(is_clean="clean" in sys.argv)
"""


def _journal(path: Path) -> Journal:
    return Journal(path, EventLog())


def _start(script: str, path: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(path), *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_later_head_begins_above_what_was_reserved(tmp_path):
    path = tmp_path / "new folder" / "journal"
    first = _journal(path)
    assert not first.is_resumed and first.incarnations == (0, BLOCK - 1) and first.starts == 1
    first.keep_cluster(_CLUSTER)
    first.reserve(500)
    first.keep_invited(1)
    first.end(is_clean=False)
    second = _journal(path)
    assert second.is_resumed and second.incarnations == (501, 500 + BLOCK) and second.starts == 2
    assert second.cluster is not None and second.cluster.invited == 1 and second.cluster.secret == "secret"
    second.end(is_clean=True)
    assert list(path.parent.iterdir()) == [], "nothing is left of a run that is complete"


def test_only_its_user_can_read_it(tmp_path):
    path = tmp_path / "journal"
    before = os.umask(0)
    try:
        journal = _journal(path)
        journal.reserve(1000)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "journal": 0o600,
        "journal.lock": 0o600,
    }
    journal.end(is_clean=False)
    path.chmod(0o640)
    with pytest.raises(JournalError, match=r"can be read by others.*chmod 600"):
        _journal(path)
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(JournalError, match="symbolic link"):
        _journal(link)
    (tmp_path / "folder").mkdir()
    with pytest.raises(JournalError, match="not a regular file"):
        _journal(tmp_path / "folder")


def test_it_can_be_read_whenever_its_head_is_killed(tmp_path):
    with _start(_KILLED, tmp_path / "journal", "60") as killer:
        _, errors = killer.communicate(timeout=100)
    assert killer.returncode == 0, errors


def test_two_heads_exactly_one_has_it(tmp_path):
    path = tmp_path / "journal"
    heads = [_start(_HOLDER, path) for _ in range(4)]
    try:
        said = [head.stdout.readline() for head in heads]
        assert sorted(said) == [""] * 3 + ["here\n"]
        winner = heads[said.index("here\n")]
        with pytest.raises(JournalError, match=rf"in use by process {winner.pid} on {socket.gethostname()}"):
            _journal(path)
        for head in heads:
            if head is not winner:
                assert f"in use by process {winner.pid} on {socket.gethostname()}" in head.stderr.read()
        winner.send_signal(signal.SIGKILL)
        winner.wait()
        journal = _journal(path)
        assert journal.is_resumed
        journal.end(is_clean=True)
    finally:
        for head in heads:
            head.kill()
            head.communicate()


def test_heads_that_begin_while_others_end_in_order_never_share_it(tmp_path):
    path = tmp_path / "journal"
    for _ in range(2):
        first = _start(_HOLDER, path, "clean")
        assert first.stdout.readline() == "here\n"
        others = [_start(_HOLDER, path) for _ in range(3)]
        first.communicate("")
        try:
            assert sum(head.stdout.readline() == "here\n" for head in others) <= 1
        finally:
            for head in others:
                head.kill()
                head.communicate()


def test_within_a_process_it_is_of_one_run_too(tmp_path):
    first = _journal(tmp_path / "journal")
    with pytest.raises(JournalError, match="another ClusterEnv of this process"):
        _journal(tmp_path / "journal")
    assert issubclass(JournalError, StartError)
    first.end(is_clean=True)
    first.end(is_clean=True)
    _journal(tmp_path / "journal").end(is_clean=True)


def test_a_forked_child_neither_keeps_it_nor_removes_it(tmp_path):
    journal = _journal(tmp_path / "journal")
    child = os.fork()
    if child == 0:
        journal.reserve(10_000)
        journal.end(is_clean=True)
        os._exit(0)
    os.waitpid(child, 0)
    with _start(_HOLDER, tmp_path / "journal") as other:
        assert "in use by process" in other.communicate("")[1]
    journal.end(is_clean=False)
    again = _journal(tmp_path / "journal")
    assert again.incarnations[0] == BLOCK
    again.end(is_clean=True)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "garbage"])
def test_a_damaged_one_is_refused_and_left_as_it_is(tmp_path, damage):
    path = tmp_path / "journal"
    _journal(path).end(is_clean=False)
    good = path.read_bytes()
    bad = {
        "empty": b"",
        "cut": good[:-5],
        "flipped": good.replace(b'"starts":1', b'"starts":2'),
        "garbage": b"\x00\xff" * 40,
    }[damage]
    assert bad != good
    path.write_bytes(bad)
    with pytest.raises(JournalError, match=r"journal .* is damaged.*Nothing was started"):
        _journal(path)
    assert path.read_bytes() == bad
    path.write_bytes(good)
    journal = _journal(path)  # nobody has kept the lock
    assert journal.starts == 2
    journal.end(is_clean=True)


def test_a_disk_that_is_full_is_an_event_and_no_end(tmp_path, monkeypatch):
    events = EventLog()
    journal = Journal(tmp_path / "journal", events)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        journal.reserve(1000)
    assert [event.kind for event in events()] == ["journal_not_written"]
    assert "No space left" in events()[0].reason
    journal.end(is_clean=False)
    again = _journal(tmp_path / "journal")
    assert again.incarnations[0] == BLOCK, "what was there before is whole"
    again.end(is_clean=True)


def test_keys_are_taken_out_when_the_nodes_are_gone(tmp_path):
    path = tmp_path / "journal"
    journal = _journal(path)
    journal.keep_cluster(_CLUSTER)
    with pytest.raises(JournalError, match="in use"):
        discard(path, _CLUSTER.run, is_whole=False)
    journal.end(is_clean=False)
    assert discard(path, "another run", is_whole=True) == ""
    assert "no keys any more" in discard(path, _CLUSTER.run, is_whole=False)
    assert b"secret" not in path.read_bytes()
    journal = _journal(path)
    assert journal.cluster is None and journal.incarnations[0] == BLOCK
    journal.keep_cluster(_CLUSTER)
    journal.end(is_clean=False)
    assert "removed" in discard(path, _CLUSTER.run, is_whole=True)
    assert list(tmp_path.iterdir()) == []


def test_incarnations_are_reserved_before_they_are_used():
    incarnations = Incarnations(2, first=10, reserved=12)
    assert incarnations.begin_next([0]) is None and incarnations.begin_next([0]) is None
    reserve = incarnations.begin_next([0])
    assert isinstance(reserve, Reserve) and reserve.incarnation > incarnations.numbers[0] == 13
    assert incarnations.begin_next([0, 1]) is None
    saved = Incarnations(2).state_dict()
    incarnations.load_state_dict(saved)
    assert incarnations.numbers == [14, 11], "an older state leads to no seed that was used already"
    assert all(Incarnations(1).begin_next([0]) is None for _ in range(500)), "without a journal there is nothing to do"
