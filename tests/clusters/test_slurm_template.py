"""On a real SLURM: a site's own batch script."""

from __future__ import annotations

import subprocess
import time

import numpy as np
import pytest

import clusterenv as ce
import real
from stepping import joined, step_until

pytestmark = pytest.mark.slurm

TEMPLATE = """#!/bin/bash
#SBATCH --comment='of the site' -N 1
#SBATCH --exclusive

hostname > {log}.host
export SITE={name}
exec {command}
"""


def test_nodes_run_in_a_sites_own_batch_script(tmp_path):
    folder = tmp_path / "keys"
    heartbeat_s = (0.2, 1.5, 4.0)
    backend = ce.Slurm(2, interface="lo", folder=str(folder), heartbeat_s=heartbeat_s, template=TEMPLATE, mem="1G")
    with ce.ClusterEnv("CartPole-v1", 4, backend=backend) as envs:
        envs.reset(seed=1)
        (run,) = folder.glob("clusterenv-*")
        command = ["squeue", "--noheader", "--format=%i|%j|%k|%m"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line.split("|")[1:] for line in listed] == [[run.name, "of the site", "1G"]] * 2
        subprocess.run(["scancel", listed[0].split("|")[0]], check=True)
        step_until(envs, lambda: joined(envs) == 3 and not envs.stats()["missing_nodes"])
        assert "preempted" in "".join(event.reason for event in envs.events()), "exec: the node got SIGTERM"
        assert "transition_valid" not in envs.step(np.zeros(4, np.int64))[4]
    deadline = time.monotonic() + 20
    while real.running["slurm"].queue():
        assert time.monotonic() < deadline, "jobs are found and cancelled by their name"
        time.sleep(0.2)
    assert len(list(folder.glob("logs/*/node-*.log"))) == len(list(folder.glob("logs/*/node-*.log.host"))) == 2
