"""What a machine does not tell of its load is missing from the sample, and costs nothing else."""

from __future__ import annotations

import os

import msgspec
import psutil
import pytest

from clusterenv.cli import show
from clusterenv.monitor.doctor import checks
from clusterenv.monitor.sample import NodeSample
from clusterenv.system import host_load
from clusterenv.system.host_load import HostMeter, HostSample

SOURCES = {
    (os, "getloadavg"): ("load",),
    (psutil, "cpu_times"): ("cpu",),
    (psutil, "virtual_memory"): ("memory_used", "memory_total"),
    (psutil, "net_io_counters"): ("sent_bytes_per_s", "received_bytes_per_s"),
    (os, "sysconf"): ("swap_bytes_per_s",),
    (host_load, "group_folders"): ("throttled",),
}


def twice(monkeypatch):
    """Return the second sample of a machine, which has rates."""
    monkeypatch.setattr(host_load, "_AT_LEAST_S", 0.0)
    meter = HostMeter()
    meter.read()
    sum(range(300_000))  # some CPU time, which is counted in hundredths of a second
    return meter.read()


ERRORS = [OSError("hidden"), psutil.AccessDenied(), ValueError("odd /proc")]
CASES = [(source, error) for source in SOURCES for error in (ERRORS[:1] if source == (os, "getloadavg") else ERRORS)]


@pytest.mark.parametrize(("source", "error"), CASES, ids=[f"{name}-{error!r}" for (_, name), error in CASES])
def test_what_cannot_be_read_is_missing(monkeypatch, source, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(*source, refuse)
    sample = twice(monkeypatch)
    assert sample.is_plausible() and all(getattr(sample, name) is None for name in SOURCES[source])
    others = {name for names in SOURCES.values() for name in names} - set(SOURCES[source]) - {"throttled", "cpu"}
    assert all(getattr(sample, name) is not None for name in others)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=HostSample) == sample


def test_a_source_that_comes_back_is_read_again(monkeypatch):
    monkeypatch.setattr(host_load, "_AT_LEAST_S", 0.0)
    meter, counters = HostMeter(), psutil.net_io_counters

    def refuse():
        raise OSError("hidden")

    rates = []
    for read in (refuse, counters, counters):
        monkeypatch.setattr(psutil, "net_io_counters", read)
        rates.append(meter.read().sent_bytes_per_s)
    assert rates[:2] == [None, None] and rates[2] is not None


def test_a_machine_that_tells_nothing_is_shown_and_judged():
    node = NodeSample(node=0, state="joined", host=HostSample(cores=2))
    assert show._node(node)[6] == ""
    assert checks.cores(2, None, None, 2).seen == "2 cores"
