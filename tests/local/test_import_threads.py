"""Environments whose module starts threads when it is imported: a fork would have their locks, and not the threads."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import clusterenv as ce

MODULE = """
import threading, time
import gymnasium as gym
import numpy as np

lock = threading.Lock()
beats = 0

def keep_time():
    global beats
    while True:
        with lock:
            beats += 1
            time.sleep(0.05)
        time.sleep(0.001)

threading.Thread(target=keep_time, name="timekeeper", daemon=True).start()
time.sleep(0.01)

class Timed(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(1, np.float32), {}

    def step(self, action):
        before = beats
        while beats == before:
            time.sleep(0.001)
        with lock:
            return self.np_random.random(1, np.float32), 1.0, False, False, {}
"""


@pytest.mark.parametrize("network", [False, True], ids=["local", "network"])
def test_threads_of_imported_modules_are_there_in_every_worker(tmp_path, monkeypatch, caplog, network):
    (tmp_path / "timed_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of nodes

    def make():
        import timed_module

        return timed_module.Timed()

    caplog.set_level(logging.WARNING, "clusterenv")
    recovery = ce.Recovery(step_timeout_s=20.0)
    preload = ("timed_module",)
    backend = (
        ce.Loopback(nodes=1, workers_per_node=2, preload=preload) if network else ce.Local(workers=2, preload=preload)
    )
    with ce.ClusterEnv([make] * 2, backend=backend, recovery=recovery) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            assert envs.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
        assert not envs.stats()["events"].get("worker_lost")
    if not network:  # there, the node says it
        (text,) = [message for message in caplog.messages if "thread" in message]
        assert "'timekeeper' (timed_module.keep_time)" in text
