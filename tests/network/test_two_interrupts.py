"""Ctrl-C, and again while the first one is handled: the script of a run with nodes ends soon, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.network, pytest.mark.guarantee(15)]

# Its environments become slow in the call of the moment, so that Ctrl-C comes within it.
SCRIPT = """
import os, sys, time
import gymnasium as gym
import numpy as np
import clusterenv as ce

moment, folder = sys.argv[1:]

class Slow(gym.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.steps = 0
        if moment == "start":
            self.wait()

    def step(self, action):
        self.steps += 1
        if self.steps > 4 and moment in ("step", "rollout", "stream"):
            self.wait()
        return super().step(action)

    def close(self):
        if moment == "close":
            self.wait()
        super().close()

    def wait(self):
        open(os.path.join(folder, "inside"), "w").close()
        time.sleep(1000)

zeros = np.zeros(4, np.int64)
backend = ce.Loopback(nodes=2, workers_per_node=2, folder=os.path.join(folder, "run"))
with ce.ClusterEnv([lambda: Slow(gym.make("CartPole-v1"))] * 4, backend=backend) as envs:
    envs.reset(seed=1)
    for _ in range(2):
        envs.step(zeros)
    if moment == "step":
        while True:
            envs.step(zeros)
    elif moment == "rollout":
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        while True:
            collector.rollout(64)
    elif moment == "stream":
        for batch in envs.collector(ce.RandomPolicy(), seed=1).stream(2):
            pass
"""


def left_behind(marker: str) -> list[int]:
    """Return the processes that carry the marker in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CLUSTERENV_TEST") == marker and process.pid != os.getpid():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("moment", "pause_s"),
    [("start", 0.3), ("step", 0.3), ("rollout", 0.3), ("stream", 0.3), ("close", 0.3), ("stream", 0.0), ("close", 0.0)],
)
def test_ctrl_c_twice_leaves_nothing(tmp_path, moment, pause_s, record_property):
    """While an environment does not come back from its own call. Without a pause, both may count as one."""
    env = {**os.environ, "CLUSTERENV_TEST": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    shared = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, moment, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    try:
        wait_until((tmp_path / "inside").exists)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        time.sleep(pause_s)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, stderr = process.communicate(timeout=30)
        seconds = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    assert seconds < 10
    record_property("closed_s", seconds)
    assert process.returncode != 0 and b"KeyboardInterrupt" in stderr, stderr
    wait_until(lambda: not left_behind(str(tmp_path)), 5)
    assert set(os.listdir("/dev/shm")) <= shared
    assert not list((tmp_path / "run").iterdir()), "keys, logs"
