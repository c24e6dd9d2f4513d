"""`clusterenv gc`: remove what is left of runs whose head is gone.

Nodes end by themselves when their lease on the head expires. Queued jobs, objects in a Kubernetes namespace and key
files remain. The note in the run's folder (`Note`) lists them, and the backend's `collect_garbage` removes them. The
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
from clusterenv.errors import ClusterEnvError, JournalError, SpecError, StartError
from clusterenv.journal import discard

_COLLECT_S = 60.0  # how long a backend may take to remove one run


class Removed(NamedTuple):
    runs: int  # runs without a head; a dry run only counts them
    failures: int


def places() -> list[Path]:
    """Return the default parent folders of run folders."""
    return [Path("~/.clusterenv").expanduser(), Path(tempfile.gettempdir())]


def remove(
    folders: list[Path],
    dry_run: bool,
    say: Callable[[str], None],
    run: str | None = None,
    any_owner: bool = False,
) -> Removed:
    """Remove what runs without a head left in these folders.

    `run`: remove only this run, even if the state of its head is unknown. `any_owner`: the file system shows a
    different owner for this user's files.
    """
    count = failures = foreign = 0
    for folder in folders:
        for path in sorted(folder.glob(f"clusterenv-{glob.escape(run) if run else '*'}")):
            try:
                info = path.lstat()
                if path.is_symlink() or not path.is_dir():
                    continue
                if info.st_uid != os.getuid() and not (any_owner and not info.st_mode & 0o077):
                    foreign += 1  # do not trust its note: it can name a kubeconfig, which can run programs
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
                    _discard_journal(note, run is not None, say)
                    shutil.rmtree(path)
            except (ClusterEnvError, OSError, ValueError, LookupError, TypeError) as error:
                failures += 1
                say(f"{path}: kept, it could not be removed: {type(error).__name__}: {error}")
    if foreign:
        say(f"{foreign} folders of other users were skipped")
    return Removed(count, failures)


def _discard_journal(note: Mapping[str, Any], is_whole: bool, say: Callable[[str], None]) -> None:
    if note.get("journal"):
        try:
            said = discard(Path(note["journal"]), note["run"], is_whole)
        except (JournalError, OSError) as error:  # unreadable, or in use by a head that runs without these nodes
            said = f"its journal is kept: {error}"
        if said:
            say(said)


def remove_pods(
    namespace: str | None, context: str | None, dry_run: bool, say: Callable[[str], None], run: str | None = None
) -> Removed:
    """Remove runs whose heads ran in pods of a Kubernetes namespace: their notes were lost with those pods."""
    from clusterenv.backends.kubernetes_api import delete_abandoned

    try:
        return Removed(*delete_abandoned(namespace, context, dry_run, say, run, time.monotonic() + _COLLECT_S))
    except ClusterEnvError as error:
        say(str(error))
        return Removed(0, 1)


def _collect(name: str, facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Call the `collect_garbage` of a backend. Raises if something may remain."""
    collect_garbage = getattr(registry.find(name), "collect_garbage", None)
    if collect_garbage is None:
        raise SpecError(f"the note names the backend {name!r}, which has no collect_garbage()")
    try:
        say(collect_garbage(facts, time.monotonic() + _COLLECT_S))
    except ClusterEnvError:
        raise
    except Exception as error:  # another package's code must not stop the cleanup of other runs
        raise StartError(f"{type(error).__name__}: {error}") from error
