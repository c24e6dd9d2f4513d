"""Environments for tests of backends. They are part of this package, so that nodes need no other code."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from clusterenv.system.identity import machine, process_start

STEP, KILL_WORKER, KILL_NODE = range(3)


def linear(weights: Any, obs: Any) -> Any:
    """Return the logits of a policy."""
    return obs @ weights["w"] + weights["b"]


class Fragile(gym.Env[Any, Any]):
    """Counts its steps in endless episodes; an action can kill its worker process or its node agent.

    A step takes `step_s` seconds; its info has the time at which it ended.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float64)
        self.action_space = spaces.Discrete(3)
        self._count = 0
        self._step_s = step_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == KILL_WORKER:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == KILL_NODE:
            os.kill(agent_process(), signal.SIGKILL)
        time.sleep(self._step_s)
        self._count += 1
        return self._observation(), 1.0, False, False, {"at": time.time()}

    def ask_to_leave(self, after_s: float) -> None:
        """Send SIGTERM to the node agent after this time, perhaps in the middle of a fragment."""
        timer = threading.Timer(after_s, os.kill, (agent_process(), signal.SIGTERM))
        timer.daemon = True
        timer.start()

    def place(self) -> dict[str, Any]:
        """Return the process numbers of the worker and its node agent, and the namespace in which they are valid.

        A new namespace may reuse the number of an old one: the start time of the agent distinguishes them.
        """
        agent = agent_process()
        return {"worker": os.getpid(), "agent": agent, "where": machine(), "began": process_start(agent)}

    def _observation(self) -> Any:
        return np.array([self._count], dtype=np.float64)


def agent_process() -> int:
    """Return the process number of the node agent: the parent of the fork server, which is the parent of a worker."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[1])
