"""Ctrl-C at every line that a call crosses: it is raised, the next `reset()` works at once, and nobody is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

import clusterenv as ce
from interrupting import LineTrace, Waits, lines_of
from toys import SpaceEnv, same

pytestmark = pytest.mark.guarantee(15)

N = 2
ACTIONS = np.zeros(N, dtype=np.int64)

BACKENDS = {
    "local": ce.Local(workers=2),
    "inline": ce.Local(workers=0),
    "network": ce.Loopback(nodes=2, workers_per_node=1),
}


def make(info="none"):
    return SpaceEnv(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2), length=2, info=info)


def step(envs):
    envs.step(ACTIONS)


def send_and_recv(envs):
    envs.send(ACTIONS)
    envs.recv()


def reset(envs):
    envs.reset(seed=3)


def rollout(envs):
    envs.collectors[0].rollout(3)


def stream(envs):
    with contextlib.closing(envs.collectors[0].stream(3)) as batches:  # garbage collection would ignore a Ctrl-C
        for _ in range(3):
            next(batches)


def call(envs):
    envs.call("add", 1)


def rows_of(envs):
    return [envs.reset(seed=7), *(envs.step(ACTIONS) for _ in range(3))]


def sweep(envs, do, expected, every):
    """Interrupt `do` at each line (at one of `every`) of the head's code that it crosses."""
    envs.reset(seed=0)
    do(envs)
    lines = lines_of(lambda: do(envs))
    assert lines > 30
    for at in range(0, lines, every):
        trace = LineTrace(at)
        try:
            trace.run(lambda: do(envs))
        except KeyboardInterrupt:
            pass
        else:
            assert not trace.where, f"a Ctrl-C was lost at {trace.where}"
        begin = time.monotonic()
        same(rows_of(envs), expected, trace.where)
        assert time.monotonic() - begin < 60.0, trace.where
        if (
            envs._driver.executor.processes is not None
        ):  # in the calling process, the interrupted environment is rebuilt
            assert not {"worker_lost", "node_lost"} & {event.kind for event in envs.events()}, trace.where


@pytest.mark.parametrize(
    ("kind", "do", "info", "every"),
    [
        ("local", step, "none", 1),
        ("local", step, "rich", 1),
        ("local", send_and_recv, "none", 1),
        ("local", reset, "none", 2),
        ("local", call, "none", 2),
        ("local", rollout, "none", 9),
        ("local", stream, "none", 25),
        ("inline", step, "none", 1),
        ("inline", send_and_recv, "none", 1),
        ("network", step, "none", 1),
        ("network", reset, "none", 5),
    ],
)
def test_ctrl_c_at_every_line(kind, do, info, every):
    vector = gym.vector.SyncVectorEnv([lambda: make(info)] * N)
    expected = rows_of(vector)
    vector.close()
    recovery = ce.Recovery(step_timeout_s=15.0, reset_timeout_s=15.0)
    with ce.ClusterEnv([lambda: make(info)] * N, backend=BACKENDS[kind], recovery=recovery) as envs:
        envs.collectors = [envs.collector(ce.RandomPolicy(), seed=1)]
        sweep(envs, do, expected, every)


class Own(Exception):
    """What a user's own handler raises."""


def test_a_handler_of_the_user_is_called_at_the_same_moments():
    def handler(number, frame):
        assert frame is not None
        raise Own

    with ce.ClusterEnv([make] * N, backend=ce.Local(workers=2)) as envs:
        before = signal.signal(signal.SIGINT, handler)
        try:
            rows = rows_of(envs)
            lines = lines_of(lambda: step(envs))
            for at in range(lines):
                trace = LineTrace(at)
                with pytest.raises(Own):
                    trace.run(lambda: step(envs))
                assert signal.getsignal(signal.SIGINT) is handler, trace.where
                same(rows_of(envs), rows, trace.where)
        finally:
            signal.signal(signal.SIGINT, before)
        assert "worker_lost" not in envs.stats()["events"]


def test_pythons_own_handler_is_back_when_the_last_environments_are_closed():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    first, second = (ce.ClusterEnv([make], backend=ce.Local(workers=0)) for _ in range(2))
    first.reset()
    second.reset()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    first.close()
    second.reset()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    second.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_notebook_that_sets_the_handler_anew_for_each_cell_is_followed():
    with ce.ClusterEnv([make], backend=ce.Local(workers=0)) as envs:
        for _ in range(2):
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            envs.reset()
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            signal.signal(signal.SIGINT, before)


def test_environments_of_another_thread_hold_nothing_back():
    """The main thread is interrupted at once while another one is in an uninterrupted call."""
    envs = ce.ClusterEnv([Waits], backend=ce.Local(workers=0))
    envs.reset()
    rows = []
    thread = threading.Thread(target=lambda: rows.append(envs.step(ACTIONS[:1])))
    thread.start()
    try:
        assert Waits.entered.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        Waits.gate.set()
        thread.join()
    assert rows[0][1].shape == (1,)
    envs.close()
