"""Handshakes that are refused cost little throughput."""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import psutil
import pytest

import clusterenv as ce
from clusterenv.transport.keys import read_joining
from namespace_cluster import Namespaces
from netns import Network
from stepping import kinds, step_until

pytestmark = [pytest.mark.network, pytest.mark.guarantee(21)]

TURNS, TURN_S = 12, 0.3
"""Turns with strangers, each beside one without: what else the machine does is in both."""

IDLE_TURNS, IDLE_S = 4, 0.7
"""The same while the head only listens, to measure its CPU time: the strangers use the cores, too, but not that."""

KNOCKING = """
import os, sys, time, zmq
os.nice(19)  # elsewhere, it would have cores of its own
context, keys, knocking = zmq.Context(), zmq.curve_keypair(), []
while True:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_serverkey = sys.argv[2].encode()
    socket.connect(sys.argv[1])
    time.sleep(0.01)
    knocking.append(socket)
    if len(knocking) > 20: knocking.pop(0).close()
"""


@pytest.fixture
def net():
    with Network(nodes=2) as made:
        yield made


def cpu_s():
    times = psutil.Process().cpu_times()
    return times.user + times.system


def test_a_hundred_handshakes_a_second(net, record_property):
    backend = Namespaces(net)
    with ce.ClusterEnv("CartPole-v1", 4, backend=backend, recovery=ce.Recovery(backoff_s=(0.05, 0.1))) as envs:
        envs.reset(seed=1)
        good = read_joining(backend.jobs[0].plan.files[0])
        popen = net.nodes[1].popen([sys.executable, "-c", KNOCKING, good.address, good.head_key])
        stranger = psutil.Process(popen.pid)

        def rate():
            begin, count = time.monotonic(), 0
            while time.monotonic() - begin < TURN_S:
                assert "transition_valid" not in envs.step(np.zeros(4, np.int64))[4]
                count += 1
            return count / (time.monotonic() - begin)

        try:
            step_until(envs, lambda: envs.stats()["refused_keys"] > 20, 30)
            ratios, refused, under_s = [], 0, 0.0
            for turn in range(TURNS):
                rates = {}
                for is_alone in (False, True) if turn % 2 else (True, False):
                    (stranger.suspend if is_alone else stranger.resume)()
                    time.sleep(0.05)  # handshakes under way end
                    before, begin = envs.stats()["refused_keys"], time.monotonic()
                    rates[is_alone] = rate()
                    if not is_alone:
                        refused += envs.stats()["refused_keys"] - before
                        under_s += time.monotonic() - begin
                ratios.append(rates[False] / rates[True])
            cpu, refused_idle = {False: 0.0, True: 0.0}, 0
            for is_alone in (False, True) * IDLE_TURNS:
                (stranger.suspend if is_alone else stranger.resume)()
                time.sleep(0.05)
                before, begin_s = envs.stats()["refused_keys"], cpu_s()
                time.sleep(IDLE_S)
                cpu[is_alone] += cpu_s() - begin_s
                refused_idle += envs.stats()["refused_keys"] - before
        finally:
            popen.kill()
            popen.wait()
        throughput = statistics.median(ratios)
        head_cpu = 100 * (cpu[False] - cpu[True]) / max(1, refused_idle)  # of a core, at a hundred in a second
        record_property("throughput", throughput)
        record_property("head_cpu", head_cpu)
        print(f"throughput {throughput:.2f}, {min(ratios):.2f} to {max(ratios):.2f}; {refused / under_s:.0f} refused/s")
        print(f"the head's CPU for 100 in a second: {head_cpu:.3f} of a core")
        assert refused / under_s > 20 and "node_lost" not in kinds(envs)
        assert throughput > 0.6, "on two cores, which the strangers use too; the page shows the figure"
