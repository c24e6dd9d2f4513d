"""Nodes that are asked to leave, whose head is silent, or that give up parts of a run: what they still do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import clusterenv as ce
from loopback_agents import Loopback, meanwhile, wait_for
from toys import Trouble, linear

pytestmark = pytest.mark.guarantee(17)


def policy():
    return ce.NumpyPolicy(linear, {"w": np.ones((4, 3), np.float32)}, dist="categorical")


class Slow(Trouble):
    """Its step number `at` takes so long."""

    def __init__(self, index, folder, at, seconds):
        super().__init__(index, length=10**6)
        self.folder, self.at, self.seconds, self.steps = folder, at, seconds, 0

    def step(self, action):
        self.steps += 1
        if self.steps == self.at and not (self.folder / "slow").exists():
            (self.folder / "slow").touch()
            time.sleep(self.seconds)
        return super().step(action)


def test_a_preempted_node_hands_over_the_finished_part_of_a_fragment(tmp_path):
    """Its step takes longer than five seconds, and less than the scheduler grants."""
    backend = Loopback(1)

    def preempt():
        wait_for(lambda: (tmp_path / "slow").exists())
        backend.jobs[0].process(0).terminate()

    thunks = [lambda i=i: Slow(i, tmp_path, 5, 8.0) for i in range(2)]
    with meanwhile(preempt), ce.ClusterEnv(thunks, backend=backend) as envs:
        collector = envs.collector(policy(), seed=1)
        batch = collector.rollout(32)
        assert batch.valid.sum(axis=0).tolist() == [5, 5] and batch.valid[:5].all(), "whole steps, and no more"
        assert "preempted" in next(event.reason for event in envs.events() if event.kind == "node_lost")
        assert collector.rollout(4).valid.all()


class LargeSlow(Slow):
    """Its observations are 80 kB."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (10_000,), np.float64)

    def _obs(self):
        return np.resize(super()._obs(), 10_000)


def test_rows_that_were_not_played_do_not_travel(tmp_path):
    """Of 100 steps, 5 are done when the node has to leave: all 100 would be 16 MB."""
    backend = Loopback(1)

    def preempt():
        wait_for(lambda: (tmp_path / "slow").exists())
        backend.jobs[0].process(0).terminate()

    thunks = [lambda i=i: LargeSlow(i, tmp_path, 5, 3.0) for i in range(2)]
    act = ce.NumpyPolicy(linear, {"w": np.zeros((10_000, 3), np.float32)}, dist="categorical")
    with meanwhile(preempt), ce.ClusterEnv(thunks, backend=backend) as envs:
        collector = envs.collector(act, seed=1)
        batch = collector.rollout(100)
        assert sum(envs.stats()["received_bytes"]) < 3_000_000
        assert batch.valid.sum(axis=0).tolist() == [5, 5] and batch.valid[:5].all()
        assert batch.truncations.sum(axis=0).tolist() == [1, 1] and batch.truncations[5].all(), "the first lost row"
        assert not batch.rewards[5:].any() and not batch.terminations.any() and not batch.logprobs[5:].any()
        assert batch.episode_starts.sum(axis=0).tolist() == [1, 1]
        assert (batch.obs[:5, :, 3] == np.arange(5)[:, None]).all()
        assert collector.stats()["nodes"][0]["fragment_bytes"] < 3_000_000


AGENT = """
import sys, time
from pathlib import Path
import clusterenv.node.agent as agent
from clusterenv.cli import main

folder = Path(sys.argv[1])
(folder / "started").touch()
while not (folder / "suspended").exists():
    time.sleep(0.01)
agent._ANSWER_S = 0.5
sys.exit(main(sys.argv[2:]))
"""

HEAD = """
import sys
import clusterenv as ce
from loopback_agents import Loopback

agent, folder = sys.argv[1:]

def start(agents, node):
    return [sys.executable, "-c", agent, folder, *agents.command(node)[3:]]

with ce.ClusterEnv("CartPole-v1", 1, backend=Loopback(1, start)) as envs:
    envs.reset(seed=1)
    print("running", flush=True)
"""


def test_a_head_that_is_suspended_while_its_nodes_join(tmp_path):
    """A suspended head takes connections and says nothing, for longer than a node waits for one answer."""
    support = str(Path(__file__).parents[1] / "support")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", HEAD, AGENT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as head:
        try:
            wait_for(lambda: (tmp_path / "started").exists())
            head.send_signal(signal.SIGSTOP)
            (tmp_path / "suspended").touch()
            time.sleep(4.0)  # it would wait for half a second
            head.send_signal(signal.SIGCONT)
            out, err = head.communicate(timeout=60)
            assert out == b"running\n", err.decode()
        finally:
            head.kill()


class Gate(Trouble):
    """Steps once a file is there, and takes its time to close."""

    def __init__(self, index, folder):
        super().__init__(index, length=10**6)
        self.folder = folder

    def step(self, action):
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return super().step(action)

    def close(self):
        time.sleep(20.0)


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_a_node_that_gives_up_several_parts_is_not_taken_for_dead(tmp_path):
    """When the others have come, it gives up five parts at once, whose environments do not close in time."""
    backend = Loopback(1, max_nodes=6, heartbeat_s=(0.2, 3.0, 30.0))

    def open_gate():
        wait_for(lambda: backend.count("node_joined") == 6)
        (tmp_path / "go").touch()

    thunks = [lambda i=i: Gate(i, tmp_path) for i in range(6)]
    with meanwhile(open_gate), ce.ClusterEnv(thunks, backend=backend) as envs:
        collector = envs.collector(policy(), seed=1)
        envs.scale(6)
        collector.rollout(2)
        deadline = time.monotonic() + 10.0  # beats are missed now or never
        while time.monotonic() < deadline:
            collector.rollout(2)
        assert backend.count("worker_moved") == 5 and not backend.count("node_lost"), envs.events()
