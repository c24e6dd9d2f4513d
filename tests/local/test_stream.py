"""`collector.stream`: nothing lost, nothing twice, nobody waits; and it stops cleanly however one leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import clusterenv as ce
from clusterenv.executors.processes import ProcessExecutor
from ledgers import Ledger, constant, ledger
from toys import Trouble

TWO = ce.Local(workers=2, preload=("torch",))  # imported once, not by each worker


class Follow:
    """The book: each slot's rows must go on where they left off, fragment by fragment."""

    def __init__(self):
        self.sequence = defaultdict(int)
        self.last = {}
        self.lives = defaultdict(int)
        self.rows = defaultdict(int)

    def check(self, batch):
        assert batch.slots.tolist() == sorted(set(batch.slots.tolist()))
        for n, slot in enumerate(batch.slots.tolist()):
            assert batch.sequence[n] == self.sequence[slot], "in order, at most once"
            self.sequence[slot] += 1
            if batch.incarnations[n] != self.lives[slot]:
                assert batch.incarnations[n] > self.lives[slot] and batch.episode_starts[0, n]
                self.lives[slot] = int(batch.incarnations[n])
            elif slot in self.last:
                assert np.array_equal(batch.obs[0, n], self.last[slot])
            goes_on = ~batch.episode_starts[1:, n] & batch.valid[1:, n] & batch.valid[:-1, n]
            assert (np.diff(batch.obs[:, n, 3])[goes_on] == 1).all()
            self.last[slot] = batch.last_obs[n]
            self.rows[slot] += batch.num_steps


def test_no_fragment_is_lost_or_comes_twice():
    book = Follow()
    with ledger(6, 3) as envs:
        collector = envs.collector(constant(), seed=1)
        for i, batch in enumerate(collector.stream(7)):
            book.check(batch)
            assert len(batch.slots) == 2, "one worker's at a time"
            if i % 5 == 0:
                time.sleep(0.03)
            if i == 40:
                break
        assert sum(book.rows.values()) == 41 * 14
        stats = collector.stats()
        assert stats["steps"] == 41 * 14 and stats["dropped_fragments"] <= 6
        after = collector.rollout(5)
        assert after.valid.all() and after.obs.shape[:2] == (5, 6)
        envs.step(np.zeros(6, dtype=np.int64))
        collector.evaluate(episodes=2)


def test_a_slow_learner_makes_the_workers_wait():
    with ledger(4, 2) as envs:
        collector = envs.collector(constant(), seed=1)
        stream = collector.stream(5, queue=2)
        first = next(stream)
        time.sleep(0.5)
        book = Follow()
        book.check(first)
        steps_done = envs.call  # the environments themselves say how far they are, once the stream is closed
        for _ in range(3):
            book.check(next(stream))
        stream.close()
        episodes = [int(e) for e in steps_done("get_wrapper_attr", "episode")]
        assert max(episodes) < 40, "bounded: at most a queue ahead, not half a second ahead"


def test_min_envs_puts_fragments_together():
    book = Follow()
    with ledger(6, 3) as envs:
        collector = envs.collector(constant(), seed=1)
        sizes = []
        for batch in collector.stream(4, min_envs=6):
            book.check(batch)
            sizes.append(len(batch.slots))
            if len(sizes) == 10:
                break
        assert sizes == [6] * 10


def test_published_weights_arrive_between_fragments_and_old_data_can_be_refused():
    module = nn.Linear(4, 2)
    policy = ce.TorchPolicy(module, dist="categorical")
    with ce.ClusterEnv("CartPole-v1", 4, backend=TWO) as envs:
        collector = envs.collector(policy, seed=1)
        versions, last = [], defaultdict(int)
        for batch in collector.stream(8, max_staleness=4):
            assert (batch.versions == batch.versions[0, 0]).all() and batch.receipts[0].lag <= 4
            versions.append(int(batch.versions[0, 0]))
            worker = batch.receipts[0].worker
            assert versions[-1] >= last[worker], "a worker's versions never go back"
            last[worker] = versions[-1]
            with torch.no_grad():
                module.bias.add_(0.01)
            collector.publish()
            if len(versions) == 12:
                break
        assert max(versions) >= 5
        old = collector.stream(8, max_staleness=0)
        next(old)
        for _ in range(3):
            with torch.no_grad():
                module.bias.add_(0.01)
            collector.publish()
        batch = next(old)
        assert (batch.versions == collector.stats()["version"]).all()
        assert collector.stats()["dropped_fragments"] > 0
        assert any(event.kind == "dropped" and "max_staleness=0" in event.reason for event in envs.events())
        old.close()


def test_aps_in_a_stream_saves_pulls():
    module = nn.Linear(4, 2)
    policy = ce.TorchPolicy(module, dist="categorical")
    with ce.ClusterEnv("CartPole-v1", 4, backend=TWO) as envs:
        collector = envs.collector(policy, seed=1, sync=ce.APS(threshold=0.05))
        for i, _ in enumerate(collector.stream(16)):
            with torch.no_grad():
                module.bias.add_(torch.tensor([0.02, -0.02]))
            collector.publish()
            if i == 40:
                break
        stats = collector.stats()
    assert 2 <= stats["pulls"] <= 12 and stats["version"] >= 40


@pytest.mark.parametrize("what", ["kill", "raise"])
def test_losses_in_a_stream_splice_nothing(tmp_path, what):
    memory = str(tmp_path / "lives")

    def thunk(i):
        return lambda: Trouble(i, what if i == 1 else None, memory=memory, at=23, length=40)

    book = Follow()
    recovery = ce.Recovery(backoff_s=(0.01, 0.1))
    with ce.ClusterEnv([thunk(i) for i in range(4)], backend=ce.Local(workers=2), recovery=recovery) as envs:
        collector = envs.collector(constant(), seed=1)
        for i, batch in enumerate(collector.stream(6)):
            book.check(batch)
            if i > 20 and book.lives[1]:
                break
            assert i < 500
        assert book.lives[2] == 0 and book.lives[1] == 1


def test_an_exception_in_the_loop_stops_the_stream():
    with ledger(4, 2) as envs:
        collector = envs.collector(constant(), seed=1)
        with pytest.raises(ZeroDivisionError):
            for _ in collector.stream(5):
                1 / 0  # noqa: B018
        assert collector.rollout(3).valid.all()


def test_misuse_is_named():
    with ledger(4, 2) as envs:
        collector = envs.collector(constant(), seed=1)
        for wrong, match in (({"num_steps": 0}, "num_steps=0"), ({"num_steps": 1, "min_envs": 9}, "min_envs=9")):
            with pytest.raises(ce.SpecError, match=match):
                collector.stream(**wrong)
        stream = collector.stream(5)
        next(stream)
        with pytest.raises(ce.UsageError, match="a stream is open"):
            next(collector.stream(5))
        for call in (lambda: collector.rollout(2), lambda: envs.step(np.zeros(4, dtype=np.int64)), envs.reset):
            with pytest.raises(ce.UsageError, match="stream is open"):
                call()
        next(stream)
        stream.close()
        envs.reset()


def test_a_policy_that_fails_ends_the_stream_by_name():
    module = nn.Linear(4, 2)
    with ce.ClusterEnv("CartPole-v1", 4, backend=TWO) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1)
        with pytest.raises(ce.PolicyError, match="not finite"):
            for i, _ in enumerate(collector.stream(5)):
                with torch.no_grad():
                    module.bias.fill_(float("nan"))
                collector.publish()
                assert i < 100
        with torch.no_grad():
            module.bias.zero_()
        assert collector.rollout(3).valid.all()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_learner_that_is_killed_leaves_nothing_behind(tmp_path, signum):
    script = tmp_path / "learner.py"
    script.write_text(
        textwrap.dedent("""
        import clusterenv as ce
        envs = ce.ClusterEnv("CartPole-v1", 4, backend=ce.Local(workers=2))
        for i, batch in enumerate(envs.collector(ce.RandomPolicy(), seed=1).stream(8)):
            if i == 5:
                print("\\n".join(map(str, envs.stats()["worker_pids"])), flush=True)
        """)
    )
    learner = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        pids = [int(learner.stdout.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(learner.pid, signum)
        learner.wait(timeout=10)
        deadline = time.monotonic() + 10
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        learner.kill()
        learner.wait()
        learner.stdout.close()


def test_ctrl_c_between_reading_an_answer_and_keeping_it(monkeypatch):
    read, struck = ProcessExecutor._read_worker, []

    def interrupted(self, index, link, events):
        read(self, index, link, events)
        if not struck:
            struck.append(index)
            signal.raise_signal(signal.SIGINT)

    with ce.ClusterEnv("CartPole-v1", 4, backend=ce.Local(workers=2)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        collector.rollout(4)
        monkeypatch.setattr(ProcessExecutor, "_read_worker", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in collector.stream(4):
                pass
        assert struck and collector.rollout(4).valid.all(), "nothing is waited for that has come"
        assert "worker_lost" not in envs.stats()["events"]


def test_one_slow_worker_holds_nobody_up():
    """In the time of a few of its fragments, the others bring many."""

    class Slow(Ledger):
        def step(self, action):
            time.sleep(0.02)
            return super().step(action)

    thunks = [(lambda i=i: Slow(i)) if i < 2 else (lambda i=i: Ledger(i)) for i in range(6)]
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=3)) as envs:
        collector = envs.collector(constant(), seed=1)
        counts = defaultdict(int)
        for batch in collector.stream(5):
            counts[int(batch.slots[0])] += 1
            if counts[0] == 3:
                break
    assert counts[2] > 10 * counts[0] and counts[4] > 10 * counts[0]


def test_a_worker_that_reads_its_weights_late_still_gets_those_it_was_told_of():
    """While a slow worker has yet to load a version, the others' pulls must not write over it."""

    class Slow(Ledger):
        def step(self, action):
            time.sleep(0.01)
            return super().step(action)

    thunks = [(lambda i=i: Slow(i)) if i < 2 else (lambda i=i: Ledger(i)) for i in range(6)]
    policy = constant()
    logits_of = {0: policy.values["logits"]}
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=3)) as envs:
        collector = envs.collector(policy, seed=1)
        slow = []
        for i, batch in enumerate(collector.stream(5)):
            version = int(batch.versions[0, 0])
            own = torch.log_softmax(torch.from_numpy(logits_of[version]), 0).numpy()
            assert np.allclose(batch.logprobs, own[batch.actions], atol=1e-6), "acted by the version that it names"
            if batch.slots[0] == 0:
                slow.append(version)
            if len(slow) == 6:
                break
            policy.values = {"logits": np.array([0.0, 0.0, 0.01 * (i + 1)], dtype=np.float32)}
            logits_of[collector.publish()] = policy.values["logits"]
        assert collector.stats()["pulls"] > 20 and slow == sorted(slow)


def test_what_would_be_dropped_for_its_age_makes_its_node_pull():
    """A rule that puts up with old weights and a bound that drops what they do would otherwise wait for ever."""
    policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical")
    with ce.ClusterEnv("CartPole-v1", 4, backend=TWO) as envs:
        collector = envs.collector(policy, seed=1, sync=ce.APS(threshold=0.5))
        lags = []
        for batch in collector.stream(8, max_staleness=5, timeout_s=20):
            lags.append(batch.receipts[0].lag)
            with torch.no_grad():
                policy.module.bias.add_(torch.tensor([1e-5, -1e-5]))
            collector.publish()
            if len(lags) == 40:
                break
        assert max(lags) <= 5
        assert any("max_staleness=5" in event.reason for event in envs.events() if event.kind == "pull")


def test_shares_of_time_are_shares():
    """Workers go on while the learner works, and that time counts."""
    policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical")
    with ce.ClusterEnv("CartPole-v1", 8, backend=ce.Local(workers=1)) as envs:
        collector = envs.collector(policy, seed=1)
        begin = time.perf_counter()
        for i, _ in enumerate(collector.stream(64)):
            time.sleep(0.02)
            if i == 20:
                break
        stats = collector.stats()
        assert stats["collecting_s"] <= time.perf_counter() - begin
        assert stats["collecting_s"] > 20 * 0.02
        assert sum(stats["time_shares"].values()) == pytest.approx(1.0, abs=0.05)


def test_a_timeout_does_not_wait_for_an_environment_that_hangs():
    """The stream ends, and the environments can be closed."""
    envs = ce.ClusterEnv([lambda i=i: Trouble(i, "hang" if i else None) for i in range(2)], backend=ce.Local(workers=2))
    with envs:
        begin = time.monotonic()
        with pytest.raises(ce.DeadlineError, match="no fragment from any worker"):
            for _ in envs.collector(constant(), seed=1).stream(4, min_envs=2, timeout_s=0.5):
                pass
        assert time.monotonic() - begin < 30
        os.kill(envs.stats()["worker_pids"][1], signal.SIGKILL)  # `close()` would give it some seconds
