"""The summary of a collector in the loggers that people use: TensorBoard itself, and fakes with the calls of others."""

from __future__ import annotations

import logging
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import clusterenv as ce
from toys import Trouble


class FakeWandb:
    """Has the call of a run of W&B, and of the module after `wandb.init()`."""

    def __init__(self):
        self.logged = []

    def log(self, data, step=None, commit=None):
        self.logged.append((data, step))


class FakeMlflow:
    """Has the call of the module mlflow."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None):
        self.logged.append((metrics, step))


@pytest.fixture
def collector():
    with ce.ClusterEnv(lambda: Trouble(length=10), 4, backend=ce.Local(workers=0)) as envs:
        yield envs.collector(ce.RandomPolicy(), seed=1)


def test_tensorboard_gets_every_number_that_is_known(collector, tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        collector.rollout(4)
        first = ce.log_to(collector, writer)
        assert "charts/episodic_return" not in first, "no episode has ended: it is not a number"
        collector.rollout(20)
        second = ce.log_to(collector, writer)
        third = ce.log_to(collector, writer, step=1000)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert second == {name: value for name, value in collector.summary().items() if not math.isnan(value)}
    assert set(read.Tags()["scalars"]) == set(second) > set(first)
    for name, value in second.items():
        points = [(event.step, event.value) for event in read.Scalars(name)]
        wanted = [(16, first.get(name)), (96, value), (1000, third[name])]
        assert points == [(step, pytest.approx(one)) for step, one in wanted if one is not None], name
    assert read.Scalars("charts/episodic_return")[0].value == 10.0


@pytest.mark.parametrize("make", [FakeWandb, FakeMlflow])
def test_others_get_one_call_with_all_numbers(make, collector):
    writer = make()
    collector.rollout(12)
    written = [ce.log_to(collector, writer), ce.log_to(collector, writer, step=7)]
    assert writer.logged == [(written[0], 48), (written[1], 7)]
    assert written[0]["charts/episodic_return"] == 10.0 and not any(map(math.isnan, written[0].values()))


@pytest.mark.parametrize("writer", [None, "runs", logging.getLogger("x"), math, SummaryWriter], ids=repr)
def test_an_unknown_writer_is_refused_by_name(writer, collector):
    collector.rollout(2)
    if writer is SummaryWriter:
        with pytest.raises(ce.SpecError, match=r"writer=<class SummaryWriter>.*this is the class"):
            ce.log_to(collector, writer)
        return
    with pytest.raises(ce.SpecError, match=r"log_to\(writer=.*expected TensorBoard's SummaryWriter.*summary\(\)"):
        ce.log_to(collector, writer)


def test_swapped_arguments_and_a_wrong_step_are_refused(collector):
    with pytest.raises(ce.SpecError, match=r"log_to\(collector=.*expected a Collector"):
        ce.log_to(FakeWandb(), collector)
    with pytest.raises(ce.SpecError, match=r"log_to\(step='10'\)"):
        ce.log_to(collector, FakeWandb(), step="10")
