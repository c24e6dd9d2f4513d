"""Environments that are slow or hang: named while it happens, wherever they are stepped."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
import pytest

import clusterenv as ce
from clusterenv.engine.health import innermost_line
from clusterenv.engine.workers import Workers
from clusterenv.events import Event
from toys import Trouble

LOCAL, NETWORK = ce.Local(workers=2), ce.Loopback(nodes=2)


class Uneven(Trouble):
    def step(self, action):
        time.sleep(0.008 if self.slot == 2 else 0.0002)
        return super().step(action)


@pytest.mark.parametrize("backend", [LOCAL, NETWORK], ids=["local", "network"])
def test_a_rollout_names_slow_environments(backend):
    with ce.ClusterEnv([lambda i=i: Uneven(i) for i in range(4)], backend=backend) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        for _ in range(2):
            collector.rollout(64)
        stats = envs.stats()
        events = [event for event in envs.events() if event.kind == "slow"]
    assert stats["slow_slots"] == [2] and [event.slots for event in events] == [(2,)]
    assert (stats["step_time_s"] > 0.0001).all() and stats["step_time_s"][2] > 0.007


@pytest.mark.parametrize(
    ("backend", "call"),
    [(LOCAL, "step"), (LOCAL, "stream"), (NETWORK, "step")],
    ids=["local-step", "local-stream", "network-step"],
)
def test_an_environment_that_hangs_is_named_long_before_its_timeout(tmp_path, backend, call):
    """In a stream the other worker goes on answering all the time."""
    memory = str(tmp_path / "lives")
    thunks = [lambda i=i: Trouble(i, "hang" if i == 1 else None, at=7, memory=memory) for i in range(4)]
    recovery = ce.Recovery(step_timeout_s=3.0, warn_after_s=1.0, backoff_s=(0.0, 0.0))
    with ce.ClusterEnv(thunks, backend=backend, recovery=recovery) as envs:
        envs.reset(seed=0)
        if call == "step":
            for _ in range(7):
                envs.step(np.zeros(4, dtype=np.int64))
        else:
            for _ in envs.collector(ce.RandomPolicy(), seed=1).stream(4):
                if "worker_replaced" in envs.stats()["events"]:
                    break
        events = [event for event in envs.events() if event.kind in ("long_call", "worker_lost")]
    assert "hung for" in events[-1].reason
    warning = next(event for event in events if "_fail" in event.reason)
    assert warning.kind == "long_call" and warning.slots == (1,) and warning.phase == "step"
    assert "(step_timeout_s=3)" in warning.reason and "toys.py:" in warning.reason, "the line that it hangs in"


def test_a_warning_is_repeated_after_twice_the_time():
    first, second = Workers([[0], [1]], [0, 0], 30.0)
    assert not first.is_warning_due(29.0) and first.is_warning_due(30.5)
    assert not first.is_warning_due(31.0) and not first.is_warning_due(59.0) and first.is_warning_due(61.0)
    assert second.is_warning_due(31.0), "each worker for itself"
    assert not Workers([[0]], [0], None)[0].is_warning_due(1e9)


def test_the_line_is_that_of_the_main_thread():
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/a/other.py", line 1 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/a/env.py", line 12 in step\n  File "/b.py", line 3 in f'
    )
    assert innermost_line(stack) == "/a/env.py:12 in step" and innermost_line("") == ""


def test_making_an_environment_to_evaluate_in_is_no_step():
    """Its limit is that of making one, whatever the worker did before."""

    def slow_to_make():
        time.sleep(2.5)
        return gym.make("CartPole-v1")

    recovery = ce.Recovery(step_timeout_s=1.0)
    with ce.ClusterEnv([slow_to_make], backend=ce.Local(workers=1), recovery=recovery) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        collector.rollout(4)
        assert len(collector.evaluate(episodes=1, deterministic=False).returns) == 1
        assert not [event for event in envs.events() if event.kind == "worker_lost"]


def test_texts_of_events_are_bounded():
    long, short = Event("worker_lost", "r" * 100_000, detail="d" * 10**6), Event("worker_lost", "why", detail="where")
    assert len(long.reason) < 17_000 > len(long.detail) and "984000 characters left out" in long.detail
    assert (short.reason, short.detail) == ("why", "where")
