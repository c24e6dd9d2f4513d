"""`Numbered`: an environment that numbers its transitions and counts them in a file.

The number is in the observation, so the learner can tell which transitions it got. The environment writes the count to
a file that no other part of the system touches: it is right whatever happens to the process. Faults that an environment
causes itself (an exception, NaN, a hang) are requested through a second file.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

__all__ = ["ACTIONS", "Numbered", "Record", "Seen", "Trouble", "ask", "lives", "logits", "numbered", "read_record"]

ACTIONS = 5
_RECORD = struct.Struct("qqqqq")
_REQUEST = struct.Struct("qd")
_PAGE = 4096


class Trouble(enum.IntEnum):
    """Faults that an environment can be asked to cause in its next step."""

    NONE = 0
    KILL = 1
    SEGFAULT = 2
    EXIT = 3
    HANG = 4
    HANG_WITH_GIL = 5
    RAISE = 6
    NAN = 7
    SLOW = 8
    STDERR = 9
    """Write as many bytes to standard error as the fault's amount says."""


class Record(NamedTuple):
    """The record that one life of a slot writes. A life is one environment object."""

    produced: int
    """Number of steps taken."""
    episodes: int
    pid: int
    """The worker process."""
    agent: int
    """The node agent: the parent of the fork server, which is the parent of a worker."""
    began: int
    """Start time of the worker process, in clock ticks since boot, because process numbers are reused."""


class Seen(NamedTuple):
    """An observation, by its fields."""

    slot: int
    life: int
    episode: int
    t: int
    number: int
    """Number of the transition that led here, counted from 1 over the whole life; a reset does not count."""
    action: int
    """The action of that transition; -1 after a reset."""

    @classmethod
    def read(cls, obs: Any) -> Seen:
        return cls(*(int(value) for value in obs))

    @property
    def length(self) -> int:
        """Return the number of steps of the episode."""
        return 3 + (7 * self.slot + 11 * self.life + 5 * self.episode) % 29

    @property
    def is_terminated(self) -> bool:
        return self.t >= self.length and (self.slot + self.episode) % 2 == 0

    @property
    def is_truncated(self) -> bool:
        return self.t >= self.length and (self.slot + self.episode) % 2 == 1


class Numbered(gym.Env[Any, Any]):
    """An environment whose observation is (slot, life, episode, t, number, action), and whose reward is the number.

    Args:
        folder: for the counts of its lives; every node must see it under this path.
        slot: the slot that it runs in.
        pace_s: duration of a step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (len(Seen._fields),), np.float64)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, folder: str, slot: int, pace_s: float = 0.0) -> None:
        self._slot, self._pace_s = slot, pace_s
        self._life, self._record = _begin_life(Path(folder), slot)
        self._requests = _map(_requests(Path(folder)))
        self._at = slot * _REQUEST.size
        self._episode, self._t, self._number = -1, 0, 0
        self._process = _process()
        self._write()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._t = self._episode + 1, 0
        self._write()
        return self._see(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._pace_s:
            time.sleep(self._pace_s)
        self._t, self._number = self._t + 1, self._number + 1
        self._write()  # before anything can fail: a transition that is counted and then lost must be declared
        obs = self._see(int(action))
        trouble, amount = _REQUEST.unpack_from(self._requests, self._at)
        if trouble:
            _REQUEST.pack_into(self._requests, self._at, 0, 0.0)
            if trouble == Trouble.NAN:
                obs[-1] = np.nan
            else:
                _cause(Trouble(trouble), amount)
        seen = Seen(self._slot, self._life, self._episode, self._t, self._number, int(action))
        return obs, float(self._number), seen.is_terminated, seen.is_truncated, {}

    def close(self) -> None:
        self._record.close()
        self._requests.close()

    def _see(self, action: int) -> Any:
        return np.array([self._slot, self._life, self._episode, self._t, self._number, action], dtype=np.float64)

    def _write(self) -> None:
        _RECORD.pack_into(self._record, 0, self._number, self._episode, *self._process)


def numbered(folder: str | os.PathLike[str], num_envs: int, pace_s: float = 0.0) -> list[Callable[[], Numbered]]:
    """Return functions that make the environments of `num_envs` slots, for `ClusterEnv`."""
    path = Path(folder)
    path.mkdir(exist_ok=True)
    _requests(path).write_bytes(bytes(num_envs * _REQUEST.size))
    return [functools.partial(Numbered, str(path), slot, pace_s) for slot in range(num_envs)]


def logits(weights: Any, obs: Any) -> Any:
    """Run the forward pass of a policy that ignores observations: `weights["w"]` has one number per action."""
    return np.tile(weights["w"], (len(obs), 1))


# -- files ------------------------------------------------------------------------------------------------------


def lives(folder: Path, slot: int) -> list[int]:
    """Return the lives of a slot, in the order in which they began."""
    return sorted(int(path.suffix[1:]) for path in folder.glob(f"slot-{slot}.*"))


def read_record(folder: Path, slot: int, life: int) -> Record:
    """Return the current record of this life."""
    return Record(*_RECORD.unpack_from(_path(folder, slot, life).read_bytes()))


def ask(folder: str | os.PathLike[str], slot: int, trouble: Trouble, amount: float = 0.0) -> None:
    """Ask the environment of this slot to cause this fault in its next step; `amount`: seconds, or bytes."""
    with contextlib.closing(_map(_requests(Path(folder)))) as requests:
        _REQUEST.pack_into(requests, slot * _REQUEST.size, trouble, amount)


def _begin_life(folder: Path, slot: int) -> tuple[int, mmap.mmap]:
    life = 0
    while True:
        try:
            descriptor = os.open(_path(folder, slot, life), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError:  # an earlier life, or one that another process began at the same time
            life += 1
            continue
        try:
            os.truncate(descriptor, _RECORD.size)
            return life, mmap.mmap(descriptor, _RECORD.size)
        finally:
            os.close(descriptor)


def _path(folder: Path, slot: int, life: int) -> Path:
    return folder / f"slot-{slot}.{life}"


def _requests(folder: Path) -> Path:
    return folder / "requests"


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _process() -> tuple[int, int, int]:
    def stat(pid: int) -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()

    return os.getpid(), int(stat(os.getppid())[1]), int(stat(os.getpid())[19])


# -- trouble ----------------------------------------------------------------------------------------------------


def _cause(trouble: Trouble, amount: float) -> None:
    match trouble:
        case Trouble.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Trouble.SEGFAULT:
            ctypes.string_at(0)
        case Trouble.EXIT:
            os._exit(3)
        case Trouble.HANG | Trouble.SLOW:
            time.sleep(amount)
        case Trouble.HANG_WITH_GIL:
            ctypes.PyDLL(None).usleep(int(amount * 1e6))
        case Trouble.RAISE:
            raise ArithmeticError("a fault that was asked for")
        case Trouble.STDERR:
            line = b"a line of a fault that was asked for\n"
            os.write(2, line * max(1, int(amount) // len(line)))
