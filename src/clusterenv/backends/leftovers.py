"""What a killed head leaves: found by the notes in its run's folder, and removed (`clusterenv gc`).

Nodes end by themselves when their lease on the head is over. What stays is what cannot know: jobs that still wait in a
queue, objects in a Kubernetes namespace, key files.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["note_head", "places", "remove"]

_NOTE = "head.json"


def note_head(folder: Path, run: str) -> None:
    """Written by the head when it makes the folder: who it is."""
    pid = os.getpid()
    note = {"run": run, "host": socket.gethostname(), "pid": pid, "started": _started(pid)}
    (folder / _NOTE).write_text(json.dumps(note))


def places() -> list[Path]:
    """Where run folders are unless somebody chose another place."""
    return [Path("~/.clusterenv").expanduser(), Path(tempfile.gettempdir())]


def remove(folders: list[Path], dry_run: bool, say: Callable[[str], None]) -> int:
    """Remove what runs without a head have left below these folders; returns how many there were."""
    count = 0
    for folder in folders:
        for run in sorted(folder.glob("clusterenv-*")):
            if run.is_symlink() or not (run / _NOTE).is_file() or run.stat().st_uid != os.getuid():
                continue
            note = json.loads((run / _NOTE).read_text())
            if note["host"] != socket.gethostname():
                say(f"{run}: its head is on {note['host']}: run this there")
            elif _started(note["pid"]) == note["started"]:
                say(f"{run}: its head is running (process {note['pid']})")
            else:
                count += 1
                say(f"{run}: left by process {note['pid']}" + (" (dry run: kept)" if dry_run else ""))
                if not dry_run:
                    _remove_run(run, say)
    return count


def _remove_run(run: Path, say: Callable[[str], None]) -> None:
    if (run / "slurm-jobs").is_file():
        from clusterenv.backends.slurm import cancel

        jobs = (run / "slurm-jobs").read_text().split()
        say(f"{run}: cancelling SLURM jobs {', '.join(jobs)}")
        cancel(jobs)
    if (run / "kubernetes.json").is_file():
        from clusterenv.backends.kubernetes import connect, delete_run

        note = json.loads((run / "kubernetes.json").read_text())
        say(f"{run}: deleting run clusterenv-{note['run']} in namespace {note['namespace']}")
        api, _ = connect(note["kubeconfig"], note["context"])
        delete_run(api, note["namespace"], note["run"])
        api.api_client.close()
    shutil.rmtree(run)


def _started(pid: int) -> str:
    """When this process started, in the kernel's own count; tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""
