"""`envs.scale`: nodes come and go, slots move, and no transition is lost or handed over twice."""

from __future__ import annotations

import subprocess
import time

import numpy as np
import pytest

import clusterenv as ce
import real
from ledgers import FragmentLedger, nodes_here
from namespace_cluster import pods

ID = "CartPole-v1"
FAST = (0.2, 1.5, 4.0)


def policy():
    return ce.NumpyPolicy(lambda weights, obs: obs @ weights["w"], {"w": np.ones((4, 2), np.float32)})


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("network", marks=pytest.mark.network),
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("ray", marks=pytest.mark.ray),
        pytest.param("kubernetes", marks=pytest.mark.kubernetes),
    ],
)
def test_from_two_nodes_to_four_and_back_in_a_stream(kind, tmp_path):
    options = {"nodes": 2, "max_nodes": 4, "heartbeat_s": FAST}
    if kind == "network":
        backend = ce.Loopback(**options)
    elif kind == "slurm":
        backend = ce.Slurm(interface="lo", folder=str(tmp_path / "keys"), extra={"exclusive": None}, **options)
    elif kind == "ray":
        backend = ce.Ray(bind="lo", **options)
    else:
        backend = pods(real.running["kubernetes"], **options)
    ledger = FragmentLedger()
    with ce.ClusterEnv(ID, 8, backend=backend) as envs:
        collector = envs.collector(policy(), seed=1)
        with pytest.raises(ce.UsageError, match="between 1 and 4"):
            envs.scale(nodes=5)
        assert nodes_here(envs) == 2

        def collect_until(condition):
            deadline = time.monotonic() + 60
            while not condition():
                assert time.monotonic() < deadline, envs.events()
                ledger.take(next(stream))

        stream = collector.stream(8)
        collect_until(lambda: min(ledger.sequence.get(slot, 0) for slot in range(8)) > 3)
        envs.scale(nodes=4)
        collect_until(lambda: nodes_here(envs) == 4 and ledger.moved >= 4)
        if kind == "slurm":
            queue = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout
            assert len(queue.splitlines()) == 4
        envs.scale(nodes=2)
        collect_until(lambda: nodes_here(envs) == 2 and ledger.moved >= 8)
        stream.close()
        assert not envs.stats()["missing_nodes"] and "worker_lost" not in envs.stats()["events"]
        assert collector.rollout(8).valid.all()


def test_where_there_are_no_nodes():
    with ce.ClusterEnv(ID, 2, backend=ce.Local(workers=1)) as envs, pytest.raises(ce.UsageError, match="no"):
        envs.scale(nodes=2)
    with pytest.raises(ce.SpecError, match="max_nodes=1"):
        ce.Manual(nodes=2, max_nodes=1)
    with pytest.raises(ce.SpecError, match=r"max_nodes=.*Loopback"):
        ce.Local(max_nodes=4)
