"""`clusterenv gc`: only what a dead head of this machine and this user left is removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from clusterenv.backends.leftovers import note_head
from clusterenv.cli import main


def run_folder(folder, name, **changes):
    path = folder / f"clusterenv-{name}"
    path.mkdir(parents=True)
    (path / "node-0.key").write_text("secret")
    note_head(path, name)
    note = json.loads((path / "head.json").read_text())
    (path / "head.json").write_text(json.dumps({**note, **changes}))
    return path


def test_gc(tmp_path, capsys):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = run_folder(tmp_path, "gone", pid=dead.pid)
    reused = run_folder(tmp_path, "reused", started="1")
    running = run_folder(tmp_path, "running")
    elsewhere = run_folder(tmp_path, "elsewhere", host="another", pid=dead.pid)
    other = tmp_path / "clusterenv-other"
    other.mkdir()
    (tmp_path / "clusterenv-link").symlink_to(gone)
    assert main(["gc", "--folder", str(tmp_path), "--dry-run"]) == 0
    assert gone.exists() and "2 runs without a head" in capsys.readouterr().out
    assert main(["gc", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert not gone.exists() and not reused.exists()
    assert running.exists() and f"its head is running (process {os.getpid()})" in told
    assert elsewhere.exists() and "its head is on another" in told
    assert other.exists(), "no folder of a run"
