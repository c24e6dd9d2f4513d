"""`Loopback`, and the older `Local(network=True)` that stands for it."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.backends.contract import LeavesJobs


def test_the_older_form_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"write Loopback\(nodes=\.\.\., workers_per_node=\.\.\.\)") as caught:
        backend = ce.Local(4, 1, (), True, nodes=2, heartbeat=(0.2, 1.5, 4.0), allow_pickle=False)
    assert caught[0].filename == __file__, "it names the line that is to be changed"
    expected = ce.Loopback(nodes=2, workers_per_node=2, heartbeat_s=(0.2, 1.5, 4.0), allow_pickle=False)
    assert backend == expected and backend.is_remote and not backend.allow_pickle
    with ce.ClusterEnv("CartPole-v1", 4, backend=backend) as envs:
        envs.reset(seed=1)
        assert envs.step(np.zeros(4, np.int64))[0].shape == (4, 4) and envs.stats()["workers"] == 4


def test_the_older_form_shares_the_cpus_of_this_machine(monkeypatch):
    monkeypatch.setattr("clusterenv.backends.loopback.usable_cores", lambda: 64)
    with pytest.warns(DeprecationWarning):
        backend = ce.Local(network=True)
    with ce.ClusterEnv("CartPole-v1", 3, backend=backend) as envs:
        assert envs.stats()["workers"] == 3, "not more than there are environments"


def test_a_time_has_its_unit_in_its_name():
    with pytest.warns(DeprecationWarning, match=r"Slurm\(heartbeat=\.\.\.\) is deprecated: write heartbeat_s="):
        backend = ce.Slurm(nodes=1, heartbeat=(1.0, 2.0, 3.0))
    assert backend == ce.Slurm(nodes=1, heartbeat_s=(1.0, 2.0, 3.0))


@pytest.mark.parametrize("workers", [0, 3])
def test_the_older_form_refuses_what_it_refused(workers):
    with pytest.warns(DeprecationWarning), pytest.raises(ce.SpecError, match="every node has as many workers"):
        ce.Local(workers=workers, network=True, nodes=2)


@pytest.mark.parametrize("options", [{"nodes": 2}, {"max_nodes": 4}, {"allow_pickle": False}])
def test_options_of_nodes_are_not_for_local_processes(options):
    with pytest.raises(ce.SpecError, match=rf"Local\({next(iter(options))}=.*Loopback\(nodes=...\)"):
        ce.Local(**options)


def test_local_is_still_plain_data():
    backend = ce.Local(workers=2, network=False)
    assert backend == copy.copy(backend) == pickle.loads(pickle.dumps(backend)) == ce.Local(2)
    assert not backend.is_remote and backend.allow_pickle


def test_nodes_that_end_with_their_head_leave_no_note(tmp_path):
    """Nothing for `clusterenv gc` to end but the folder of the run."""
    with ce.ClusterEnv("CartPole-v1", 2, backend=ce.Loopback(nodes=1, folder=tmp_path)):
        (note,) = tmp_path.glob("clusterenv-*/head.json")
        assert '"jobs": {}' in note.read_text()
    assert not list(tmp_path.iterdir())
    assert not isinstance(ce.Loopback(nodes=1), LeavesJobs)
