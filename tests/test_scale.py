"""`envs.scale`: nodes come and go, slots move, and no transition is lost or handed over twice."""

from __future__ import annotations

import subprocess
import time

import numpy as np
import pytest

import clusterenv as ce
import real
from clusters import pods

ID = "CartPole-v1"
FAST = (0.2, 1.5, 4.0)


def policy():
    return ce.NumpyPolicy(lambda weights, obs: obs @ weights["w"], {"w": np.ones((4, 2), np.float32)})


def nodes_here(envs):
    kinds = [event.kind for event in envs.events()]
    return kinds.count("node_joined") - kinds.count("node_left") - kinds.count("node_lost")


class Ledger:
    """Every fragment of every slot once and in order; each goes on where the last one ended, or with a new episode."""

    def __init__(self):
        self.sequence, self.last, self.moved = {}, {}, 0

    def take(self, batch):
        assert batch.valid.all()
        for i, slot in enumerate(batch.slots.tolist()):
            assert batch.sequence[i] == self.sequence.get(slot, -1) + 1
            self.sequence[slot] = int(batch.sequence[i])
            if slot in self.last:
                obs, incarnation, has_ended = self.last[slot]
                if batch.incarnations[i] == incarnation:
                    assert np.array_equal(batch.obs[0, i], obs), "it goes on where it was"
                else:
                    assert batch.episode_starts[0, i], "it was moved: a new episode"
                    assert has_ended, "the fragment before truncated the old one"
                    self.moved += 1
            ended = bool(batch.terminations[-1, i] or batch.truncations[-1, i])
            if ended:
                assert [batch.num_steps - 1, i] in batch.final_at.tolist()
            self.last[slot] = (batch.last_obs[i].copy(), int(batch.incarnations[i]), ended)


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
    options = {"nodes": 2, "max_nodes": 4, "heartbeat": FAST}
    if kind == "network":
        backend = ce.Local(workers=2, network=True, **options)
    elif kind == "slurm":
        backend = ce.Slurm(interface="lo", folder=str(tmp_path / "keys"), extra={"exclusive": None}, **options)
    elif kind == "ray":
        backend = ce.Ray(bind="lo", **options)
    else:
        backend = pods(real.running["kubernetes"], **options)
    ledger = Ledger()
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
    with pytest.raises(ce.SpecError, match="max_nodes=4"):
        ce.Local(max_nodes=4)
