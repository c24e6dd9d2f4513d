"""What a run tells whoever watches it: samples, history, its socket, and what is kept when it has ended."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import signal
import socket
import stat
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import msgspec
import numpy as np
import psutil
import pytest

import clusterenv as ce
from clusterenv.driver import Driver
from clusterenv.errors import UsageError
from clusterenv.monitor import records
from clusterenv.monitor.calls import CallWatch
from clusterenv.monitor.client import Client, Kept, find, open_run
from clusterenv.monitor.collect import Probe
from clusterenv.monitor.history import History
from clusterenv.monitor.sample import Point, RunInfo
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


def forge(record, **changed):
    """Write the record of another run, which need not exist."""
    other = msgspec.structs.replace(record, **changed)
    path = records.folder() / f"{other.info.name}.json"
    path.write_bytes(msgspec.json.encode(other))
    return path


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
        forge(record, info=info, address=str(tmp_path / "none" / "socket"))
        assert len(records.live()) == 2
        records.prune()
        assert [r.info.name for r in records.live()] == [record.info.name]


def test_runs_of_other_machines_are_named_and_forgotten_when_they_are_silent():
    with ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1), name="here"):
        (record,) = wait_for(records.live)
        info = msgspec.structs.replace(record.info, host="node17", name="there")
        path = forge(record, info=info, machine="another boot", address="/nowhere")
        assert find(None).info.name == "here", "the only one of this machine"
        with pytest.raises(UsageError, match="the run there is on node17: log in there"):
            open_run("there")
    for choose in (find, open_run):  # a finished run must not be shown instead
        with pytest.raises(UsageError, match="the run there is on node17"):
            choose(None)
    os.utime(path, (time.time() - 3600,) * 2)
    assert open_run(None).info().name == "here" and not path.exists()


def test_one_of_two_live_runs_is_not_replaced_by_one_that_has_ended():
    def run(name):
        return ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1), name=name)

    with run("old"):
        wait_for(records.live)
    with run("a"), run("b"):
        wait_for(lambda: len(records.live()) == 2)
        with pytest.raises(UsageError, match="which run"):
            open_run(None)
        with pytest.raises(UsageError, match=r"no run is named 'x'; alive: [ab], [ab]; ended: old"):
            open_run("x")
        assert open_run("old").sample().is_over


def test_runs_that_begin_together_get_different_names():
    info = RunInfo("sweep", "CartPole-v1", 1, "Local", "host", os.getpid(), "", 0.0, "")
    with ThreadPoolExecutor(16) as pool:
        names = [found.name for found in pool.map(lambda _: records.claim(info, "address", "key"), range(64))]
    assert len(set(names)) == 64 and len(records.live()) == 64


def test_texts_that_are_not_utf_8_can_be_read(monkeypatch):
    monkeypatch.setattr(logging.getLogger("clusterenv"), "disabled", True)  # pytest-xdist cannot send such a log

    class Raises(gym.Wrapper):
        def step(self, action):
            if self.unwrapped.np_random.random() < 0.2:
                raise ValueError("caf\udce9")  # as os.fsdecode returns
            return super().step(action)

    recovery = ce.Recovery(max_restarts=1000, backoff_s=(0.0, 0.0))
    made = [lambda: Raises(gym.make("CartPole-v1"))] * 2
    with ce.ClusterEnv(made, backend=ce.Local(workers=1), recovery=recovery, name="bytes") as envs:
        envs.reset(seed=1)
        run = wait_for(lambda: records.live() and Client(find(None)))
        while "env_error" not in envs.stats()["events"]:
            envs.step(np.zeros(2, np.int64))
        assert any("\\udce9" in event.reason for event in run.events())
        run.close()
    assert any("\\udce9" in event.reason for event in open_run("bytes").events())


def test_a_client_connects_again_and_shows_what_is_kept_once_the_run_has_ended():
    with ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1), name="seen") as envs:
        envs.reset(seed=1)
        run = wait_for(lambda: records.live() and Client(find(None), timeout_s=1e-4))
        with pytest.raises(ConnectionError, match="the run seen does not answer: timed out"):
            while True:
                run.sample()
        run._timeout_s = 15.0
        assert not run.sample().is_over
    assert run.sample().is_over and run.points() and run.info().name == "seen"
    with pytest.raises(UsageError, match="has ended"):
        run.stack(0)
    run.close()


def test_a_home_that_hangs_does_not_keep_the_run_from_ending(monkeypatch):
    hanging, release = threading.Event(), threading.Event()

    def hang(*_):
        hanging.set()
        release.wait(60)
        raise OSError("it hung")

    monkeypatch.setattr(records, "claim", hang)
    envs = ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1))
    (pid,) = envs.stats()["worker_pids"]
    assert hanging.wait(20)
    envs.close()
    assert not psutil.pid_exists(pid) and not release.is_set()
    release.set()
    wait_for(lambda: all(thread.name != "clusterenv-monitor" for thread in threading.enumerate()))


def test_watching_a_stream_keeps_no_batch_alive():
    batches, calls = [], []
    with ce.ClusterEnv("CartPole-v1", num_envs=2, backend=ce.Local(workers=1)) as envs:
        watch = CallWatch(envs._driver)
        advance = Driver.advance

        def looked_at(self, *args):
            calls.append(watch.look()[0])
            return advance(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Driver, "advance", looked_at)
            stream = envs.collector(ce.RandomPolicy(), seed=1).stream(8)
            for batch in itertools.islice(stream, 6):
                batches.append(weakref.ref(batch))
            del batch
            gc.collect()
            assert sum(ref() is not None for ref in batches) <= 1, "the stream itself may keep the last one"
            stream.close()
    assert "stream" in calls


def test_each_fragment_is_delivered_once():
    with ce.ClusterEnv("CartPole-v1", num_envs=2, backend=ce.Local(workers=2)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        collector.rollout(4)
        probe = Probe(envs._driver)
        seen, after_s = 0, 0.0
        for _ in range(300):
            collector.rollout(4)
            new = probe.fragments(after_s)
            seen, after_s = seen + len(new), new[-1].arrived_at
            assert all(probe.fragments(after_s) == [] for _ in range(10))
    assert seen == 2 * 301


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
