"""Keys and the files that hold them: one pair for the head, one per node, made for one run.

A file that another user could have read or made is refused: what it starts would be under their control.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from clusterenv.errors import KeyFileError

__all__ = ["Joining", "KeyPair", "make_keys", "private_folder", "read_joining", "write_joining"]


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


def private_folder(path: Path) -> Path:
    """A folder that only this user can look into."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise KeyFileError(f"{path}: keys go into a folder of your own with mode 0700; this one is not")
    return path


def write_joining(path: Path, joining: Joining) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(joining))


def read_joining(path: Path, is_mounted: bool = False) -> Joining:
    """`is_mounted`: a Secret that the platform has put there, as a file of its own, with rights of its own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_mounted else os.O_NOFOLLOW))
    except OSError as error:
        what = "is a symbolic link" if path.is_symlink() else f"cannot be read: {error.strerror}"
        raise KeyFileError(f"key file {path} {what}") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or (info.st_uid != os.getuid() and not is_mounted):
            raise KeyFileError(f"key file {path} is not a file of yours")
        if info.st_mode & 0o077 and not is_mounted:
            raise KeyFileError(f"key file {path} can be read by others: chmod 600 it (and think of the run as known)")
        data = file.read(1 << 16)
    try:
        return msgspec.json.decode(data, type=Joining)
    except msgspec.DecodeError as error:
        raise KeyFileError(f"key file {path} is damaged: {error}") from None
