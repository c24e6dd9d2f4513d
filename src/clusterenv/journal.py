"""Keep the journal of a run: a small file from which a restarted script resumes (`ClusterEnv(..., resume=path)`).

It stores what a new head cannot know otherwise: which incarnations may have been used (their seeds are not used again),
and which address the nodes dial, with which keys. The owners of these facts read them at the start, and write them when
they change, which is rare: incarnations are reserved in blocks. The file is replaced atomically (written, flushed to
the disk, renamed), so that it is readable whenever its head is killed. Only its owner may read it.

One head uses a journal at a time. The lock belongs to the process (`lockf`), so that a forked child of a killed head
does not keep it. Such a lock does not exclude a second user within one process, hence `_OPEN`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import threading
import zlib
from pathlib import Path
from typing import Any

import msgspec

from clusterenv.errors import JournalError
from clusterenv.events import Event, EventLog

BLOCK = 64
"""Incarnations of each slot that are reserved at once: the journal is written when a slot has failed this often."""

_HEADER = b"clusterenv journal 1 "  # then a checksum in 8 hexadecimal digits, and a newline
_LARGEST = 1 << 26
"""Maximum size of a journal, in bytes."""

_TRIES = 100
"""How often to try the lock while ending heads remove its file."""

_OPEN: set[Path] = set()
"""Journals that this process has locked."""

_opening = threading.Lock()


class ClusterRecord(msgspec.Struct, frozen=True):
    """The address that the nodes of a run dial, and the keys. The nodes' own secrets are in their key files."""

    run: str
    folder: str
    """The run's folder, with the key files."""
    address: str
    """The address that nodes dial."""
    port: int
    """The port that the head listens on."""
    public: str
    secret: str
    node_keys: tuple[str, ...]
    """Public keys, in the order of the nodes' numbers."""
    nodes: int
    """Number of nodes that the backend asked for."""
    invited: int
    """Number of nodes that take part, after scaling."""


class _Record(msgspec.Struct):
    incarnations: int = -1
    """The highest incarnation that any slot may have used."""
    starts: int = 0
    """Number of heads that this run has had."""
    cluster: ClusterRecord | None = None


class Journal:
    """The journal of this process' run. Raises `JournalError` if another head uses it, or it cannot be used.

    Args:
        path: the file; created if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], events: EventLog) -> None:
        self._events = events
        given = Path(path).expanduser().absolute()
        self._owner = os.getpid()
        self._writing = threading.Lock()
        self._is_failing = False
        with _storing(given):
            given.parent.mkdir(parents=True, exist_ok=True)
            self.path = given.parent.resolve() / given.name
            self._lock = _lock(self.path)
        try:
            found = _read(self.path)
            self.is_resumed = found is not None
            """Whether an earlier head used it."""
            self._record = found or _Record()
            first = self._record.incarnations + 1
            self.cluster = self._record.cluster
            """The record of the head before this one."""
            self._record.starts += 1
            self._record.incarnations += BLOCK
            self.incarnations = (first, self._record.incarnations)
            """The first incarnation that no slot has used, and the last one reserved for this head so far."""
            with _storing(self.path):
                _write(self.path, self._record)
        except BaseException:
            self._unlock()
            raise

    @property
    def starts(self) -> int:
        """Number of heads that this run has had, including this one."""
        return self._record.starts

    def reserve(self, incarnation: int) -> None:
        """Reserve incarnations up to this one: no later head uses them.

        A full disk must not end a healthy run: it becomes an event, and the next head may repeat some seeds.
        """
        with self._writing:
            self._record.incarnations = max(incarnation, self._record.incarnations)
            self._try_to_store()

    def keep_cluster(self, record: ClusterRecord) -> None:
        """Store the record with which a later head can listen where this one does. Raises JournalError."""
        with self._writing:
            self._record.cluster = record
            self._store()

    def forget_cluster(self) -> None:
        """Remove the record and its keys: the nodes are gone. A full disk becomes an event."""
        with self._writing:
            if self._record.cluster is not None:
                self._record.cluster = None
                self._try_to_store()

    def keep_invited(self, nodes: int) -> None:
        """Store the number of nodes for a later head. A full disk becomes an event."""
        with self._writing:
            if self._record.cluster is not None:
                self._record.cluster = msgspec.structs.replace(self._record.cluster, invited=nodes)
                self._try_to_store()

    def end(self, is_clean: bool) -> None:
        """Unlock the journal; remove the file if the run is complete, else keep it for the next head. Idempotent."""
        with self._writing:
            if self._lock >= 0 and os.getpid() == self._owner:
                try:
                    if is_clean:
                        self.path.unlink(missing_ok=True)
                    self._unlock(is_clean)
                except OSError as error:  # a read-only disk
                    self._unlock()
                    self._failed(f"journal {self.path} cannot be removed: {error}")

    def _store(self) -> None:
        if self._lock >= 0 and os.getpid() == self._owner:
            with _storing(self.path):
                _write(self.path, self._record)

    def _try_to_store(self) -> None:
        try:
            self._store()
            self._is_failing = False
        except JournalError as error:
            self._failed(str(error))

    def _failed(self, reason: str) -> None:
        """Count a failure as an event; one warning for all of them until a write succeeds."""
        self._events.add(Event("journal_not_written", reason), logging.DEBUG if self._is_failing else logging.WARNING)
        self._is_failing = True

    def _unlock(self, is_over: bool = False) -> None:
        if is_over:
            _lock_file(self.path).unlink(missing_ok=True)  # before releasing the lock: see `_locked`
        fd, self._lock = self._lock, -1
        os.close(fd)
        _OPEN.discard(self.path)


def discard(path: Path, run: str, is_whole: bool) -> str:
    """Remove this run's keys from a journal that no head uses, or (`is_whole`) the journal; return what was done.

    Raises JournalError if a head uses it, or it cannot be read.
    """
    if not path.exists():
        return ""
    journal = _Held(path)
    try:
        record = _read(path)
        if record is None or record.cluster is None or record.cluster.run != run:
            return ""  # it belongs to another run by now
        if is_whole:
            path.unlink()
            return f"journal {path} is removed"
        record.cluster = None
        _write(path, record)
        return f"journal {path} has no keys any more, and is kept: a script that resumes from it uses new seeds"
    finally:
        journal.release(is_whole)


class _Held:
    """Hold the lock of a journal that is inspected, not used for a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = _lock(path)

    def release(self, is_over: bool) -> None:
        if is_over:
            _lock_file(self._path).unlink(missing_ok=True)
        os.close(self._fd)
        _OPEN.discard(self._path)


# -- the file -----------------------------------------------------------------------------------------------------


def _write(path: Path, record: _Record) -> None:
    body = msgspec.json.encode(record)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # left by a head that was killed while writing
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(_HEADER + b"%08x\n" % zlib.crc32(body) + body)
        file.flush()
        os.fsync(fd)
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # makes the rename durable
    finally:
        os.close(folder)


def _read(path: Path) -> _Record | None:
    """Return the record in the file; None if there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = "is a symbolic link" if path.is_symlink() else f"cannot be read: {error.strerror}"
        raise JournalError(f"journal {path} {what}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise JournalError(f"journal {path} is not a regular file: resume= takes the path of a file")
        if info.st_mode & 0o077:
            raise JournalError(f"journal {path} can be read by others, and has keys in it: chmod 600 it")
        if info.st_uid != os.getuid():
            raise JournalError(f"journal {path} belongs to user {info.st_uid}, and you are user {os.getuid()}")
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(_LARGEST)
    finally:
        os.close(fd)
    header, _, body = data.partition(b"\n")
    try:
        if header != _HEADER + b"%08x" % zlib.crc32(body):
            raise ValueError("its checksum is wrong" if header.startswith(_HEADER) else "it has no journal header")
        return msgspec.json.decode(body, type=_Record)
    except ValueError as error:
        raise JournalError(
            f"journal {path} is damaged, or not a journal: {error}. Nothing was started, and the file was not changed. "
            "Restore it, or name another file: a new run may use the same seeds again"
        ) from None


@contextlib.contextmanager
def _storing(path: Path) -> Any:
    """Turn an `OSError` (a full or read-only disk) into a `JournalError` that names the file."""
    try:
        yield
    except JournalError:
        raise
    except OSError as error:
        raise JournalError(f"journal {path} cannot be written: {error}") from error


# -- the lock -----------------------------------------------------------------------------------------------------


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _lock(path: Path) -> int:
    """Return a descriptor that holds this journal's lock. It is a separate file because the journal is replaced."""
    with _opening:
        if path in _OPEN:
            raise JournalError(
                f"journal {path} is in use by another ClusterEnv of this process: close() that one first"
            )
        fd = _locked(_lock_file(path))
        _OPEN.add(path)
        return fd


def _locked(path: Path) -> int:
    for _ in range(_TRIES):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.pread(fd, 1000, 0).decode(errors="replace").strip() or "another process"
                raise JournalError(
                    f"journal {path.with_suffix('')} is in use by {holder}: a run has one head. End that one first, "
                    "or name another file"
                ) from None
            except OSError as error:
                raise JournalError(
                    f"journal {path.with_suffix('')}: its file system cannot lock files ({error.strerror}), so two "
                    "heads could use it: name a file on another file system"
                ) from error
            if _is_same(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                kept, fd = fd, -1
                return kept
        finally:
            if fd >= 0:
                os.close(fd)
        # The last holder removed the file that was opened above: another one exists by now, or none. Try again.
    raise JournalError(f"journal {path.with_suffix('')}: could not lock it, other heads keep starting and ending")


def _is_same(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
