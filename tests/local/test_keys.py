"""Key files and the folder that they lie in: who may have made them, when they appear, and that none stays."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time

import msgspec
import pytest

import clusterenv as ce
from clusterenv.backends.ray import NodeActor
from clusterenv.cli import main
from clusterenv.events import EventLog
from clusterenv.spec import blueprint
from clusterenv.transport.keys import (
    Joining,
    await_joining,
    close_joining,
    make_keys,
    private_folder,
    read_joining,
    write_joining,
)

pytestmark = pytest.mark.guarantee(25)


@pytest.fixture
def joining():
    keys = make_keys()
    return Joining("run", 0, "tcp://127.0.0.1:9", keys.public, keys.public, keys.secret)


# -- files that appear late ---------------------------------------------------------------------------------------


def test_a_key_file_that_appears_late_is_waited_for(tmp_path, joining):
    path, told, was_told = tmp_path / "node.key", [], threading.Event()

    def say(text):
        told.append(text)
        was_told.set()

    def appear():
        assert was_told.wait(10)
        write_joining(path, joining)

    thread = threading.Thread(target=appear)
    thread.start()
    assert await_joining(path, 30.0, say) == joining
    thread.join()
    assert len(told) == 1 and "No such file" in told[0] and "waiting up to 30 s" in told[0]


def test_a_key_file_that_never_appears(tmp_path, capsys):
    assert main(["node", "--join", str(tmp_path / "none"), "--key-timeout-s", "0.1"]) == 42
    assert "No such file or directory (waited 0.1 s for it)" in capsys.readouterr().err


def test_a_key_file_without_content_yet(tmp_path):
    path = tmp_path / "node.key"
    path.touch(mode=0o600)
    with pytest.raises(ce.KeyFileError, match=r"is empty \(waited 0.05 s"):
        await_joining(path, 0.05, print)


def test_what_will_not_change_is_not_waited_for(tmp_path, joining):
    write_joining(tmp_path / "node.key", joining)
    (tmp_path / "link").symlink_to(tmp_path / "node.key")
    with pytest.raises(ce.KeyFileError, match="symbolic link"):
        await_joining(tmp_path / "link", 1e9, print)


def test_a_node_of_a_run_that_was_closed_does_not_wait(tmp_path, joining, capsys):
    write_joining(tmp_path / "node.key", joining)
    close_joining(tmp_path / "node.key")
    assert joining.secret not in (tmp_path / "node.key").read_text()
    assert main(["node", "--join", str(tmp_path / "node.key")]) == 42
    assert "is of a run that was closed" in capsys.readouterr().err


# -- owners -------------------------------------------------------------------------------------------------------


def test_a_key_file_whose_owner_is_squashed(tmp_path, joining, monkeypatch):
    """Only with the digest of what the head wrote: then it is not another user's, whoever owns it."""
    path = tmp_path / "node.key"
    write_joining(path, joining)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(ce.KeyFileError, match=r"belongs to user \d+, and you are user 4321.*owner_squashed=True"):
        read_joining(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_joining(path, sha256=digest) == joining
    with pytest.raises(ce.KeyFileError, match="is not the one that the head wrote"):
        read_joining(path, sha256="0" * 64)
    path.chmod(0o640)
    with pytest.raises(ce.KeyFileError, match="can be read by others"):
        read_joining(path, sha256=digest)


def test_a_folder_whose_owner_is_squashed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(ce.KeyFileError, match=r"belongs to user .*`owner_squashed=True`"):
        private_folder(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert private_folder(tmp_path / "b", any_owner=True).stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        private_folder(tmp_path / "b", any_owner=True)


def test_nodes_get_the_digest_where_the_owner_is_squashed(tmp_path):
    """The agents take their key files by it."""
    lines = []

    class Stop(Exception):
        pass

    class Manual(ce.Manual):
        def launch(self, plan):
            lines.append(plan.command(0))
            raise Stop

    plan = blueprint("CartPole-v1", 1, None, is_remote=True, allow_pickle=True)
    for is_squashed in (False, True):
        remote = Manual(nodes=1, bind="127.0.0.1", folder=str(tmp_path), owner_squashed=is_squashed)
        with pytest.raises(Stop):
            remote.start(plan, None, ce.Recovery(), EventLog())
    assert "--key-sha256" not in lines[0] and len(lines[1][lines[1].index("--key-sha256") + 1]) == 64
    assert not list(tmp_path.iterdir())


# -- nothing stays ------------------------------------------------------------------------------------------------


def test_a_ray_actor_that_is_killed_leaves_no_key_file(tmp_path, joining, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    actor = NodeActor(msgspec.json.encode(joining), ["--lease-s", "0.1"])
    assert not list(tmp_path.iterdir())
    deadline = time.monotonic() + 30
    while (polled := actor.poll())[0] is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert polled[0] == 42 and "tcp://127.0.0.1:9 cannot be reached" in polled[1], "it has read the key"
    actor.stop()


FULL = """
import resource, sys
import clusterenv as ce
from clusterenv.backends.launch.folder import RunFolder

def fill(*_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

if sys.argv[2] == "keys":
    write = RunFolder.write_keys
    RunFolder.write_keys = lambda *args: (fill(), write(*args))
else:
    fill()
backend = ce.Manual(nodes=1, bind="127.0.0.1", folder=sys.argv[1], start_timeout_s=1)
try:
    ce.ClusterEnv("CartPole-v1", 2, backend=backend)
except ce.StartError as error:
    print(error)
"""


@pytest.mark.parametrize("what", ["note", "keys"])
def test_a_full_disk_at_the_start(tmp_path, what):
    """It is full from the beginning, or when the keys are written: an error that says where, and nothing is left."""
    place = tmp_path / "keys"
    command = [sys.executable, "-c", FULL, str(place), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"the run's folder {place}/clusterenv-" in done.stdout and "File too large" in done.stdout, done.stderr
    assert not list(place.iterdir())
