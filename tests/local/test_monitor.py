"""What a run tells whoever watches it: samples, history, its socket, and what is kept when it has ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import gymnasium as gym
import msgspec
import numpy as np
import psutil
import pytest

import clusterenv as ce
from clusterenv.errors import UsageError
from clusterenv.monitor import records
from clusterenv.monitor.client import Client, Kept, find, open_run
from clusterenv.monitor.history import History
from clusterenv.monitor.sample import Point
from toys import Hanging


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("CLUSTERENV_HOME", str(tmp_path))


def wait_for(what, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return found


def test_a_run_is_watched_from_outside_while_it_collects_and_while_the_learner_works():
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2), name="my run") as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        run = wait_for(lambda: records.live() and Client(find("my-run")))
        assert run.info().env == "CartPole-v1" and run.info().num_envs == 4 and run.info().pid == os.getpid()
        while not (sample := run.sample()) or not sample.point.steps:
            collector.rollout(64)
        assert sample.call in ("rollout", "") and [w.state for w in sample.workers] == ["running"] * 2
        before = len(run.points())
        time.sleep(2.5)  # the learner works: nobody calls the run
        after = run.sample()
        assert after.call == "" and after.call_s > 0.5 and len(run.points()) > before
        assert after.point.steps == run.points()[-1].steps and after.point.episodes > 0
        assert {f.worker for f in run.fragments()} == {0, 1}
        assert all(f.asked_at <= f.arrived_at <= time.time() for f in run.fragments())
        with pytest.raises(UsageError, match="no slot 9"):
            run.stack(9)
        with pytest.raises(UsageError, match="no nodes"):
            run.log(0)
        run.close()
    kept = open_run("my-run")
    assert isinstance(kept, Kept) and kept.sample().is_over and len(kept.points()) > before
    assert not records.live()


def test_steps_of_the_head_are_counted_and_a_lost_worker_is_shown():
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2)) as envs:
        envs.reset(seed=1)
        for _ in range(30):
            envs.step(np.zeros(4, np.int64))
        run = wait_for(lambda: records.live() and Client(find(None)))
        pid = wait_for(run.sample).workers[1].pid
        os.kill(pid, signal.SIGKILL)
        for _ in range(30):
            envs.step(np.zeros(4, np.int64))
        sample = wait_for(lambda: (s := run.sample()).point.losses and s)
        assert sample.point.steps == 4 * (1 + 60), "the rows of the reset count too"
        assert sample.incarnations == [0, 0, 1, 1] and set(sample.last_loss) == {2, 3}
        assert [w.losses for w in sample.workers] == [0, 1] and "SIGKILL" in sample.last_loss[2]
        events = run.events()
        assert "worker_lost" in [event.kind for event in events]
        assert [event.number for event in events] == list(range(len(events)))
        assert run.events(events[-1].number) == []
        run.close()


@pytest.mark.parametrize("backend", [ce.Local(workers=2), ce.Loopback(nodes=2)], ids=["local", "loopback"])
def test_the_stack_of_an_environment_that_hangs_shows_its_line(backend, tmp_path):
    flag = tmp_path / "hang"

    def make():
        return Hanging(gym.make("CartPole-v1"), flag)

    with ce.ClusterEnv([make] * 2, backend=backend, recovery=ce.Recovery(step_timeout_s=6.0)) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        run = wait_for(lambda: records.live() and Client(find(None)))
        flag.touch()
        stacks = []
        asking = threading.Thread(target=lambda: stacks.append(run.stack(1)))
        asking.start()
        envs.send(np.zeros(2, np.int64))
        envs.recv()  # until the limit of one step is over
        asking.join()
        run.close()
    assert "where_it_hangs" in stacks[0] and "in step() of slot 1" in stacks[0]


def test_nodes_show_their_machine():
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Loopback(nodes=2)) as envs:
        envs.reset(seed=1)
        run = wait_for(lambda: records.live() and Client(find(None)))
        nodes = wait_for(
            lambda: (n := run.sample().nodes) and all(node.host and node.host.cpu is not None for node in n) and n
        )
        assert [node.state for node in nodes] == ["joined", "joined"]
        assert all(node.host_name == socket.gethostname() and node.host.memory_total > 0 for node in nodes)
        assert all(node.sent_bytes > 0 and node.received_bytes > 0 and node.silent_s < 5 for node in nodes)
        assert "joined the run" in run.log(1)
        os.kill(nodes[0].pid, signal.SIGKILL)
        wait_for(lambda: run.sample().event_counts.get("node_lost"))
        run.close()


def test_nobody_without_the_key_gets_an_answer(tmp_path):
    with ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1)):
        (record,) = wait_for(records.live)
        assert stat.S_IMODE(Path(record.address).parent.stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "runs" / f"{record.info.name}.json").stat().st_mode) == 0o600
        for first in (b"wrong\n", b"\n", b"x" * 20_000 + b"\n"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(5)
                stranger.connect(record.address)
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(first + b'["info"]\n')
                    assert stranger.recv(100) == b""
        with socket.socket(socket.AF_UNIX) as friend:
            friend.connect(record.address)
            friend.sendall(f'{record.key}\n["close"]\nnonsense\n["info"]\n'.encode())
            with friend.makefile() as file:
                answers = [json.loads(file.readline()) for _ in range(3)]
            assert "unknown request" in answers[0]["error"] and "error" in answers[1] and "ok" in answers[2]


def test_two_runs_of_one_script_have_different_names():
    with (
        ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1), name="a"),
        ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1), name="a"),
    ):
        wait_for(lambda: len(records.live()) == 2)
        assert sorted(record.info.name for record in records.live()) == ["a", "a-2"]
        assert find("a").info.name == "a"
        with pytest.raises(UsageError, match="which run"):
            find(None)


def test_the_record_of_a_killed_script_is_removed(tmp_path):
    with ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1)):
        (record,) = wait_for(records.live)
        gone = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
        info = msgspec.structs.replace(record.info, pid=gone, name="killed")
        records.write(records.Live(info, str(tmp_path / "none" / "socket"), "key"))
        assert len(records.live()) == 2
        records.prune()
        assert [r.info.name for r in records.live()] == [record.info.name]


def test_a_home_that_cannot_be_written_does_not_disturb_the_run(monkeypatch, caplog, tmp_path):
    place = tmp_path / "file"
    place.write_text("not a folder")
    monkeypatch.setenv("CLUSTERENV_HOME", str(place))
    with ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1)) as envs:
        envs.reset(seed=1)
        wait_for(lambda: any("cannot be watched" in record.message for record in caplog.records))
        envs.step(np.zeros(1, np.int64))
    assert sum("cannot be watched" in record.message for record in caplog.records) == 1


def test_the_history_has_seconds_of_an_hour_and_minutes_of_days():
    history = History()
    for second in range(3 * 3600):
        history.add(Point(1000.0 + second, steps=10 * second, steps_per_s=10.0))
    points = history.points()
    assert len(points) == 3600 + 119 and points[-1].time_s == 1000.0 + 3 * 3600 - 1
    assert all(b.time_s > a.time_s for a, b in itertools.pairwise(points))
    assert all(point.steps_per_s == 10.0 for point in points)
    assert len(history.points(after_s=points[-10].time_s)) == 9
