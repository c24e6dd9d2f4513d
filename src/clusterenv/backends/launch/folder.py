"""`RunFolder`: the folder of one run, with its key files and its note; private, and removed at the end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clusterenv.backends.launch.note import Note
from clusterenv.errors import ClusterEnvError, StartError
from clusterenv.transport.keys import Joining, KeyPair, close_joining, private_folder, write_joining


def run_path(place: str | os.PathLike[str] | None, run: str) -> Path:
    """Return the folder of this run; `place`: where such folders are made, None: the temporary directory."""
    return Path(place or tempfile.gettempdir()).expanduser() / f"clusterenv-{run}"


def key_file(folder: Path, node: int) -> Path:
    return folder / f"node-{node}.key"


class RunFolder:
    """
    Args:
        place: where to make the folder; None: the temporary directory.
        lease_s: for the note.
        any_owner: the file system may show another owner than this user for it.
    """

    def __init__(self, place: str | os.PathLike[str] | None, lease_s: float, any_owner: bool) -> None:
        self.run = secrets.token_hex(4)
        # The run has its own folder, also below one that the user names: it is removed at the end.
        self.path = run_path(place, self.run)
        with self.writing():
            private_folder(self.path, any_owner)
        try:
            with self.writing():
                self.note = Note(self.path, self.run, lease_s)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._is_over = False
        self.files: tuple[Path, ...] = ()  # the key file of each node
        self.digests: tuple[str, ...] = ()  # SHA-256 of each key file

    def write_keys(self, address: str, head_key: str, pairs: list[KeyPair]) -> None:
        with self.writing():
            for node, pair in enumerate(pairs):
                path = key_file(self.path, node)
                write_joining(path, Joining(self.run, node, address, head_key, pair.public, pair.secret))
                self.files += (path,)
                self.digests += (hashlib.sha256(path.read_bytes()).hexdigest(),)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an `OSError` (of a full or read-only disk) into a `StartError` that says where."""
        try:
            yield
        except ClusterEnvError:
            raise
        except OSError as error:
            raise StartError(
                f"the run's folder {self.path} could not be filled, or nodes not started from it: {error}. If that "
                "disk is full or read-only, choose another: `folder=...` of the backend, or TMPDIR where that is None"
            ) from error

    def end(self, left: str) -> bool:
        """Remove the folder or, where jobs of the run are left, only its secrets: `clusterenv gc` needs the note.

        Returns whether this was the first time.
        """
        if self._is_over:
            return False
        self._is_over = True
        self.note.end(left)
        if left:
            for path in self.files:
                close_joining(path)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        return True
