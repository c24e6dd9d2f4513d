"""Faults and strangers on the network path. Each guarantee of reliability is named by its number."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import clusterenv as ce
from clusterenv.transport.keys import Joining, make_keys, read_joining, write_joining
from test_aps import net

ID = "CartPole-v1"
FAST = (0.2, 1.5, 3.0)  # beat, dead after, lease
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))


def zeros(n=4):
    return np.zeros(n, dtype=np.int64)


def make(n=4, workers=2, nodes=2, recovery=RECOVERY, **kwargs):
    backend = ce.Local(workers=workers, network=True, nodes=nodes, heartbeat=FAST, **kwargs)
    return ce.ClusterEnv(ID, n, backend=backend, recovery=recovery)


def agents():
    """Node agents of this process, in the order of their numbers."""
    found = [p for p in psutil.Process().children() if "--join" in p.cmdline()]
    return sorted(found, key=lambda p: p.cmdline()[p.cmdline().index("--join") + 1])


def step_until(envs, condition, timeout_s=15.0, n=4):
    """Step until something is so; returns the seconds that it took, and the lost slots that were told on the way."""
    begin, lost = time.monotonic(), []
    while not condition():
        assert time.monotonic() - begin < timeout_s, envs.events()
        infos = envs.step(zeros(n))[4]
        if "transition_valid" in infos:
            lost += np.flatnonzero(~infos["transition_valid"]).tolist()
    return time.monotonic() - begin, lost


def kinds(envs):
    return [event.kind for event in envs.events()]


def test_3_a_killed_node_is_known_at_once_and_replaced():
    with make() as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        node = agents()[0]
        workers = node.children(recursive=True)
        node.kill()
        seconds, lost = step_until(envs, lambda: "node_lost" in kinds(envs))
        assert seconds < 1.0
        assert not psutil.wait_procs(workers, timeout=2.0)[1], "its workers died with it"
        _, more = step_until(envs, lambda: kinds(envs).count("node_joined") == 3)
        for _ in range(5):
            infos = envs.step(zeros())[4]
        assert "transition_valid" not in infos
        assert sorted(lost + more) == [0, 1], "each of its slots lost one episode, nobody else's did"
        assert envs.stats()["incarnations"].tolist() == [1, 1, 0, 0]


def test_3_rollout_goes_on_when_a_node_dies_in_it():
    with make() as envs:
        collector = envs.collector(ce.TorchPolicy(net(2, 4), dist="categorical"), seed=1)
        collector.rollout(8)
        agents()[1].kill()
        batch = collector.rollout(64)
        assert batch.valid.all() and batch.num_envs == 4
        assert collector.rollout(8).incarnations.tolist() == [0, 0, 1, 1]
        first = next(e.time_s for e in envs.events() if e.kind == "node_lost")
        back = [e.time_s for e in envs.events() if e.kind == "node_joined"][-1]
        assert back - first < 10


def test_4_a_stopped_node_is_fenced():
    with make() as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        node = agents()[0]
        node.suspend()
        try:
            seconds, _ = step_until(envs, lambda: "node_lost" in kinds(envs))
            assert seconds < FAST[1] + 1.5
        finally:
            node.resume()
        step_until(envs, lambda: kinds(envs).count("node_joined") == 3)
        for _ in range(10):
            obs = envs.step(zeros())[0]
        assert np.isfinite(obs).all()


def test_13_nothing_outlives_a_killed_head(tmp_path):
    script = tmp_path / "head.py"
    script.write_text(
        "import os, time, numpy as np, clusterenv as ce, psutil\n"
        f"envs = ce.ClusterEnv({ID!r}, 4, backend=ce.Local(workers=2, network=True, nodes=2, heartbeat={FAST}))\n"
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
    deadline = time.monotonic() + FAST[2] + 15
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "something outlives its head"
        time.sleep(0.1)


def hold_the_gil(seconds):
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.parametrize("wait", [time.sleep, hold_the_gil])
def test_14_a_busy_head_loses_nobody(wait):
    with make() as envs:
        envs.reset(seed=1)
        collector = envs.collector(ce.TorchPolicy(net(2, 4), dist="categorical"), seed=1)
        for i, batch in enumerate(collector.stream(4)):
            assert batch.valid.all()
            if i in (3, 6):
                for _ in range(3):
                    wait(0.9)
                wait(4.0)  # more than twice the silence that is taken for death
            if i == 10:
                break
        assert "node_lost" not in kinds(envs) and "worker_lost" not in kinds(envs)
        assert envs.step(zeros())[0].shape == (4, 4)


def test_17_sigterm_says_preempted_and_brings_what_is_there():
    with make() as envs:
        collector = envs.collector(ce.TorchPolicy(net(2, 4), dist="categorical"), seed=1)
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
        assert not node.is_running() or node.status() == psutil.STATUS_ZOMBIE


def joining_of(node):
    line = node.cmdline()
    return Path(line[line.index("--join") + 1])


def run_agent(path, *options, timeout=30, code=None):
    command = [sys.executable, "-m", "clusterenv", "node", "--join", str(path), *options]
    if code is not None:
        command = [sys.executable, "-c", code, "node", "--join", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_18_two_nodes_with_one_key():
    with make() as envs:
        envs.reset(seed=1)
        second = run_agent(joining_of(agents()[0]))
        assert second.returncode == 42 and "is here already" in second.stderr
        for _ in range(5):
            assert "transition_valid" not in envs.step(zeros())[4]


def test_20_another_version_is_refused():
    with make() as envs:
        envs.reset(seed=1)
        code = (
            "import sys, clusterenv.node as node, clusterenv.cli as cli; node.__version__ = '0.0.7'; "
            "sys.exit(cli.main(sys.argv[1:]))"
        )
        other = run_agent(joining_of(agents()[1]), code=code)
        assert other.returncode == 42 and "clusterenv 0.0.7 there, 0.1.0 here" in other.stderr
        assert "transition_valid" not in envs.step(zeros())[4]


def test_21_strangers_are_refused(tmp_path):
    with make() as envs:
        envs.reset(seed=1)
        good = read_joining(joining_of(agents()[0]))
        wrong = make_keys()
        stranger = Joining(good.run, 0, good.address, good.head_key, wrong.public, wrong.secret)
        write_joining(tmp_path / "stranger.key", stranger)
        done = run_agent(tmp_path / "stranger.key", "--lease-s", "2")
        assert done.returncode == 42, done.stderr
        posing = Joining(good.run, 0, good.address, wrong.public, good.public, good.secret)
        write_joining(tmp_path / "posing.key", posing)
        done = run_agent(tmp_path / "posing.key", "--lease-s", "2")
        assert done.returncode != 0, "a node does not talk to a head whose key it does not know"
        assert envs.stats()["refused_keys"] >= 1
        assert "transition_valid" not in envs.step(zeros())[4]


def test_22_garbage_and_slow_connections_do_no_harm():
    import socket

    with make() as envs:
        envs.reset(seed=1)
        host, port = read_joining(joining_of(agents()[0])).address.removeprefix("tcp://").split(":")
        memory = psutil.Process().memory_info().rss
        open_ones = []
        for i in range(60):
            connection = socket.create_connection((host, int(port)))
            open_ones.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(os.urandom(1 << 16) if i % 2 else b"\xff" * 9 + b"\x7f" * 50)
        for _ in range(20):
            envs.step(zeros())
        assert psutil.Process().memory_info().rss - memory < 16 << 20
        for connection in open_ones:
            connection.close()
        assert "node_lost" not in kinds(envs)


def test_25_key_files_that_others_could_read_or_make(tmp_path):
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
    done = run_agent(tmp_path / "link")
    assert done.returncode == 42 and "symbolic link" in done.stderr


def test_a_node_that_joins_a_finished_run_ends_in_seconds(tmp_path):
    keys = make_keys()
    write_joining(tmp_path / "k", Joining("run", 0, "tcp://127.0.0.1:9", keys.public, keys.public, keys.secret))
    start = time.monotonic()
    done = run_agent(tmp_path / "k", "--lease-s", "2")
    assert done.returncode == 42 and "the run is over" in done.stderr and time.monotonic() - start < 15


def test_a_port_in_use_is_an_error_at_once():
    with make() as envs:
        port = int(read_joining(joining_of(agents()[0])).address.rsplit(":", 1)[1])
        with pytest.raises(ce.StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            ce.ClusterEnv(ID, 2, backend=ce.Manual(nodes=1, bind="127.0.0.1", port=port, start_timeout_s=1))
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


def test_27_weights_that_arrive_damaged_are_pulled_again(monkeypatch):
    from clusterenv.head.head import Head

    give, spoiled = Head._give, []

    def spoil(self, pull):
        weights = self.offers.get((pull.seat, pull.offer))
        if weights is not None and len(spoiled) < 1:
            spoiled.append(pull.seat)
            data = bytearray(weights.data)
            data[pull.at] ^= 0xFF
            self.offers[pull.seat, pull.offer] = weights._replace(data=bytes(data))
            give(self, pull)
            self.offers[pull.seat, pull.offer] = weights
        else:
            give(self, pull)

    monkeypatch.setattr(Head, "_give", spoil)
    with make() as envs:
        expected = [ce.Local(workers=0)]
        batch = envs.collector(ce.TorchPolicy(net(2, 4), dist="categorical"), seed=1).rollout(8)
        assert spoiled and batch.valid.all() and expected


def test_large_policies_travel_in_pieces_and_steps_go_on():
    big = nn.Sequential(nn.Linear(4, 3000), nn.Tanh(), nn.Linear(3000, 700), nn.Tanh(), nn.Linear(700, 2))
    with make() as envs:
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


def test_a_node_that_stays_away_hands_its_slots_to_the_others():
    with make(move_after_s=0.5) as envs:
        envs.reset(seed=1)
        envs.step(zeros())
        crew = envs._pool._crew
        crew._head._replace = lambda node, reason: None  # the backend has none to give
        agents()[0].kill()
        step_until(envs, lambda: crew._head.roster.holder(0) == 1)
        for _ in range(20):
            obs, *_ = envs.step(zeros())
        assert np.isfinite(obs).all() and envs.stats()["missing_nodes"] == [0]
