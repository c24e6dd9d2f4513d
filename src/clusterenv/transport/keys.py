"""Make keys, and write and read the files that hold them: one pair for the head, one per node, for one run.

A file that another user could have read or made is refused: that user could control what it starts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import zmq

from clusterenv.errors import KeyFileError

_LARGEST = 1 << 16  # bytes that a key file may have

_CLOSED = b"closed\n"


class KeyPair(NamedTuple):
    public: str
    secret: str


class Joining(msgspec.Struct, frozen=True):
    """All that a node needs to join a run."""

    run: str
    node: int
    address: str
    head_key: str
    public: str
    secret: str


def make_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def private_folder(path: Path, any_owner: bool = False) -> Path:
    """Make a new folder that only this user can read.

    `any_owner`: accept a file system that shows another owner for it. Users mapped to that owner can read it too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700)
    info = path.lstat()
    if info.st_mode & 0o077 or (info.st_uid != os.getuid() and not any_owner):
        path.rmdir()
        what = f"has mode {stat.S_IMODE(info.st_mode):04o}" if info.st_mode & 0o077 else _owner(info.st_uid)
        raise KeyFileError(
            f"keys go into a folder of your own with mode 0700, but a new one below {path.parent} {what}. Choose "
            "another `folder`; where a file system maps owners, `owner_squashed=True` accepts that (docs/security.md)"
        )
    return path


def write_joining(path: Path, joining: Joining) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(joining))


def close_joining(path: Path) -> None:
    """Overwrite a key file of a run that is over: a node that still starts then ends at once, without waiting."""
    with contextlib.suppress(OSError):
        path.write_bytes(_CLOSED)


def read_joining(path: Path, is_mounted: bool = False, sha256: str | None = None) -> Joining:
    """Read a key file, and refuse one that another user could have read or made.

    `is_mounted`: it is a mounted Secret, whose owner and mode are the platform's. `sha256`: of the content that the
    head wrote; then the owner is not checked.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_mounted else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            raise _NotThereYet(f"key file {path} cannot be read: {error.strerror}") from None
        what = "is a symbolic link" if path.is_symlink() else f"cannot be read: {error.strerror}"
        raise KeyFileError(f"key file {path} {what}") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise KeyFileError(f"key file {path} is not a regular file")
        if info.st_uid != os.getuid() and not is_mounted and sha256 is None:
            raise KeyFileError(
                f"key file {path} is not yours: it {_owner(info.st_uid)}. If the file system maps owners "
                "(NFS with root_squash), start the run with `owner_squashed=True` (docs/security.md)"
            )
        if info.st_mode & 0o077 and not is_mounted:
            raise KeyFileError(f"key file {path} can be read by others: chmod 600 it (and treat its keys as exposed)")
        data = file.read(_LARGEST)
    if data == _CLOSED:
        raise KeyFileError(f"key file {path} is of a run that was closed")
    if not data:
        raise _NotThereYet(f"key file {path} is empty")
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise KeyFileError(f"key file {path} is not the one that the head wrote: its SHA-256 is not {sha256}")
    return _decode(data, f"key file {path}")


def read_joining_from(stream: BinaryIO) -> Joining:
    """Read the content of a key file from a pipe, so that no file is left."""
    return _decode(stream.read(_LARGEST), "the key on the standard input")


def await_joining(
    path: Path, timeout_s: float, say: Callable[[str], None], is_mounted: bool = False, sha256: str | None = None
) -> Joining:
    """Do as `read_joining`, but wait for a file that is not there yet: network file systems show new files late."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.05
    while True:
        try:
            return read_joining(path, is_mounted, sha256)
        except _NotThereYet as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise KeyFileError(f"{error} (waited {timeout_s:g} s for it)") from None
            if pause_s == 0.05:
                say(f"{error}; waiting up to {timeout_s:g} s for it")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 2.0)


class _NotThereYet(KeyFileError):
    """A file that may still appear."""


def _decode(data: bytes, what: str) -> Joining:
    try:
        return msgspec.json.decode(data, type=Joining)
    except msgspec.DecodeError as error:
        raise KeyFileError(f"{what} is damaged: {error}") from None


def _owner(uid: int) -> str:
    return f"belongs to user {uid}, and you are user {os.getuid()}"
