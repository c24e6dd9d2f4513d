"""`RunFolder`: create the private folder of a run, with its key files and its note, and remove it at the end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterenv.backends.launch.note import Note
from clusterenv.errors import ClusterEnvError, StartError
from clusterenv.transport.keys import Joining, KeyPair, close_joining, private_folder, write_joining


def run_path(place: str | os.PathLike[str] | None, run: str) -> Path:
    """Return the folder of this run; `place`: its parent folder; None: the temporary directory."""
    return Path(place or tempfile.gettempdir()).expanduser() / f"clusterenv-{run}"


def key_file(folder: Path, node: int) -> Path:
    return folder / f"node-{node}.key"


class RunFolder:
    """The folder of one run.

    Args:
        place: where to create the folder; None: the temporary directory.
        lease_s: written to the note.
        any_owner: the file system may show another owner than this user.
        journal: the journal from which another head may continue; written to the note.
        earlier: the name, folder and jobs of the run to continue; None: create a new run.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | None,
        lease_s: float,
        any_owner: bool,
        journal: str = "",
        earlier: tuple[str, Path, Mapping[str, Any]] | None = None,
    ) -> None:
        # The run needs its own folder, even below one that the user names: it is removed at the end.
        self.run = secrets.token_hex(4) if earlier is None else earlier[0]
        self.path = run_path(place, self.run) if earlier is None else earlier[1]
        if earlier is None:
            with self.writing():
                private_folder(self.path, any_owner)
        try:
            with self.writing():
                self.note = Note(self.path, self.run, lease_s, journal, {} if earlier is None else earlier[2])
        except BaseException:
            if earlier is None:
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

    def find_keys(self, nodes: int) -> None:
        """Use the key files that an earlier head wrote."""
        self.files = tuple(key_file(self.path, node) for node in range(nodes))
        self.digests = tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in self.files)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an `OSError` (a full or read-only disk) into a `StartError` that names the folder."""
        try:
            yield
        except ClusterEnvError:
            raise
        except OSError as error:
            raise StartError(
                f"could not write the run's folder {self.path}, or start nodes from it: {error}. If its disk is full "
                "or read-only, choose another: `folder=...` of the backend, or TMPDIR if that is None"
            ) from error

    def end(self, left: str, is_left: bool = False) -> bool:
        """Remove the folder or, if jobs of the run are left, only its secrets: `clusterenv gc` needs the note.

        `is_left`: keep everything for another head.
        Returns whether this was the first call.
        """
        if self._is_over:
            return False
        self._is_over = True
        self.note.end(left)
        if is_left:
            self.note.touch()  # the lease of the nodes begins now
        elif left:
            for path in self.files:
                close_joining(path)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        return True
