"""The doctor names the faults of real runs, from outside; each run is a script in its own process.

Other processes may keep this machine busy: that is then a finding too, and a true one, so it is not counted here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from clusterenv.monitor.doctor import Cause, Severity, concerning, diagnose_run
from clusterenv.monitor.doctor.probe import state_of
from clusterenv.monitor.doctor.thresholds import WARM_S
from watched_run import watched

pytestmark = pytest.mark.doctor

CGROUP = Path("/sys/fs/cgroup/cpu")


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("CLUSTERENV_HOME", str(tmp_path))


def diagnosed(run):
    return [finding for finding in diagnose_run(run) if finding.cause is not Cause.OVERSUBSCRIBED]


@pytest.mark.parametrize("call", ["rollout", "stream", "step"])
def test_a_healthy_run(tmp_path, call):
    with watched(tmp_path, call=call) as run:
        assert diagnosed(run) == []


@pytest.mark.parametrize("options", [{}, {"call": "stream"}, {"call": "step"}, {"nodes": True}], ids=str)
def test_a_stopped_worker(tmp_path, options):
    with watched(tmp_path, **options) as run:
        pid = run.sample().workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            findings = diagnosed(run)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.WORKER_STOPPED, "worker 1")]
    assert str(pid) in findings[0].advice and concerning(findings, 1) == findings


def test_a_stopped_script(tmp_path):
    with watched(tmp_path) as run:
        os.kill(run.info().pid, signal.SIGSTOP)
        try:
            while state_of(run.info().pid) != "T":
                time.sleep(0.01)
            began = time.monotonic()
            findings = diagnose_run(run)
            assert time.monotonic() - began < 5, "it does not wait for a socket that is not served"
        finally:
            os.kill(run.info().pid, signal.SIGCONT)
    assert [f.cause for f in findings] == [Cause.HEAD_STOPPED]


@pytest.mark.parametrize("options", [{}, {"call": "step"}, {"nodes": True}, {"amount": 0.5}], ids=str)
def test_an_environment_that_sleeps_in_step(tmp_path, options):
    with watched(tmp_path, **{"fault": "step", "amount": 0.02, **options}) as run:
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.SLOW_ENV, "slot 1")]


@pytest.mark.parametrize("call", ["rollout", "step"])
def test_an_environment_that_sleeps_in_reset(tmp_path, call):
    with watched(tmp_path, fault="reset", amount=0.5, call=call) as run:
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.SLOW_RESET, "slot 1")]


def test_an_environment_that_hangs(tmp_path):
    with watched(tmp_path, fault="hang", call="step") as run:
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.ENV_HANGS, "slot 1")]
    assert findings[0].evidence["phase"] == "step"


def test_an_environment_that_crashes_again_and_again(tmp_path):
    with watched(tmp_path, fault="crash") as run:
        findings = diagnosed(run)
    assert (findings[0].cause, str(findings[0].subject)) == (Cause.CRASH_LOOP, "slot 1")
    assert "joint 1 left its limits" in findings[0].detail and findings[0].severity is Severity.ERROR
    assert len(findings) == 1, "lost rows are a symptom"


def test_weights_that_are_never_pulled_again(tmp_path):
    with watched(tmp_path, never=True) as run:
        while run.sample().point.version < 20:
            time.sleep(0.5)
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.STALE_WEIGHTS, "run")]


@pytest.mark.parametrize("call", ["rollout", "step"])
def test_environments_that_all_wait(tmp_path, call):
    with watched(tmp_path, fault="step", amount=0.02, slot=None, call=call) as run:
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.ENV_WAITS, "run")]


def test_an_environment_that_keeps_memory(tmp_path):
    with watched(tmp_path, fault="leak", amount=20_000) as run:
        wait_until_old(run)
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.MEMORY_GROWS, "worker 0")]


def test_environments_whose_processes_take_the_cores(tmp_path):
    with watched(tmp_path, fault="children", amount=2, slot=None) as run:
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.CHILD_PROCESSES, "run")]


def test_a_learner_that_forgets_to_publish(tmp_path):
    with watched(tmp_path, call="stream", publish=False) as run:
        wait_until_old(run)
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.NEVER_PUBLISHED, "run")]


def wait_until_old(run):
    """Wait until the doctor does not take what it sees for the start of a run."""
    while time.time() < run.info().began_at + WARM_S:
        time.sleep(0.5)


def test_a_slow_link(tmp_path):
    with watched(tmp_path, link=300e3, size=200) as run:
        findings = diagnosed(run)
    assert [(f.cause, str(f.subject)) for f in findings] == [(Cause.SLOW_LINK, "node 1")]


@contextlib.contextmanager
def throttled(pid, share):
    """Put a process into a control group (version 1) with a quota of this share of one core."""
    group = CGROUP / f"clusterenv-doctor-{pid}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text(str(int(share * 100_000)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
        (CGROUP / "cgroup.procs").write_text(str(pid))
    finally:
        while True:
            with contextlib.suppress(OSError):  # its process has not left yet
                group.rmdir()
                break
            time.sleep(0.1)


def test_a_worker_that_a_quota_throttles_while_another_environment_is_slow(tmp_path):
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(watched(tmp_path, fault="step", amount=0.02, envs=8, workers=4))
        stack.enter_context(throttled(run.sample().workers[3].pid, 0.05))
        findings = diagnosed(run)
    assert {(f.cause, str(f.subject)) for f in findings} == {
        (Cause.CPU_THROTTLED, "worker 3"),
        (Cause.SLOW_ENV, "slot 1"),
    }
