"""Raise SIGINT at a chosen line of the code that a call executes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
import zmq

import clusterenv

_PACKAGE = Path(clusterenv.__file__).parent
_FOLDERS = (str(_PACKAGE), str(Path(zmq.__file__).parent))
_WORKER = str(_PACKAGE / "worker")


class LineTrace:
    """Counts the lines of this package and of pyzmq that a call executes in this thread; raises SIGINT at one of them.

    Lines of workers do not count: Ctrl-C within an environment in the calling process behaves differently.
    """

    def __init__(self, strike_at: int = -1) -> None:
        self.strike_at = strike_at
        self.count = 0
        self.where = ""

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if event == "call" and (not path.startswith(_FOLDERS) or path.startswith(_WORKER)):
            return None
        if event == "line":
            if self.count == self.strike_at:
                self.count += 1
                self.where = f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)
                return self._trace
            self.count += 1
        return self._trace

    def run(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(before)


def lines_of(call: Callable[[], Any]) -> int:
    """Return the number of lines that the call executes."""
    trace = LineTrace()
    trace.run(call)
    return trace.count


class Waits(gym.Env):
    """An environment whose step ends when the test sets `gate`; for the calling process only."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    entered, gate = threading.Event(), threading.Event()

    def reset(self, *, seed=None, options=None):
        self.entered.clear()
        self.gate.clear()
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.entered.set()
        assert self.gate.wait(60)
        return np.ones(3, np.float32), 1.0, False, False, {}
