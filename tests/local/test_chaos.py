"""The chaos harness itself: each kind of fault happens, and the ledger finds what it has to find."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.testing import chaos
from clusterenv.testing.chaos import Fault, Kind

N = 4
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1), step_timeout_s=2.0, max_restarts=50)


@pytest.fixture(autouse=True)
def no_output(monkeypatch):
    monkeypatch.setattr(logging.getLogger("clusterenv.output"), "level", logging.WARNING)


def policy():
    return ce.NumpyPolicy(chaos.logits, {"w": np.zeros(chaos.ACTIONS, np.float32)}, dist="categorical")


def make(folder, backend=None, **kwargs):
    backend = ce.Local(workers=2) if backend is None else backend
    return ce.ClusterEnv(chaos.numbered(folder, N), backend=backend, recovery=RECOVERY, **kwargs)


def step(envs, ledger):
    actions = envs.action_space.sample()
    ledger.step(actions, envs.step(actions), envs.events())


def step_until(envs, ledger, condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, envs.events()
        step(envs, ledger)


def happens(folder, backend, kind, amount=0.0, *, slot=1, until="worker_lost"):
    """One fault while environments are stepped, until an event of this kind comes; then a few steps more."""
    with make(folder, backend) as envs:
        ledger = chaos.Ledger(folder, N)
        ledger.reset(envs.reset(seed=1)[0])
        for _ in range(5):
            step(envs, ledger)
        with chaos.Injector(folder, [Fault(0.0, kind, slot, amount, 1)], getattr(backend, "acts", None)) as injector:
            step_until(
                envs, ledger, lambda: injector.done and (until in counts(envs) if until else not injector.pending)
            )
        for _ in range(40):
            step(envs, ledger)
        balance = ledger.check()
        assert balance.produced == balance.delivered + balance.lost
        return balance, envs.events()


def counts(envs):
    return [event.kind for event in envs.events()]


# -- each kind once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "amount", "until"),
    [
        (Kind.KILL, 0.0, "worker_lost"),
        (Kind.SEGFAULT, 0.0, "worker_lost"),
        (Kind.EXIT, 0.0, "worker_lost"),
        (Kind.HANG, 1000.0, "worker_lost"),
        (Kind.HANG_WITH_GIL, 1000.0, "worker_lost"),
        (Kind.RAISE, 0.0, "env_error"),
        (Kind.NAN, 0.0, "env_error"),
    ],
)
def test_a_fault_of_a_worker_or_environment_is_declared(kind, amount, until, tmp_path):
    balance, _ = happens(tmp_path, None, kind, amount, until=until)
    assert balance.lives > N and balance.lost <= 2


@pytest.mark.parametrize(("kind", "amount"), [(Kind.STOP, 0.5), (Kind.SLOW, 0.5), (Kind.STDERR, 1e6)])
def test_a_fault_that_passes_costs_nothing(kind, amount, tmp_path):
    balance, events = happens(tmp_path, None, kind, amount, until=None)
    assert balance.lost == 0 and balance.lives == N, events


@pytest.mark.parametrize(("kind", "amount"), [(Kind.KILL, 0.0), (Kind.KILL_NODE, 0.0), (Kind.TERMINATE_NODE, 0.0)])
def test_a_fault_of_a_node_is_declared(kind, amount, tmp_path):
    backend = ce.Loopback(nodes=2, heartbeat_s=(0.2, 5.0, 10.0))
    until = "worker_lost" if kind is Kind.KILL else "node_lost"
    balance, _ = happens(tmp_path, backend, kind, amount, until=until)
    assert balance.lives > N


@pytest.mark.parametrize(("kind", "amount"), [(Kind.STALL, 30.0), (Kind.RESET, 2000.0), (Kind.REFUSE, 0.5)])
def test_a_fault_of_a_link_is_declared(kind, amount, tmp_path):
    backend = chaos.LinkedLoopback(nodes=2, heartbeat_s=(0.2, 3.0, 10.0))
    balance, _ = happens(tmp_path, backend, kind, amount, until="node_lost")
    assert balance.lives > N


@pytest.mark.parametrize(("kind", "amount"), [(Kind.STALL, 0.3), (Kind.DELAY, 0.02)])
def test_a_fault_of_a_link_that_passes_costs_nothing(kind, amount, tmp_path):
    balance, events = happens(tmp_path, chaos.LinkedLoopback(nodes=2), kind, amount, until=None)
    assert balance.lost == 0 and balance.lives == N, events


@pytest.mark.parametrize(("kind", "amount"), [(Kind.GARBAGE, 1e4), (Kind.STRANGER, 5.0)])
def test_strangers_change_nothing(kind, amount, tmp_path):
    backend = chaos.LinkedLoopback(nodes=2)
    with make(tmp_path, backend) as envs:
        ledger = chaos.Ledger(tmp_path, N)
        ledger.reset(envs.reset(seed=1)[0])
        with chaos.Injector(tmp_path, [Fault(0.0, kind, 0, amount, 1)], backend.acts) as injector:
            step_until(envs, ledger, lambda: injector.done and not injector.pending)
        assert bool(envs.stats()["refused_keys"]) == (kind is Kind.STRANGER)
        balance = ledger.check()
        assert balance.lost == 0 and balance.lives == N, envs.events()


# -- the ledger -------------------------------------------------------------------------------------------------


def rollout(envs):
    return envs.collector(policy(), seed=1).rollout(32)


@pytest.mark.guarantee(29)
def test_rollouts_streams_and_steps_follow_each_other(tmp_path):
    with make(tmp_path) as envs:
        ledger = chaos.Ledger(tmp_path, N)
        collector = envs.collector(policy(), seed=1)
        with chaos.Injector(tmp_path, [Fault(0.2, Kind.KILL, 0, 0.0, 0), Fault(0.5, Kind.RAISE, 3, 0.0, 0)]):
            for _ in range(3):
                for _ in range(5):
                    ledger.batch(collector.rollout(16), envs.events())
                before = collector.stats()["dropped_fragments"]
                stream = collector.stream(16)
                for _ in range(10):
                    ledger.batch(next(stream), envs.events())
                stream.close()
                dropped = collector.stats()["dropped_fragments"] - before
                ledger.left_stream(16, 2, dropped * 16 * (N // 2))
                for _ in range(20):
                    step(envs, ledger)
        balance = ledger.check()
        assert balance.delivered > 15 * 16 * N and balance.produced == sum(balance[1:4])


def planted(batch, change):
    """The batch with one of its arrays changed."""
    arrays = {name: np.array(getattr(batch, name)) for name in ("obs", "actions", "rewards", "valid", "truncations")}
    change(arrays)
    return dataclasses.replace(batch, **arrays)


def swap_rows(arrays):
    for name in ("obs", "actions", "rewards"):
        arrays[name][[3, 4], 1] = arrays[name][[4, 3], 1]


def take_another_slots_rows(arrays):
    arrays["obs"][:, 2] = arrays["obs"][:, 1]


@pytest.mark.parametrize(
    "change",
    [
        swap_rows,
        take_another_slots_rows,
        lambda arrays: arrays["obs"][5:, 2, 1].__iadd__(1),  # rows of the next life, which nobody has declared
        lambda arrays: arrays["rewards"].__setitem__((7, 0), 0.0),
        lambda arrays: arrays["actions"].__setitem__((7, 0), (arrays["actions"][7, 0] + 1) % chaos.ACTIONS),
        lambda arrays: arrays["truncations"].__setitem__((0, 0), True),
        lambda arrays: arrays["valid"].__setitem__((4, 3), False),
    ],
)
def test_the_ledger_finds_a_batch_that_was_altered(change, tmp_path):
    with make(tmp_path) as envs:
        batch = rollout(envs)
        chaos.Ledger(tmp_path, N).batch(batch, envs.events())
        with pytest.raises(chaos.LedgerError):
            chaos.Ledger(tmp_path, N).batch(planted(batch, change), envs.events())


def test_the_ledger_finds_a_batch_that_is_missing_or_comes_twice(tmp_path):
    with make(tmp_path) as envs:
        collector = envs.collector(policy(), seed=1)
        first, second, third = (collector.rollout(8) for _ in range(3))
        for batches in ((first, third), (first, second, second), (second,)):
            ledger = chaos.Ledger(tmp_path, N)
            with pytest.raises(chaos.LedgerError):
                for batch in batches:
                    ledger.batch(batch, envs.events())


def test_the_ledger_finds_steps_that_nobody_got(tmp_path):
    with make(tmp_path) as envs:
        ledger = chaos.Ledger(tmp_path, N)
        ledger.reset(envs.reset(seed=1)[0])
        step(envs, ledger)
        assert ledger.check().produced == N
        envs.step(np.zeros(N, np.int64))
        with pytest.raises(chaos.LedgerError, match="missing"):
            ledger.check()


def test_the_ledger_finds_a_loss_that_was_not_declared(tmp_path):
    with make(tmp_path) as envs:
        ledger = chaos.Ledger(tmp_path, N)
        ledger.reset(envs.reset(seed=1)[0])
        step(envs, ledger)
        chaos.ask(tmp_path, 2, chaos.Trouble.RAISE)
        actions = envs.action_space.sample()
        ledger.step(actions, envs.step(actions), ())
        with pytest.raises(chaos.LedgerError, match="0 losses were declared"):
            ledger.step(actions, envs.step(actions), ())


def test_the_ledger_finds_an_action_of_another_version(tmp_path):
    with make(tmp_path) as envs:
        batch = rollout(envs)
        with pytest.raises(chaos.LedgerError, match="not that of version 0"):
            chaos.Ledger(tmp_path, N, expected_action=lambda version: version).batch(batch, ())


def test_a_plan_follows_from_its_seed():
    plans = [chaos.plan_faults(seed, 600, num_envs=8, kinds=list(Kind)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert 80 < len(plans[0]) < 160 and {fault.kind for fault in plans[0]} == set(Kind)


# -- machines ---------------------------------------------------------------------------------------------------


def test_a_clock_jumps_for_the_nodes_alone(tmp_path):
    clock = chaos.Clock(tmp_path)
    code = "import time; print(time.time(), time.monotonic())"

    def times():
        env = {**os.environ, **clock.environment}
        return map(float, subprocess.check_output([sys.executable, "-c", code], env=env).split())

    clock.set(1e6)
    wall, steady = times()
    assert abs(wall - time.time() - 1e6) < 60 and abs(steady - time.monotonic()) < 60
    clock.set(0.0)
    assert abs(next(times()) - time.time()) < 60
    with clock.applied():
        assert os.environ["LD_PRELOAD"] == clock.environment["LD_PRELOAD"]
    assert "LD_PRELOAD" not in os.environ


def test_steps_take_slots_in_any_order(tmp_path):
    with make(tmp_path) as envs:
        ledger = chaos.Ledger(tmp_path, N)
        ledger.reset(envs.reset(seed=1)[0])
        actions = np.zeros(N, np.int64)
        envs.send(actions)
        for _ in range(50):
            result = envs.recv(1)
            ledger.step(actions[result[4]["slot"]], result, envs.events())
            envs.send(actions[result[4]["slot"]], result[4]["slot"])
        result = envs.recv()
        ledger.step(actions[result[4]["slot"]], result, envs.events())
        assert ledger.check().lost == 0
