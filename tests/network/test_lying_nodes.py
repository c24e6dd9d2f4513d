"""A node with a valid key that lies is ended; the head goes on, and the rows of others are what they were."""

from __future__ import annotations

import logging
import signal
import time

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.testing.chaos.lying import ACTED, ANSWERS, CALLS, CONTROL, EPISODES, FRAGMENTS, Lying
from stepping import kinds
from toys import linear

pytestmark = [pytest.mark.network, pytest.mark.guarantee(22)]

ID = "CartPole-v1"
OWN = [0, 1]
"""Slots of the node that does not lie."""


@pytest.fixture(autouse=True)
def no_call_waits_for_ever():
    def ring(*_):
        raise TimeoutError("the head waits for ever")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make(folder, n=4):
    backend = Lying(2, lies=folder)
    return backend, ce.ClusterEnv(ID, n, backend=backend, recovery=ce.Recovery(backoff_s=(0.05, 0.1)))


def policy():
    return ce.NumpyPolicy(linear, {"w": np.ones((4, 2), np.float32)}, dist="categorical")


def zeros(n=4):
    return np.zeros(n, dtype=np.int64)


def is_ended(envs):
    return not {"node_lost", "node_unfit"}.isdisjoint(kinds(envs))


def assert_ended(envs, backend, by="broke the protocol"):
    assert backend.has_lied
    reasons = [event.reason for event in envs.events() if event.kind in ("node_lost", "node_unfit")]
    assert len(reasons) == 1 and by in reasons[0], reasons


@pytest.mark.parametrize("lie", ANSWERS)
def test_lies_about_a_step(lie, tmp_path):
    backend, envs = make(tmp_path)
    with envs, ce.ClusterEnv(ID, 2, backend=ce.Local(workers=0)) as reference:
        assert np.array_equal(envs.reset(seed=3)[0][OWN], reference.reset(seed=3)[0])
        goes_on = lie == "rows twice"  # until its replacement has come, which is the same for every lie
        for t in range(100):
            if t == 2:
                backend.tell("answers", lie)
            obs, rewards, terminations, truncations, infos = envs.step(zeros())
            same = reference.step(zeros(2))
            for mine, theirs in zip((obs, rewards, terminations, truncations), same, strict=False):
                assert np.array_equal(mine[OWN], theirs), "another node's lie changed these rows"
            assert infos.get("transition_valid", np.ones(4, bool))[OWN].all() and "lie" not in infos
            if is_ended(envs) and not goes_on:
                break
        assert_ended(envs, backend)


@pytest.mark.parametrize("lie", ["no slots", "rows twice", "never the last", "infos of others", "faults of others"])
def test_lies_about_some_slots(lie, tmp_path):
    backend, envs = make(tmp_path)
    with envs:
        envs.reset(seed=3)
        backend.tell("answers", lie)
        while not is_ended(envs):
            envs.send(zeros(3), [0, 2, 3])
            assert len(envs.recv()[0]) == 3
        assert_ended(envs, backend)


@pytest.mark.parametrize("lie", ACTED)
def test_lies_about_what_the_policy_did(lie, tmp_path):
    backend, envs = make(tmp_path)
    with envs:
        envs.reset(seed=3)
        agent = policy()
        envs.step(agent)
        backend.tell("acted", lie)
        while not is_ended(envs):
            infos = envs.step(agent)[4]
            assert infos["_action"][OWN].all() and set(infos["policy_version"][OWN]) == {0}
        assert_ended(envs, backend)


@pytest.mark.parametrize("lie", FRAGMENTS)
def test_lies_about_a_fragment(lie, tmp_path):
    backend, envs = make(tmp_path)
    with envs:
        collector = envs.collector(policy(), seed=1)
        collector.rollout(32)
        backend.tell("fragments", lie)
        while not is_ended(envs):
            batch = collector.rollout(32)
            assert batch.valid.all() and batch.infos == {}
        assert_ended(envs, backend)


@pytest.mark.parametrize("lie", CALLS)
def test_lies_about_a_call(lie, tmp_path):
    backend, envs = make(tmp_path)
    with envs:
        envs.reset(seed=3)
        backend.tell("calls", lie)
        with pytest.raises(ce.WorkerLostError, match="died during the call"):
            envs.get_attr("render_mode")
        assert_ended(envs, backend)


@pytest.mark.parametrize("lie", EPISODES)
def test_lies_about_an_evaluation(lie, tmp_path):
    backend, envs = make(tmp_path)
    with envs:
        collector = envs.collector(policy(), seed=1)
        collector.rollout(8)
        backend.tell("episodes", lie)
        with pytest.raises(ce.WorkerLostError, match="died during the call"):
            collector.evaluate(episodes=4)
        assert_ended(envs, backend)


@pytest.mark.parametrize("lie", CONTROL)
def test_lies_beside_answers(lie, tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("clusterenv.output"), "level", logging.WARNING)
    backend, envs = make(tmp_path)
    with envs:
        envs.reset(seed=3)
        backend.tell("control", lie)
        deadline = time.monotonic() + 30
        while not (backend.has_lied and is_ended(envs)):
            assert time.monotonic() < deadline, "it is listened to for ever"
            envs.send(zeros(2), OWN)
            began = time.monotonic()
            envs.recv(min_envs=2, timeout_s=20)
            assert time.monotonic() - began < 5, "a wait for others was held up"
        assert_ended(envs, backend, "")
        kept = sum(len(event.reason) + len(event.detail) for event in envs.events())
        assert kept < 100_000, "the head keeps what it floods"
