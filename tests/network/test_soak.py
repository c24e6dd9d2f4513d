"""The soak and its faults between network namespaces, for a short time; `make soak` is the long one."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.testing import chaos
from clusterenv.testing.chaos import Fault, Kind
from tools.soak import hostile
from tools.soak.places import place
from tools.soak.run import RECOVERY, soak

pytestmark = pytest.mark.network
N = 4


@pytest.mark.parametrize(
    ("kind", "amount", "until"),
    [
        (Kind.PARTITION, 6.0, "node_lost"),
        (Kind.STOP_NODE, 6.0, "node_lost"),
        (Kind.LIE, 0.0, "node_lost"),
        (Kind.DISK_FULL, 2.0, None),
        (Kind.CLOCK, 86400.0, None),
    ],
)
def test_a_fault_of_a_machine(kind, amount, until, tmp_path):
    with place(2, 2, True) as where:
        envs = ce.ClusterEnv(chaos.numbered(tmp_path, N), backend=where.backend, recovery=RECOVERY)
        with envs:
            ledger = chaos.Ledger(tmp_path, N)
            ledger.reset(envs.reset(seed=1)[0])
            actions = np.zeros(N, np.int64)
            with chaos.Injector(tmp_path, [Fault(0.2, kind, N - 1, amount, 3)], where.acts()) as injector:
                deadline = time.monotonic() + 60

                def is_over():
                    lost = {event.kind for event in envs.events()} & {"node_lost", "node_unfit"}
                    return injector.done and (lost if until else not injector.pending)

                while not is_over():
                    assert time.monotonic() < deadline, envs.events()
                    ledger.step(actions, envs.step(actions), envs.events())
            for _ in range(20):
                ledger.step(actions, envs.step(actions), envs.events())
            balance = ledger.check()
            assert (balance.lives > N) == bool(until), envs.events()


@pytest.mark.guarantee(29)
def test_a_short_soak(tmp_path):
    report = soak(3, 0.6, tmp_path, every_s=2.0)
    assert not report.problems and report.faults and report.balance["delivered"] > 1000
    assert json.loads((tmp_path / "report.json").read_text())["balance"] == report.balance
    assert (tmp_path / "soak.png").stat().st_size and (tmp_path / "samples.csv").read_text().startswith(
        "time_s,head_mib"
    )


@pytest.mark.guarantee(22)
def test_a_hostile_node_is_named_and_ended_again_and_again(tmp_path):
    report = hostile.run(0.7, tmp_path)
    assert report.ended and not report.good_lost and report.lies, report
    assert report.head_mib < hostile.LIMIT_MIB, report
    assert report.balance["delivered"] > 1000
