"""Runs on real clusters, watched from another terminal."""

from __future__ import annotations

import threading
import time

import gymnasium as gym
import numpy as np
import pytest

import clusterenv as ce
from clusterenv.cli import main
from clusterenv.monitor import records
from clusterenv.monitor.client import Client, find
from toys import Hanging


@pytest.mark.slurm
def test_where_a_hanging_environment_is_and_what_its_job_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CLUSTERENV_HOME", str(tmp_path / "home"))
    flag = tmp_path / "hang"

    def make():
        return Hanging(gym.make("CartPole-v1"), flag)

    backend = ce.Slurm(nodes=2, interface="lo", folder=str(tmp_path), time_limit=10)
    with ce.ClusterEnv([make] * 2, backend=backend, recovery=ce.Recovery(step_timeout_s=12.0)) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        deadline = time.monotonic() + 30
        while not records.live():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        client = Client(find(None))
        nodes = client.sample().nodes
        assert [node.state for node in nodes] == ["joined", "joined"]
        assert len({node.job for node in nodes}) == 2 and all(node.job.isdecimal() for node in nodes)
        assert all(node.time_left_s is None or 0 < node.time_left_s < 700 for node in nodes)
        client.close()
        flag.touch()
        codes = []
        asking = threading.Thread(target=lambda: codes.append(main(["stack", "1"])))
        asking.start()
        envs.send(np.zeros(2, np.int64))
        envs.recv()  # until the limit of one step is over
        asking.join()
        assert main(["logs", "1"]) == 0
    assert codes == [0]
    shown = capsys.readouterr().out
    assert "where_it_hangs" in shown and "in step() of slot 1" in shown and "joined the run" in shown
