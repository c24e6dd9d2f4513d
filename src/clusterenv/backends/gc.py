"""`clusterenv gc`: remove what is left of runs whose head is gone.

Nodes end by themselves when their lease on the head is over. Queued jobs, objects in a Kubernetes namespace and key
files stay. They are found by the note in the run's folder (`Note`), and removed by the backend's `collect_garbage`. The
note is deleted last, when everything else is gone.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from clusterenv.backends import registry
from clusterenv.backends.launch.note import NAME, life, now_there
from clusterenv.errors import ClusterEnvError, SpecError, StartError

_COLLECT_S = 60.0  # how long a backend may take to remove one run


class Removed(NamedTuple):
    runs: int  # runs without a head; removed unless it was a dry run
    failures: int


def places() -> list[Path]:
    """Return the default places of run folders."""
    return [Path("~/.clusterenv").expanduser(), Path(tempfile.gettempdir())]


def remove(
    folders: list[Path],
    dry_run: bool,
    say: Callable[[str], None],
    run: str | None = None,
    any_owner: bool = False,
) -> Removed:
    """Remove what runs without a head have left below these folders.

    `run`: only this one, also if the state of its head is not known here. `any_owner`: the file system shows other
    owners for this user's files.
    """
    count = failures = foreign = 0
    for folder in folders:
        for path in sorted(folder.glob(f"clusterenv-{glob.escape(run) if run else '*'}")):
            try:
                info = path.lstat()
                if path.is_symlink() or not path.is_dir():
                    continue
                if info.st_uid != os.getuid() and not (any_owner and not info.st_mode & 0o077):
                    foreign += 1  # nothing in it is trusted: a note can name a kubeconfig, which can run programs
                    continue
                if not (path / NAME).is_file():
                    continue
                note = json.loads((path / NAME).read_text())
                head = life(note, now_there(folder) - (path / NAME).stat().st_mtime)
                if not head.is_over and (head.is_certain or run is None):
                    how = "" if head.is_certain else f"; if you know that it is gone: clusterenv gc --run {note['run']}"
                    say(f"{path}: kept, {head.text}{how}")
                    continue
                count += 1
                say(f"{path}: {'would be removed' if dry_run else 'removing'}, {head.text}")
                if not dry_run:
                    for backend, facts in note["jobs"].items():
                        _collect(backend, facts, say)
                    shutil.rmtree(path)
            except (ClusterEnvError, OSError, ValueError, LookupError, TypeError) as error:
                failures += 1
                say(f"{path}: kept, it could not be removed: {type(error).__name__}: {error}")
    if foreign:
        say(f"{foreign} folders of other users were skipped")
    return Removed(count, failures)


def remove_pods(
    namespace: str | None, context: str | None, dry_run: bool, say: Callable[[str], None], run: str | None = None
) -> Removed:
    """Remove runs from a Kubernetes namespace whose heads ran in a pod: their notes are gone with it."""
    from clusterenv.backends.kubernetes_api import delete_abandoned

    try:
        return Removed(*delete_abandoned(namespace, context, dry_run, say, run, time.monotonic() + _COLLECT_S))
    except ClusterEnvError as error:
        say(str(error))
        return Removed(0, 1)


def _collect(name: str, facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Have a backend remove what it has left. Raises where something may remain."""
    collect_garbage = getattr(registry.find(name), "collect_garbage", None)
    if collect_garbage is None:
        raise SpecError(f"the note names the backend {name!r}, which has no collect_garbage()")
    try:
        say(collect_garbage(facts, time.monotonic() + _COLLECT_S))
    except ClusterEnvError:
        raise
    except Exception as error:  # code of another package must not end the search
        raise StartError(f"{type(error).__name__}: {error}") from error
