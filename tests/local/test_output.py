"""What environments print: a line without end, more than anybody reads, and what is left of it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest

import clusterenv as ce
from clusterenv.executors import output as output_module


class Prints(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def pid(self):
        return os.getpid()

    def write(self, size, raw):
        """A progress bar, or dots, without the end of a line."""
        for _ in range(size // 1000):
            if raw:
                os.write(2, b"." * 1000)
            else:
                sys.stdout.write(f"\r{'.' * 999}")

    def flood(self, lines, path):
        """Print in a thread of its own, while the learner computes."""

        def run():
            for i in range(lines):
                os.write(1, b"line %d %b\n" % (i, b"x" * 1000))
            Path(path).touch()

        threading.Thread(target=run).start()


def grown_bytes(process, call):
    before = process.memory_info().rss
    call()
    return process.memory_info().rss - before


@pytest.mark.parametrize("raw", [True, False], ids=["descriptor", "stdout"])
def test_a_line_without_end_is_not_kept(raw, monkeypatch):
    shown = []
    monkeypatch.setattr(output_module, "emit_output", shown.append)
    with ce.ClusterEnv([Prints], backend=ce.Local(workers=1)) as envs:
        envs.reset()
        envs.call("write", 2_000_000, raw)
        process = psutil.Process(envs._driver.executor._server.pid if raw else envs.call("pid")[0])
        assert grown_bytes(process, lambda: envs.call("write", 40_000_000, raw)) < 15_000_000
        deadline = time.monotonic() + 60
        while raw and sum(map(len, shown)) < 1_000_000:  # in pieces
            assert time.monotonic() < deadline
            envs.step([0])
    if not raw:
        assert shown == ["[slot 0] " + "." * 999], "the last state of the bar, when the worker ends"


@pytest.mark.parametrize(
    "backend", [ce.Local(workers=1), ce.Loopback(nodes=1, workers_per_node=1)], ids=["local", "network"]
)
def test_output_that_nobody_reads_is_dropped_and_counted(backend, tmp_path, monkeypatch):
    shown, lines = [], 30_000
    monkeypatch.setattr(output_module, "emit_output", shown.append)
    with ce.ClusterEnv([Prints], backend=backend) as envs:
        envs.reset()
        done = tmp_path / "done"
        process = psutil.Process()

        def learn():
            envs.call("flood", lines, str(done))
            deadline = time.monotonic() + 100
            while not done.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)

        assert grown_bytes(process, learn) < 25_000_000
        deadline = time.monotonic() + 100
        dropped = printed = 0
        while printed + dropped < lines:  # though nothing more is printed
            assert time.monotonic() < deadline, (printed, dropped)
            envs.step([0])
            printed = sum("] line" in line for line in shown)
            dropped = envs.stats()["output_lines_dropped"][0]
        assert printed + dropped == lines
        assert dropped > 0 and any("lines dropped" in line for line in shown)
        assert shown[0].startswith("[slot 0] line 0 x")
