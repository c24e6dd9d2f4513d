"""The doctor finds every cause in made-up samples, also two at once, and nothing in healthy runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from clusterenv.monitor.doctor.diagnose import concerning
from clusterenv.monitor.doctor.findings import Cause, Severity
from clusterenv.monitor.doctor.here import Here
from clusterenv.monitor.doctor.show import text_of_findings
from made_up_runs import NOW, Run, healthy


class Case(NamedTuple):
    """A fault, the cause and subject to be found, and the run into which it is put."""

    put: Callable[[Run], None]
    cause: Cause
    subject: str
    severity: Severity = Severity.WARNING
    shape: str = "rollout"
    nodes: int = 1


def stopped(run: Run) -> None:
    run.worker(1, 10, is_busy=True, stuck_s=lambda age: 10 - age, slot=2, phase="step", cpu=0.0)
    run.fragments = [f for f in run.fragments if f.worker != 1 or f.arrived_at < NOW - 10]
    run.process(1, state="T", cpu=0.0)


def stopped_without_a_view_of_processes(run: Run) -> None:
    run.worker(1, 10, is_busy=True, stuck_s=lambda age: 10 - age, slot=2, phase="policy", cpu=0.0)
    run.fragments = [f for f in run.fragments if f.worker != 1 or f.arrived_at < NOW - 10]
    run.each(lambda age, s: replace(s, call="rollout", call_s=12 - age) if age < 11 else s)
    run.point(steps=lambda age: int(2000 * (30 - max(age, 10))))


def hanging(run: Run) -> None:
    run.worker(1, 12, is_busy=True, stuck_s=lambda age: 12 - age, slot=3, phase="step", cpu=0.0)
    run.fragments = [f for f in run.fragments if f.worker != 1 or f.arrived_at < NOW - 12]
    run.each(lambda age, s: replace(s, call="rollout", call_s=14 - age) if age < 13 else s)
    run.point(steps=lambda age: int(2000 * (30 - max(age, 12))))


def hanging_on_a_node(run: Run) -> None:
    """The long_call warning came, so that it is no answer that is on its way."""
    run.worker(5, 40, is_busy=True, stuck_s=lambda age: 40 - age, slot=10, phase="step")
    run.fragments = [f for f in run.fragments if f.worker != 5]
    run.each(lambda age, s: replace(s, call="rollout", call_s=41 - age))
    run.event("long_call", "worker 5 has been in one call for 31 s (no limit) at env.py:7 in step", 9, worker=5)


def throttled_worker(run: Run) -> None:
    run.process(2, throttled=0.9, quota=0.1, cpu=0.1)
    run.worker(2, cpu=0.1)
    run.slower(2, lambda f: replace(f, environment_s=f.environment_s * 8, policy_s=f.policy_s * 8))
    for slot in (4, 5):
        run.each(lambda _, s, slot=slot: replace(s, step_s=[v * 8 if i == slot else v for i, v in enumerate(s.step_s)]))


def starved_worker(run: Run) -> None:
    """As above, but nothing is known about control groups: it is slow in everything."""
    throttled_worker(run)
    run.here = None


def slow_slot(run: Run) -> None:
    run.slot(6, 0.02)


def slow_slot_never_timed(run: Run) -> None:
    run.each(lambda _, s: replace(s, step_s=[0.0] * len(s.step_s)))
    run.worker(3, is_busy=True, slot=6, phase="step", stuck_s=0.6)
    run.slower(3, lambda f: replace(f, environment_s=f.environment_s * 50))


def slow_reset(run: Run) -> None:
    run.worker(0, is_busy=True, slot=1, phase=lambda age: "step" if age % 3 == 0 else "reset")


def crash_loop(run: Run) -> None:
    for age in (40, 20, 5):
        run.event("env_error", "ValueError: boom", age, slots=(7,), worker=3, phase="step", seed=11, detail="Traceback")
    run.point(invalid_rows=lambda age: int(300 - 10 * age))


def killed_worker(run: Run) -> None:
    run.event("worker_lost", "worker 2 was killed by signal 9", 3, slots=(4, 5), worker=2)


def absent_worker(run: Run) -> None:
    run.worker(2, state="absent", losses=3, is_busy=False)


def swapping(run: Run) -> None:
    run.host(0, swap_bytes_per_s=4e7, memory_used=15 << 30)


def quota(run: Run) -> None:
    run.host(0, throttled=0.7)


def others(run: Run) -> None:
    for worker in range(4):
        run.process(worker, queued=0.5, cpu=0.4)
    run.here = replace(run.here, busy_cores=8.0, own_cores=3.0, others=[("stress", 4.0)])
    run.host(0, cpu=1.0, load=12.0)


def others_by_load(run: Run) -> None:
    run.host(1, cpu=0.99, load=20.0)


def too_many_workers(run: Run) -> None:
    run.host(0, cores=2, cpu=1.0, load=4.5)


def slow_link(run: Run) -> None:
    for worker in range(4, 8):
        run.slower(worker, lambda f: replace(f, arrived_at=f.arrived_at + 0.6))


def waiting_for_weights(run: Run) -> None:
    run.node(1, sent_bytes=lambda age: int((30 - age) * 4e7), weight_bytes=lambda age: int((30 - age) * 3.9e7))
    for worker in range(4, 8):
        run.slower(worker, lambda f: replace(f, arrived_at=f.arrived_at + 0.6))


def never_pulls(run: Run) -> None:
    run.point(held_version=0, version=lambda age: int(40 - age), pulls=1)
    run.node(0, version=0, pulls=1)


def drifted(run: Run) -> None:
    run.point(version=lambda age: int(90 - age), held_version=50, drift=0.4, threshold=0.01, pulls=9)
    run.node(0, version=50, pulls=20, drift=0.4)


def pending(run: Run) -> None:
    run.node(2, state="missing", scheduler="PENDING (Resources)", job="123", host=None)
    for worker in range(8, 12):
        run.worker(worker, state="absent", is_busy=False)


def lost_node(run: Run) -> None:
    run.node(1, state="missing", host=None)
    run.event("node_lost", "node 1: its connection ended", 8)
    run.event("worker_lost", "worker 5 is gone", 8, worker=5, slots=(10, 11))


def preempted(run: Run) -> None:
    run.node(1, state="missing", scheduler="PREEMPTED", host=None)
    run.event("node_lost", "node 1: its job ended: PREEMPTED", 8)


def silent(run: Run) -> None:
    run.node(2, silent_s=lambda age: max(0.0, 14 - age))


def refused(run: Run) -> None:
    run.node(2, state="missing", host=None)
    run.event("node_refused", "node 2 was refused: numpy 1.26 there, 2.1 here", 20)


def scheduler(run: Run) -> None:
    run.event("scheduler_lost", "the scheduler does not answer, so lost nodes are not replaced: timeout", 30)


def log_lost(run: Run) -> None:
    run.event("log_not_written", "lines of the log are lost: No space left on device", 30)


def invalid(run: Run) -> None:
    run.point(invalid_rows=lambda age: int((30 - age) * 100))


def missing_key(run: Run) -> None:
    run.event("missing_key", "no info has the key 'mask'", 30, slots=tuple(range(8)))


def heavy_policy(run: Run) -> None:
    run.point(policy=0.8, environment=0.1, waiting=0.1)
    for worker in range(4):
        run.slower(worker, lambda f: replace(f, policy_s=f.environment_s * 9))


def uneven(run: Run) -> None:
    run.worker(3, step_s=0.003)
    run.point(waiting=0.5)


def waiting_in_steps(run: Run) -> None:
    run.each(lambda _, s: replace(s, step_s=[0.02] * len(s.step_s)))
    for worker in range(4):
        run.worker(worker, environment=0.95, policy=0.02, waiting=0.03, cpu=0.05)
        run.process(worker, cpu=0.05, queued=0.02)
        run.slower(worker, lambda f: replace(f, environment_s=f.environment_s * 20))


def waiting_in_steps_of_the_head(run: Run) -> None:
    run.each(lambda _, s: replace(s, call="step", step_s=[0.02] * len(s.step_s)))
    for worker in range(4):
        run.worker(worker, phase="step", slot=2 * worker, cpu=0.05)
        run.process(worker, cpu=0.05, queued=0.02)


def leaking_worker(run: Run) -> None:
    for worker in range(4):
        run.worker(worker, memory=36 << 20)
    run.worker(1, memory=lambda age: int((300 - 10 * age) * 1e6))


def leaking_everywhere(run: Run) -> None:
    for worker in range(4):
        run.worker(worker, memory=lambda age: int((300 - 5 * age) * 1e6))


def children_that_spin(run: Run) -> None:
    for worker in range(4):
        run.process(worker, queued=0.6, cpu=0.3)
    children = {0: [("python", 1.4)], 3: [("python", 1.2), ("Xvfb", 0.5)]}
    run.here = replace(run.here, busy_cores=8.0, own_cores=7.8, children=children)


def one_environments_children(run: Run) -> None:
    children_that_spin(run)
    run.here = replace(run.here, children={2: [("server", 3.0)]})


def never_published(run: Run) -> None:
    run.point(version=0, held_version=0, pulls=1)
    run.node(0, version=0, pulls=1)


def first_fragment(run: Run) -> None:
    """The policy is so large that no fragment has been done."""
    run.fragments = []
    run.each(lambda _, s: replace(s, call="rollout", step_s=[0.001] * len(s.step_s)))
    run.point(policy=None, environment=None, waiting=None, steps=0, version=0, held_version=0)
    for worker in range(4):
        run.worker(worker, is_busy=True, phase="policy", slot=2 * worker, stuck_s=0.4, step_s=None, environment=None)


def stopped_agent(run: Run) -> None:
    lost_node(run)
    run.node(1, pid=777)
    run.here = Here(8, stopped={1: [777]})


def idle_workers(run: Run) -> None:
    run.each(lambda _, s: replace(s, call="", workers=[replace(w, is_busy=False) for w in s.workers]))


def building(run: Run) -> None:
    run.fragments = []
    run.point(steps=0, version=None, held_version=None)
    run.each(lambda _, s: replace(s, step_s=[0.0] * len(s.step_s)))
    for worker in range(4):
        run.worker(worker, phase="init", is_busy=True, stuck_s=9.0, step_s=None)


CASES = {
    "stopped": Case(stopped, Cause.WORKER_STOPPED, "worker 1", Severity.ERROR),
    "stopped, no process": Case(stopped_without_a_view_of_processes, Cause.WORKER_STOPPED, "worker 1", Severity.ERROR),
    "stopped in a stream": Case(stopped, Cause.WORKER_STOPPED, "worker 1", Severity.ERROR, "stream"),
    "hang": Case(hanging, Cause.ENV_HANGS, "slot 3", Severity.ERROR),
    "hang on a node": Case(hanging_on_a_node, Cause.ENV_HANGS, "slot 10", Severity.ERROR, nodes=3),
    "throttled worker": Case(throttled_worker, Cause.CPU_THROTTLED, "worker 2"),
    "starved worker": Case(starved_worker, Cause.SLOW_WORKER, "worker 2"),
    "quota of all": Case(quota, Cause.CPU_THROTTLED, "run"),
    "slow slot": Case(slow_slot, Cause.SLOW_ENV, "slot 6"),
    "slow slot in a stream": Case(slow_slot, Cause.SLOW_ENV, "slot 6", shape="stream"),
    "slow slot without a collector": Case(slow_slot, Cause.SLOW_ENV, "slot 6", shape="step"),
    "slow slot never timed": Case(slow_slot_never_timed, Cause.SLOW_ENV, "slot 6"),
    "slow reset": Case(slow_reset, Cause.SLOW_RESET, "slot 1"),
    "crash loop": Case(crash_loop, Cause.CRASH_LOOP, "slot 7", Severity.ERROR),
    "killed worker": Case(killed_worker, Cause.LOSS, "worker 2"),
    "absent worker": Case(absent_worker, Cause.WORKER_ABSENT, "worker 2", Severity.ERROR),
    "swap": Case(swapping, Cause.SWAPPING, "run"),
    "others": Case(others, Cause.OVERSUBSCRIBED, "run"),
    "others by load": Case(others_by_load, Cause.OVERSUBSCRIBED, "node 1", nodes=3),
    "too many workers": Case(too_many_workers, Cause.OVERSUBSCRIBED, "run", Severity.ADVICE),
    "slow link": Case(slow_link, Cause.SLOW_LINK, "node 1", nodes=3),
    "waiting for weights": Case(waiting_for_weights, Cause.WAITING_FOR_WEIGHTS, "node 1", nodes=3),
    "never pulls": Case(never_pulls, Cause.STALE_WEIGHTS, "run"),
    "drifted": Case(drifted, Cause.STALE_WEIGHTS, "run"),
    "pending": Case(pending, Cause.PENDING, "node 2", nodes=3),
    "lost node": Case(lost_node, Cause.NODE_LOST, "node 1", Severity.ERROR, nodes=3),
    "preempted": Case(preempted, Cause.NODE_PREEMPTED, "node 1", Severity.ERROR, nodes=3),
    "silent": Case(silent, Cause.NODE_SILENT, "node 2", Severity.ERROR, nodes=3),
    "refused": Case(refused, Cause.NODE_REFUSED, "node 2", Severity.ERROR, nodes=3),
    "scheduler": Case(scheduler, Cause.SCHEDULER_LOST, "run"),
    "log": Case(log_lost, Cause.NOT_WRITTEN, "run"),
    "key": Case(missing_key, Cause.MISSING_KEY, "run"),
    "invalid rows": Case(invalid, Cause.INVALID_ROWS, "run"),
    "policy": Case(heavy_policy, Cause.POLICY, "run", Severity.ADVICE),
    "lockstep": Case(uneven, Cause.LOCKSTEP, "worker 3", Severity.ADVICE),
    "waiting": Case(waiting_in_steps, Cause.ENV_WAITS, "run", Severity.ADVICE),
    "waiting, without a collector": Case(
        waiting_in_steps_of_the_head, Cause.ENV_WAITS, "run", Severity.ADVICE, shape="step"
    ),
    "leak": Case(leaking_worker, Cause.MEMORY_GROWS, "worker 1"),
    "leaks": Case(leaking_everywhere, Cause.MEMORY_GROWS, "run"),
    "children": Case(children_that_spin, Cause.CHILD_PROCESSES, "run"),
    "children of one": Case(one_environments_children, Cause.CHILD_PROCESSES, "worker 2"),
    "never published": Case(never_published, Cause.NEVER_PUBLISHED, "run", shape="stream"),
    "policy, first fragment": Case(first_fragment, Cause.POLICY, "run", Severity.ADVICE),
    "stopped agent": Case(stopped_agent, Cause.NODE_LOST, "node 1", Severity.ERROR, nodes=3),
    "learner": Case(idle_workers, Cause.LEARNER, "run", Severity.ADVICE, "learner"),
    "start": Case(building, Cause.STARTING, "run", Severity.ADVICE),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_the_only_finding(name):
    case = CASES[name]
    run = healthy(case.shape, case.nodes)
    case.put(run)
    findings = run.findings()
    assert [(f.cause, str(f.subject), f.severity) for f in findings] == [(case.cause, case.subject, case.severity)]
    (finding,) = findings
    assert finding.text and finding.advice and finding.evidence and "\n" not in finding.text
    assert 0.0 <= finding.lost <= 1.0


LOCAL_PAIRS = ["stopped", "throttled worker", "slow slot", "slow reset", "crash loop", "others", "never pulls", "log"]
NODE_PAIRS = ["others by load", "slow link", "pending", "silent", "scheduler", "slow slot", "crash loop", "slow reset"]


@pytest.mark.parametrize(
    ("first", "second", "nodes"),
    [(*pair, 1) for pair in itertools.combinations(LOCAL_PAIRS, 2)]
    + [(*pair, 3) for pair in itertools.combinations(NODE_PAIRS, 2) if pair != ("pending", "silent")],  # one node
)
def test_two_faults_at_once_are_both_found(first, second, nodes):
    run = healthy("rollout", nodes)
    for name in (first, second):
        CASES[name].put(run)
    found = run.findings()
    assert {(f.cause, str(f.subject)) for f in found} == {CASES[n][1:3] for n in (first, second)}
    levels = [list(Severity).index(f.severity) for f in found]
    assert levels == sorted(levels)


def test_the_costlier_of_two_slow_environments_is_first():
    run = healthy()
    run.slot(2, 0.01)
    run.slot(6, 0.05)
    assert run.causes() == [(Cause.SLOW_ENV, "slot 6"), (Cause.SLOW_ENV, "slot 2")]


def test_a_dead_worker_is_before_a_slow_one_and_a_crash_loop_carries_its_traceback():
    run = healthy()
    for put in (slow_slot, crash_loop, stopped):
        put(run)
    findings = run.findings()
    assert [f.cause for f in findings] == [Cause.WORKER_STOPPED, Cause.CRASH_LOOP, Cause.SLOW_ENV]
    assert findings[1].detail == "Traceback" and findings[1].evidence["seed"] == 11
    assert [f.cause for f in concerning(findings, 1)] == [Cause.WORKER_STOPPED]


def test_a_stopped_agent_is_to_be_continued_and_a_costly_learner_is_before_a_small_loss():
    run = healthy(nodes=3)
    stopped_agent(run)
    (finding,) = run.findings()
    assert "kill -CONT 777" in finding.advice and "is stopped" in finding.text
    run = healthy("learner")
    idle_workers(run)
    run.host(0, throttled=0.3)
    assert [f.cause for f in run.findings()] == [Cause.LEARNER, Cause.CPU_THROTTLED]


def test_a_stack_shows_the_last_call_wherever_it_stands():
    run = healthy()
    stack = "Current thread 0x1 (most recent call first):\n  File env.py, line 8 in step\n" + "  a frame\n" * 30
    for age in (40, 20, 5):
        run.event("worker_lost", "worker 3 killed by SIGSEGV", age, slots=(7,), worker=3, detail=stack)
    shown = text_of_findings(run.findings())
    assert "env.py, line 8" in shown and "lines left out" in shown


@pytest.mark.parametrize("growth", [lambda age: 300e6, lambda age: (300 - 10 * (age % 3)) * 1e6, lambda age: 3e8 - age])
def test_memory_that_does_not_grow_steadily_is_no_leak(growth):
    run = healthy()
    run.worker(1, memory=lambda age: int(growth(age)))
    assert run.findings() == []


@pytest.mark.parametrize("shape", ["rollout", "stream", "prefetch", "step"])
@pytest.mark.parametrize(("nodes", "workers", "slots"), [(1, 1, 1), (1, 1, 8), (1, 4, 1), (1, 4, 2), (3, 2, 4)])
def test_a_healthy_run_has_no_finding(shape, nodes, workers, slots):
    for seed in range(3):
        assert healthy(shape, nodes, workers, slots, seed=seed).causes() == []


def test_a_learner_that_takes_long_is_only_advice_and_none_if_collecting_overlaps_it():
    assert {f.severity for f in healthy("learner").findings()} == {Severity.ADVICE}
    run = healthy("learner")
    run.each(lambda _, s: replace(s, workers=[replace(w, is_busy=True, stuck_s=30.0) for w in s.workers]))
    assert run.causes() == []


@settings(max_examples=150)
@given(
    st.sampled_from(["rollout", "stream", "prefetch", "step"]),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(0, 10**6),
)
def test_noise_is_no_finding(shape, nodes, workers, slots, seconds, seed):
    assert healthy(shape, nodes, workers, slots, seconds, seed).causes() == []


# -- what must not be taken for a fault ---------------------------------------------------------------------------


def test_one_interrupted_step_does_not_make_an_environment_slow():
    """A step that is interrupted for 20 ms shows in the step time for a while."""
    run = healthy()
    run.each(lambda age, s: replace(s, step_s=[0.02 * 0.75**age, *s.step_s[1:]]) if age < 6 else s)
    assert run.causes() == []


def test_an_answer_that_waits_for_the_learner_is_not_a_hang():
    run = healthy("prefetch")
    run.each(lambda age, s: replace(s, call="", call_s=30 - age) if age < 29 else s)
    for worker in range(4):
        run.worker(worker, 29, is_busy=True, stuck_s=lambda age: 29 - age, slot=worker * 2, phase="step")
    run.fragments = [f for f in run.fragments if f.arrived_at < NOW - 28.5]
    assert run.causes() == []


def test_a_worker_that_was_idle_until_a_moment_ago_or_steps_one_slot_for_ever_is_not_a_hang():
    """Its progress is the same for a minute: nothing was asked of it, or each step looks like the one before."""
    run = healthy("rollout")
    run.worker(1, stuck_s=lambda age: 60 - age, is_busy=lambda age: age < 2, slot=2, phase="step")
    run.fragments = [f for f in run.fragments if f.worker != 1]
    run.point(steps=7)
    assert run.causes() == []
    run = healthy("step", slots=1)
    run.worker(1, stuck_s=lambda age: 60 - age, is_busy=True, slot=1, phase="step")
    run.each(lambda _, s: replace(s, call="step", call_s=60.0))
    assert run.causes() == []


def test_an_answer_on_a_slow_link_is_not_a_hang():
    run = healthy("rollout", 3)
    slow_link(run)
    run.worker(5, 9, is_busy=True, stuck_s=lambda age: 9 - age, slot=11, phase="step")
    assert run.causes() == [(Cause.SLOW_LINK, "node 1")]


def test_old_weights_within_the_threshold_are_fine_and_rare_pulls_too():
    run = healthy()
    run.point(version=90, held_version=50, drift=0.004, threshold=0.01)
    run.node(0, version=50, pulls=3, drift=0.004)
    assert run.causes() == []
    run = healthy()
    run.point(version=lambda age: int(230 - age), held_version=200)  # Every(100)
    run.node(0, version=200, pulls=3)
    assert run.causes() == []


def test_losses_of_long_ago_and_what_is_over_are_not_listed():
    run = healthy()
    for age in (500, 450, 400):
        run.event("env_error", "ValueError: boom", age, slots=(7,), worker=3, phase="step")
    run.event("scheduler_lost", "no answer", 100)
    run.event("scheduler_back", "the scheduler answers again", 50)
    run.event("node_lost", "node 0: its connection ended", 200)
    assert run.causes() == []


def test_a_run_that_is_over_says_only_why():
    run = healthy()
    for put in (crash_loop, others, never_pulls):
        put(run)
    run.each(lambda _, s: replace(s, is_over=True))
    assert run.causes() == [(Cause.CRASH_LOOP, "slot 7")]
