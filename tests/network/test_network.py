"""Faults and strangers on the network path, between namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from torch import nn

import clusterenv as ce
from clusterenv.engine.collecting.weights import Node
from clusterenv.transport.keys import Joining, make_keys, read_joining, write_joining
from experiments.ppo import PPO
from namespace_cluster import Namespaces
from netns import Network
from policies import net as mlp
from stepping import joined, kinds, step_until
from survivors import survivors
from toys import linear

pytestmark = pytest.mark.network
ID = "CartPole-v1"
FAST = (0.2, 1.5, 3.0)  # beat, dead after, lease
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))


def numpy_policy():
    """Workers that act with it need not import torch first."""
    return ce.NumpyPolicy(linear, {"w": np.ones((4, 2), np.float32)}, dist="categorical")


def zeros(n=4):
    return np.zeros(n, dtype=np.int64)


@pytest.fixture
def net():
    with Network(nodes=2) as made:
        yield made


def make(net, n=4, **kwargs):
    return ce.ClusterEnv(ID, n, backend=Namespaces(net, heartbeat_s=FAST, **kwargs), recovery=RECOVERY)


def agents():
    """Node agents of this process, in the order of their numbers."""
    found = [p for p in psutil.Process().children() if "--join" in p.cmdline()]
    return sorted(found, key=lambda p: p.cmdline()[p.cmdline().index("--join") + 1])


@pytest.mark.guarantee(3)
def test_a_killed_node_is_known_at_once_and_replaced(net, record_property):
    with make(net) as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        node = agents()[0]
        workers = node.children(recursive=True)
        node.kill()
        seconds, lost = step_until(envs, lambda: "node_lost" in kinds(envs), 15)
        assert seconds < 1.0
        record_property("detected_s", seconds)
        assert not survivors(workers, 2.0), "its workers died with it"
        _, more = step_until(envs, lambda: joined(envs) == 3, 15)
        for _ in range(5):
            infos = envs.step(zeros())[4]
        assert "transition_valid" not in infos
        record_property("lost_steps", len(lost + more))
        assert sorted(lost + more) == [0, 1], "each of its slots lost one episode, nobody else's did"
        assert envs.stats()["incarnations"].tolist() == [1, 1, 0, 0]


@pytest.mark.guarantee(3)
def test_rollout_goes_on_when_a_node_dies_in_it(net):
    with make(net) as envs:
        collector = envs.collector(numpy_policy(), seed=1)
        collector.rollout(8)
        agents()[1].kill()
        batch = collector.rollout(64)
        assert batch.valid.all() and batch.num_envs == 4
        assert collector.rollout(8).incarnations.tolist() == [0, 0, 1, 1]
        first = next(e.time_s for e in envs.events() if e.kind == "node_lost")
        back = [e.time_s for e in envs.events() if e.kind == "node_joined"][-1]
        assert back - first < 10


@pytest.mark.guarantee(4)
def test_a_stopped_node_is_fenced(net, record_property):
    with make(net) as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        node = agents()[0]
        node.suspend()
        try:
            seconds, _ = step_until(envs, lambda: "node_lost" in kinds(envs), 15)
            assert seconds < FAST[1] + 1.5
            record_property("detected_s", seconds)
        finally:
            node.resume()
        step_until(envs, lambda: joined(envs) == 3, 15)
        for _ in range(10):
            obs = envs.step(zeros())[0]
        assert np.isfinite(obs).all()


@pytest.mark.guarantee(7)
def test_a_node_that_is_cut_off_is_given_up_and_comes_back(net, record_property):
    with make(net) as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        net.nodes[0].link_down()
        seconds, lost = step_until(envs, lambda: "node_lost" in kinds(envs), 15)
        assert seconds < FAST[1] + 1.5
        record_property("detected_s", seconds)
        net.nodes[0].link_up()
        seconds, more = step_until(envs, lambda: len(envs.stats()["missing_nodes"]) == 0, 15)
        assert seconds < 5.0
        record_property("back_s", seconds)
        record_property("lost_steps", len(lost + more))
        for _ in range(20):
            envs.step(zeros())
        assert sorted(lost + more) == [0, 1] and envs.stats()["incarnations"].tolist() == [1, 1, 0, 0]


@pytest.mark.guarantee(8)
def test_a_short_cut_costs_nothing(net):
    with make(net) as envs, ce.ClusterEnv(ID, 4, backend=ce.Local(workers=0)) as same:
        for e in (envs, same):
            e.reset(seed=1)
        for i in range(30):
            if i in (5, 15):
                net.nodes[0].link_down()
                timer = threading.Timer(FAST[1] / 3, net.nodes[0].link_up)
                timer.start()
            assert np.array_equal(envs.step(zeros())[0], same.step(zeros())[0]), "no row lost, none twice"
            if i in (5, 15):
                timer.join()
        assert "node_lost" not in kinds(envs)


@pytest.mark.guarantee(9)
@pytest.mark.parametrize("offset", [300, 5_000, 20_011, 47_500, 90_001])
def test_a_connection_reset_at_any_byte_leaves_whole_fragments_only(net, offset):
    """Both nodes go through a proxy that resets their connections when so many bytes have come from them."""
    with ce.ClusterEnv(ID, 4, backend=ce.Local(workers=0)) as reference:
        first = reference.collector(numpy_policy(), seed=1).rollout(64)
    backend = Namespaces(net, heartbeat_s=FAST, through_proxy=True)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [proxy.close() for proxy in backend.proxies])
        envs = stack.enter_context(ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY))
        collector = envs.collector(numpy_policy(), seed=1)
        batch = collector.rollout(64)
        assert np.array_equal(batch.obs, first.obs)
        backend.proxies[0].cut_after(offset, "to_target")
        seen = 0
        while "node_lost" not in kinds(envs) and seen < 60:
            batch = collector.rollout(64)
            seen += 1
            assert batch.valid.all() and np.isfinite(batch.obs).all()
            follows = ~(batch.terminations | batch.truncations)[:-1]
            moved = np.abs(batch.obs[1:, :, 0] - batch.obs[:-1, :, 0])[follows]
            assert moved.max() < 0.2, "rows of one episode follow each other"
        assert "node_lost" in kinds(envs)
        assert collector.rollout(16).valid.all()


def test_bytes_are_those_that_the_kernel_counts(net):
    """Per node, over rollouts with weights: what `stats()` counts, and the overhead that it states, within 5 %."""
    with make(net) as envs:
        module = mlp(2, 4)
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1)
        collector.rollout(512)
        kernel, packets = [host.counters() for host in net.nodes], [host.packets() for host in net.nodes]
        ours = envs.stats()
        for _ in range(5):
            with torch.no_grad():
                module[0].weight.add_(0.01)
            collector.rollout(512)
        for i, host in enumerate(net.nodes):
            for way, name in enumerate(("sent", "received")):  # by the head, so the other way round for the node
                told, frames = (
                    envs.stats()[f"{name}_{what}"][i] - ours[f"{name}_{what}"][i] for what in ("bytes", "frames")
                )
                counted = host.counters()[way] - kernel[i][way]
                expected = told + 42 * frames + 66 * (host.packets()[way] - packets[i][way])
                print(f"node {i}, {name}: {told} bytes in {frames} frames, the kernel has {counted}")
                assert abs(counted - expected) < 0.05 * expected


@pytest.mark.guarantee(13)
def test_nothing_outlives_a_killed_head(tmp_path, record_property):
    script = tmp_path / "head.py"
    script.write_text(
        "import os, time, numpy as np, clusterenv as ce, psutil\n"
        f"envs = ce.ClusterEnv({ID!r}, 4, backend=ce.Loopback(nodes=2, heartbeat_s={FAST}))\n"
        "envs.reset(seed=1); envs.step(np.zeros(4, dtype=np.int64))\n"
        "print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)\n"
        "time.sleep(60)\n"
    )
    head = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    pids = [int(word) for word in head.stdout.readline().split()]
    assert len(pids) >= 6
    head.kill()
    head.wait()
    head.stdout.close()
    start = time.monotonic()
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() - start < FAST[2] + 15, "something outlives its head"
        time.sleep(0.1)
    record_property("gone_s", time.monotonic() - start)


@pytest.mark.guarantee(13)
def test_nodes_end_with_their_lease_where_the_machine_of_the_head_is_gone(net, record_property):
    """No reset comes from there: its silence before the connection was given up counts."""
    lease_s = 5.0
    backend = Namespaces(net, heartbeat_s=(0.2, 1.5, lease_s), dead_after_s=60.0)
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        nodes = agents()
        net.head.link_down()
        start = time.monotonic()
        try:
            alive = survivors(nodes, lease_s + 15)
        finally:
            net.head.link_up()
        assert len(nodes) == 2 and not alive
        record_property("gone_s", time.monotonic() - start)


def hold_the_gil(seconds):
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.guarantee(14)
@pytest.mark.parametrize("wait", [time.sleep, hold_the_gil])
def test_a_busy_head_loses_nobody(net, wait):
    with make(net) as envs:
        envs.reset(seed=1)
        collector = envs.collector(numpy_policy(), seed=1)
        for i, batch in enumerate(collector.stream(4)):
            assert batch.valid.all()
            if i == 3:
                for _ in range(3):
                    wait(0.4)
                wait(3.5)  # more than twice the silence that is taken for death
            if i == 8:
                break
        assert "node_lost" not in kinds(envs) and "worker_lost" not in kinds(envs)
        assert envs.step(zeros())[0].shape == (4, 4)


@pytest.mark.guarantee(17)
def test_sigterm_says_preempted_and_brings_what_is_there(net):
    with make(net) as envs:
        collector = envs.collector(numpy_policy(), seed=1)
        collector.rollout(8)
        node = agents()[0]
        stream = collector.stream(400)
        next(stream)
        node.terminate()
        seen = [next(stream) for _ in range(8)]
        stream.close()
        lost = [event.reason for event in envs.events() if event.kind == "node_lost"]
        assert lost and "preempted" in lost[0]
        cut = [b for b in seen if not b.valid.all()]
        for batch in cut:
            rows = batch.valid[:, 0]
            assert rows[: rows.sum()].all(), "a prefix"
        psutil.wait_procs([node], timeout=5)
        assert not node.is_running() or node.status() == psutil.STATUS_ZOMBIE


@pytest.mark.guarantee(17)
def test_a_node_that_is_asked_to_leave_in_a_rollout(net):
    """What is there is handed over, and the rest of it is marked; the next rollout is whole."""
    with make(net) as envs:
        collector = envs.collector(numpy_policy(), seed=1)
        collector.rollout(8)
        node = agents()[0]
        timer = threading.Timer(0.3, node.terminate)
        timer.start()
        batch = collector.rollout(20_000)
        timer.join()
        assert batch.valid[:, 2:].all(), "the other node's"
        rows = batch.valid[:, 0]
        assert rows[: rows.sum()].all(), "a prefix"
        assert collector.rollout(16).valid.all()
        assert "preempted" in next(event.reason for event in envs.events() if event.kind == "node_lost")
        psutil.wait_procs([node], timeout=5)


@pytest.mark.guarantee(17)
def test_what_is_handed_over_may_take_its_time(net):
    """Over a slow link it takes longer than a second, and less than the scheduler grants."""
    backend = Namespaces(net, heartbeat_s=(0.2, 10.0, 30.0))
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        collector = envs.collector(numpy_policy(), seed=1)
        collector.rollout(8)
        net.nodes[0].limit(200_000, "out")
        timer = threading.Timer(0.3, agents()[0].terminate)
        timer.start()
        batch = collector.rollout(20_000)
        timer.join()
        net.nodes[0].unlimit("out")
        rows = batch.valid[:, 0]
        assert 0 < rows.sum() < 20_000 and rows[: rows.sum()].all(), "a prefix"
        assert batch.valid[:, 2:].all(), "the other node's"


def test_an_agent_that_outlives_its_job_is_told_to_leave(net):
    """A container that its scheduler does not end: it must not come back in place of the job that replaces it."""
    backend = Namespaces(net, heartbeat_s=FAST)
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        envs.reset(seed=1)
        jobs = backend.jobs[0]
        first, look = jobs.agents[0], jobs.look
        jobs.look = lambda: {**look(), **({0: "was cancelled"} if jobs.agents[0] is first else {})}
        step_until(envs, lambda: joined(envs) == 3 and not envs.stats()["missing_nodes"])
        assert first.wait(10) == 0 and jobs.agents[0] is not first and jobs.agents[0].poll() is None
        assert "its job is over: was cancelled" in jobs.log_tail(0)


def test_a_replacement_that_dies_before_it_comes_is_asked_for_again(net):
    backend = Namespaces(net, heartbeat_s=FAST)
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        envs.reset(seed=1)
        jobs = backend.jobs[0]
        start, failures = jobs.start, []

        def fail_once(node):
            if failures:
                start(node)
            else:
                failures.append(node)
                jobs.agents[node] = net.nodes[node].popen(["false"])

        jobs.start = fail_once
        agents()[0].kill()
        step_until(envs, lambda: joined(envs) == 3, 30)
        assert failures == [0] and "node_asked_again" in kinds(envs)


def test_a_large_pull_over_a_slow_link_delays_nobody_else(net):
    """100 MB at 8 MB/s to one node, while the other steps."""
    with ce.ClusterEnv(ID, 4, backend=Namespaces(net, heartbeat_s=FAST), recovery=RECOVERY) as envs:
        envs.reset(seed=1)
        driver, slots = envs._driver, np.array([2, 3])

        def steps(until):
            seconds = []
            while not until(len(seconds)):
                begin = time.perf_counter()
                envs.send(np.zeros(2, np.int64), slots)
                envs.recv(2)
                seconds.append(time.perf_counter() - begin)
            return np.percentile(seconds, [50, 99]) * 1e3, len(seconds)

        alone, _ = steps(lambda count: count >= 1500)
        net.nodes[0].limit(8e6, "in")
        driver.weights.attach(SimpleNamespace(nodes=[Node(), Node()]))
        weights = driver.weights.assign(driver.weights.of(0), 0, os.urandom(100_000_000))
        driver._put_weights(driver.weights.load(0, weights, 0, time.monotonic())[1])
        during, count = steps(lambda _: envs.stats()["pull_s"][0] is not None)
        print(f"ms per step, p50 and p99: {alone.round(2)} alone, {during.round(2)} of {count} in the pull")
        assert envs.stats()["pull_s"][0] > 10 and count > 500
        assert during[1] < 250, "nobody waits for a pull: even a share of it takes longer"
        assert kinds(envs).count("node_lost") == 0


def joining_of(node):
    line = node.cmdline()
    return Path(line[line.index("--join") + 1])


def run_agent(net, path, *options, timeout=30, code=None):
    """An agent on the second machine, to its end."""
    command = [sys.executable, "-m", "clusterenv", "node", "--join", str(path), *options]
    if code is not None:
        command = [sys.executable, "-c", code, "node", "--join", str(path), *options]
    return net.nodes[1].run(command, timeout)


@pytest.mark.guarantee(18)
def test_two_nodes_with_one_key(net):
    with make(net) as envs:
        envs.reset(seed=1)
        second = run_agent(net, joining_of(agents()[0]))
        assert second.returncode == 42 and "is here already" in second.stderr
        for _ in range(5):
            assert "transition_valid" not in envs.step(zeros())[4]


@pytest.mark.guarantee(20)
def test_another_version_is_refused(net):
    with make(net) as envs:
        envs.reset(seed=1)
        code = (
            "import sys, clusterenv.node.agent as node, clusterenv.cli as cli; node.__version__ = '0.0.7'; "
            "sys.exit(cli.main(sys.argv[1:]))"
        )
        other = run_agent(net, joining_of(agents()[1]), code=code)
        assert other.returncode == 42 and "clusterenv 0.0.7 there, 0.1.0 here" in other.stderr
        assert "transition_valid" not in envs.step(zeros())[4]


@pytest.mark.guarantee(21)
def test_strangers_are_refused(net, tmp_path):
    with make(net) as envs:
        envs.reset(seed=1)
        good = read_joining(joining_of(agents()[0]))
        wrong = make_keys()
        stranger = Joining(good.run, 0, good.address, good.head_key, wrong.public, wrong.secret)
        write_joining(tmp_path / "stranger.key", stranger)
        done = run_agent(net, tmp_path / "stranger.key", "--lease-s", "2")
        assert done.returncode == 42, done.stderr
        posing = Joining(good.run, 0, good.address, wrong.public, good.public, good.secret)
        write_joining(tmp_path / "posing.key", posing)
        done = run_agent(net, tmp_path / "posing.key", "--lease-s", "2")
        assert done.returncode != 0, "a node does not talk to a head whose key it does not know"
        assert envs.stats()["refused_keys"] >= 1
        assert "transition_valid" not in envs.step(zeros())[4]


@pytest.mark.guarantee(22)
def test_garbage_and_slow_connections_do_no_harm(net):
    import socket

    with make(net) as envs:
        envs.reset(seed=1)
        host, port = read_joining(joining_of(agents()[0])).address.removeprefix("tcp://").split(":")
        memory = psutil.Process().memory_info().rss
        open_ones = []
        for i in range(60):
            connection = net.nodes[0].call(socket.create_connection, (host, int(port)))
            open_ones.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(os.urandom(1 << 16) if i % 2 else b"\xff" * 9 + b"\x7f" * 50)
        for _ in range(20):
            envs.step(zeros())
        assert psutil.Process().memory_info().rss - memory < 16 << 20
        for connection in open_ones:
            connection.close()
        assert "node_lost" not in kinds(envs)


@pytest.mark.guarantee(25)
def test_key_files_that_others_could_read_or_make(net, tmp_path):
    keys = make_keys()
    path = tmp_path / "node.key"
    write_joining(path, Joining("run", 0, "tcp://127.0.0.1:9", keys.public, keys.public, keys.secret))
    assert read_joining(path).run == "run"
    path.chmod(0o644)
    with pytest.raises(ce.KeyFileError, match="chmod 600"):
        read_joining(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ce.KeyFileError, match="symbolic link"):
        read_joining(tmp_path / "link")
    with pytest.raises(ce.KeyFileError, match="cannot be read"):
        read_joining(tmp_path / "none")
    done = run_agent(net, tmp_path / "link")
    assert done.returncode == 42 and "symbolic link" in done.stderr


def test_a_node_that_joins_a_finished_run_ends_in_seconds(net, tmp_path):
    keys = make_keys()
    write_joining(tmp_path / "k", Joining("run", 0, "tcp://127.0.0.1:9", keys.public, keys.public, keys.secret))
    start = time.monotonic()
    done = run_agent(net, tmp_path / "k", "--lease-s", "2")
    assert done.returncode == 42 and "the run is over" in done.stderr and time.monotonic() - start < 15


def test_a_port_in_use_is_an_error_at_once(net):
    with make(net) as envs:
        address = read_joining(joining_of(agents()[0])).address.removeprefix("tcp://")
        host, port = address.split(":")
        manual = ce.Manual(nodes=1, bind=host, port=int(port), start_timeout_s=1)
        with pytest.raises(ce.StartError, match=f"cannot listen on {address}"):
            net.head.call(ce.ClusterEnv, ID, 2, backend=manual)
        envs.reset(seed=1)


def test_nodes_that_do_not_come_are_named(capfd):
    start = time.monotonic()
    with pytest.raises(ce.StartError, match="0/2 nodes, 0/4 environments, waiting for node 0, node 1"):
        ce.ClusterEnv(ID, 4, backend=ce.Manual(nodes=2, bind="127.0.0.1", start_timeout_s=1.0))
    assert time.monotonic() - start < 5
    said = capfd.readouterr().err
    assert "clusterenv node --join node-1.key" in said and "secret" not in said


@pytest.mark.parametrize("bind", ["0.0.0.0", "*", "no-such-interface"])
def test_bad_addresses(bind):
    with pytest.raises(ce.SpecError, match="bind="):
        ce.ClusterEnv(ID, 2, backend=ce.Manual(nodes=1, bind=bind, start_timeout_s=1))


@pytest.mark.guarantee(27)
def test_weights_that_arrive_damaged_are_pulled_again(net, monkeypatch):
    from clusterenv.cluster.weight_server import WeightServer

    answer, spoiled = WeightServer.answer, []

    def spoil(self, pull, session):
        messages = list(answer(self, pull, session))
        if messages and not spoiled:
            message, (piece,) = messages[0]
            spoiled.append(pull.weights)
            messages[0] = message, [bytes([piece[0] ^ 0xFF]) + bytes(piece[1:])]
        return iter(messages)

    monkeypatch.setattr(WeightServer, "answer", spoil)
    with make(net) as envs:
        batch = envs.collector(numpy_policy(), seed=1).rollout(8)
        assert spoiled and batch.valid.all()


def test_large_policies_travel_in_pieces_and_steps_go_on(net):
    big = nn.Sequential(nn.Linear(4, 3000), nn.Tanh(), nn.Linear(3000, 700), nn.Tanh(), nn.Linear(700, 2))
    with make(net) as envs:
        collector = envs.collector(ce.TorchPolicy(big, dist="categorical"), seed=1)
        batch = collector.rollout(4)
        assert batch.valid.all()
        size = sum(p.numel() for p in big.parameters()) * 4
        sent = envs.stats()["sent_bytes"]
        assert all(size < bytes_ < 1.6 * size for bytes_ in sent), "its structure travels with its first weights"
        with torch.no_grad():
            big[0].weight.mul_(1.01)
        collector.rollout(4)
        for before, after in zip(sent, envs.stats()["sent_bytes"], strict=True):
            assert size < after - before < 1.02 * size


def test_a_node_that_stays_away_hands_its_slots_to_the_others(net):
    backend = Namespaces(net, heartbeat_s=FAST, move_after_s=0.5)
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        executor = envs._driver.executor
        backend.jobs[0].is_full = True
        agents()[0].kill()
        step_until(envs, lambda: executor._head.roster.holder(0) == 1, 15)
        for _ in range(20):
            obs, *_ = envs.step(zeros())
        assert np.isfinite(obs).all() and envs.stats()["missing_nodes"] == [0]


@pytest.mark.guarantee(19)
def test_a_late_joiner_collects_with_the_current_weights(net):
    backend = Namespaces(net, heartbeat_s=FAST)
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=RECOVERY) as envs:
        weights = {"w": np.ones((4, 2), np.float32)}
        collector = envs.collector(ce.NumpyPolicy(linear, weights, dist="categorical"), seed=1)
        collector.rollout(8)
        backend.jobs[0].is_full = True
        agents()[0].kill()
        stream = collector.stream(8)
        for _ in range(20):  # the other node goes on alone
            batch = next(stream)
            weights["w"] *= 1.01
            newest = collector.publish()
        while "node_lost" not in kinds(envs):
            next(stream)
        backend.jobs[0].is_full = False
        while 0 not in batch.slots:
            batch = next(stream)
        back = [e.time_s for e in envs.events() if e.kind == "node_joined"][-1]
        assert time.time() - back < 5.0
        assert (batch.versions == newest).all() and (batch.incarnations == 1).all()
        stream.close()


@pytest.mark.guarantee(24)
def test_what_is_said_twice_counts_once(net, monkeypatch):
    from clusterenv.cluster.head import Head

    hear = Head._hear

    def twice(self, arrived, now):
        hear(self, arrived, now)
        hear(self, arrived, now)

    with make(net) as envs, ce.ClusterEnv(ID, 4, backend=ce.Local(workers=0)) as same:
        monkeypatch.setattr(Head, "_hear", twice)  # but for what they said when they joined
        for e in (envs, same):
            e.reset(seed=1)
        for i in range(40):
            actions = np.full(4, i % 2)
            assert np.array_equal(envs.step(actions)[0], same.step(actions)[0])
        a, b = (e.collector(numpy_policy(), seed=1) for e in (envs, same))
        for _ in range(5):
            assert np.array_equal(a.rollout(16).obs, b.rollout(16).obs)
        assert "node_lost" not in kinds(envs)


HOOKED: list[str] = []
IS_HOOKED = [False]


@pytest.mark.guarantee(23)
def test_the_head_never_unpickles_what_comes_from_a_network(net):
    def hook(event, args):
        if IS_HOOKED[0] and event == "pickle.find_class":
            HOOKED.append(f"{args}")

    sys.addaudithook(hook)
    policy = numpy_policy()
    IS_HOOKED[0] = True
    try:
        with make(net) as envs:
            envs.reset(seed=1)
            envs.step(zeros())
            envs.call("render_mode")
            collector = envs.collector(policy, seed=1)
            collector.rollout(8)
            collector.evaluate(episodes=2)
    finally:
        IS_HOOKED[0] = False
    assert HOOKED == []


def test_nothing_secret_is_to_be_seen(net):
    with make(net) as envs:
        envs.reset(seed=1)
        path = joining_of(agents()[0])
        secret = read_joining(path).secret
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                assert secret not in " ".join(process.cmdline())
                assert secret not in " ".join(process.environ().values())
        logs = "".join(log.read_text() for log in path.parent.glob("*.log"))
        assert secret not in logs and secret not in "".join(str(event) for event in envs.events())
        listening = net.head.run(["ss", "-Hltn"], 5).stdout.split("\n")
        assert not any("0.0.0.0:" in line.split()[3] or "*:" in line.split()[3] for line in listening if line)
    assert not path.exists() and not path.parent.exists()


class Odd:
    pass


class OddInfos(gym.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "debug": {"sim": Odd()}}


def test_infos_that_are_not_plain_data_are_named():
    with ce.ClusterEnv([lambda: OddInfos(gym.make(ID))] * 2, backend=ce.Loopback(nodes=1)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ce.EnvError, match=r"'debug'.*'sim'.*Odd"):
            envs.step(zeros(2))


def test_aps_saves_bytes_that_the_kernel_counts(net):
    """The same PPO run under both rules; what went from the head to the nodes, by the interfaces' own counters."""
    received = {}
    for name, rule in {"Always": ce.Always(), "APS": ce.APS(threshold=0.02)}.items():
        torch.manual_seed(1)
        with make(net, n=16) as envs:
            learner = PPO(envs.single_observation_space, envs.single_action_space, 30 * 32 * 16)
            collector = envs.collector(learner.policy, sync=rule, seed=1)
            collector.rollout(32)
            before = [host.counters()[0] for host in net.nodes]
            for _ in range(30):
                learner.learn(collector.rollout(32), collector.publish)
            kernel = sum(host.counters()[0] - start for host, start in zip(net.nodes, before, strict=True))
            stats = collector.stats()
        received[name] = kernel
        print(f"{name}: {stats['pulls']} pulls, {stats['weight_bytes']} bytes of weights, {kernel} bytes by the kernel")
    assert received["APS"] < 0.7 * received["Always"]


def test_a_folder_of_the_users_is_left_as_it_was(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ce.StartError, match="waiting for node 0"):
        ce.ClusterEnv(ID, 2, backend=ce.Manual(nodes=1, bind="127.0.0.1", folder=str(tmp_path), start_timeout_s=0.5))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
