"""The one thread that talks to a scheduler: what it starts, what it tells, and that nobody waits for it."""

from __future__ import annotations

import threading
import time

import pytest

import clusterenv as ce
from clusterenv.backends.launch.supervisor import Supervisor
from clusterenv.events import EventLog


class Scheduler:
    """`Jobs` without any. What is in `errors` is raised by `start`, the first one first; what is in `hangs` hangs."""

    def __init__(self):
        self.jobs, self.over, self.errors, self.log = set(), {}, [], []
        self.hangs, self.goes_on = set(), threading.Event()
        self.failure = None

    def _may_hang(self, what):
        if what in self.hangs:
            self.log.append(f"{what} hangs")
            self.goes_on.wait()

    def look(self):
        self._may_hang("look")
        if self.failure:
            raise self.failure
        return dict(self.over)

    def start(self, node):
        self._may_hang("start")
        if self.errors:
            raise self.errors.pop(0)
        self.over.pop(node, None)
        self.jobs.add(node)
        self.log.append(f"start {node}")

    def drop(self, node):
        self.jobs.discard(node)
        self.log.append(f"drop {node}")

    def stop(self, deadline):
        self._may_hang("stop")
        self.log.append("stop")
        if self.failure:
            raise self.failure


@pytest.fixture
def scheduler(monkeypatch):
    monkeypatch.setattr("clusterenv.backends.launch.supervisor._LOOK_S", 0.02)
    monkeypatch.setattr("clusterenv.backends.launch.supervisor._AGAIN_S", 0.1)
    return Scheduler()


@pytest.fixture
def events():
    return EventLog()


@pytest.fixture
def supervisor(scheduler, events):
    """Two nodes are started."""
    supervisor = Supervisor(events)
    supervisor.keep(scheduler, 2)
    assert scheduler.log == ["start 0", "start 1"]
    scheduler.log.clear()
    yield supervisor
    scheduler.goes_on.set()
    supervisor.stop(time.monotonic() + 5)


def stop(supervisor, timeout_s=5.0):
    return supervisor.stop(time.monotonic() + timeout_s)


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_node_is_started_again_when_its_job_is_over(supervisor, scheduler):
    supervisor.want(0)
    supervisor.want(2)
    wait_for(lambda: scheduler.log)
    assert scheduler.log == ["start 2"], "the one without a job"
    scheduler.over[1] = "ended"
    wait_for(lambda: supervisor.over)
    assert supervisor.over == {1: "ended"} and scheduler.log == ["start 2"], "nobody wants it again"
    scheduler.over[0] = "ended"
    wait_for(lambda: len(scheduler.log) == 2)
    assert scheduler.log[1] == "start 0" and 0 not in supervisor.over
    supervisor.let_go(1)
    wait_for(lambda: not supervisor.over)
    supervisor.want(1)
    wait_for(lambda: len(scheduler.log) == 4)
    assert scheduler.log[2:] == ["drop 1", "start 1"]


class ByHand:
    """`Jobs` that can only be asked to start."""

    def __init__(self):
        self.log = []

    def start(self, node):
        self.log.append(f"start {node}")


def test_jobs_that_cannot_be_looked_at_are_started_whenever_they_are_wanted(scheduler, events):
    supervisor, jobs = Supervisor(events), ByHand()
    supervisor.keep(jobs, 1)
    supervisor.want(0)
    wait_for(lambda: len(jobs.log) == 2)
    supervisor.let_go(0)
    supervisor.want(0)
    wait_for(lambda: len(jobs.log) == 3)
    assert stop(supervisor) == "" and jobs.log == ["start 0"] * 3 and not supervisor.over and not events()


class WithoutDrop:
    """`Jobs` of which one cannot be ended alone."""

    def __init__(self):
        self.log, self.over, self.looks = [], {}, 0

    def start(self, node):
        self.over.pop(node, None)
        self.log.append(f"start {node}")

    def look(self):
        self.looks += 1
        return dict(self.over)

    def stop(self, deadline):
        self.log.append("stop")


def test_a_job_that_cannot_be_dropped_is_over_before_its_node_is_started_again(scheduler, events):
    """Or two agents would have one key."""
    supervisor, jobs = Supervisor(events), WithoutDrop()
    supervisor.keep(jobs, 1)
    supervisor.let_go(0)
    supervisor.want(0)
    seen = jobs.looks
    wait_for(lambda: jobs.looks >= seen + 3)
    assert jobs.log == ["start 0"], "it was told to leave, and has not yet"
    jobs.over[0] = "ended"
    wait_for(lambda: len(jobs.log) == 2)
    assert stop(supervisor) == "" and jobs.log == ["start 0", "start 0", "stop"]


def test_a_start_that_fails_is_tried_again(supervisor, scheduler, caplog):
    scheduler.errors = [ce.StartError("sbatch says: no"), KeyError("a bug of its client")]
    supervisor.want(2)
    wait_for(lambda: scheduler.log)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "node 2 could not be started: sbatch says: no",
        "node 2 could not be started: KeyError: 'a bug of its client'",
    ]


def test_the_first_start_fails(scheduler, events):
    """What was started before it is ended."""
    supervisor = Supervisor(events)
    start = scheduler.start

    def fail_second(node):
        if node == 1:
            raise ce.StartError("sbatch says: no")
        start(node)

    scheduler.start = fail_second
    with pytest.raises(ce.StartError, match="sbatch says: no"):
        supervisor.keep(scheduler, 3)
    assert stop(supervisor) == "" and scheduler.log == ["start 0", "stop"]


def test_a_scheduler_that_gives_no_answer_is_told_once_and_again_when_it_does(supervisor, scheduler, events, caplog):
    scheduler.failure = ce.StartError("Kubernetes cannot be reached: object at 0x7f01, port 1234")
    wait_for(lambda: len(events()) == 1)
    scheduler.failure = ce.StartError("Kubernetes cannot be reached: object at 0x7fab, port 1235")
    looks = scheduler.look
    seen = threading.Semaphore(0)
    scheduler.look = lambda: (seen.release(), looks())[1]
    assert seen.acquire(timeout=10) and seen.acquire(timeout=10)
    assert len(events()) == 1, "the same state, in other numbers"
    scheduler.failure = ce.StartError("Kubernetes says: Unauthorized")
    wait_for(lambda: len(events()) == 2)
    scheduler.failure = None
    wait_for(lambda: len(events()) == 3)
    assert [event.kind for event in events()] == ["scheduler_lost", "scheduler_lost", "scheduler_back"]

    def told() -> list[str]:
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    wait_for(lambda: len(told()) == 3)  # an event is there before its line in the log
    texts = ("port 1234", "says: Unauthorized", "answers again")
    assert all(text in line for text, line in zip(texts, told(), strict=True)), told()


def test_a_client_that_raises_anything_does_not_end_the_thread(supervisor, scheduler, events):
    scheduler.over = None  # what `look` makes of it is a TypeError
    wait_for(lambda: any("TypeError" in event.reason for event in events()))
    scheduler.over = {0: "ended"}
    wait_for(lambda: supervisor.over == {0: "ended"})
    assert stop(supervisor) == stop(supervisor) == "" and scheduler.log == ["stop"]


@pytest.mark.parametrize("what", ["look", "start", "stop"])
def test_a_call_that_hangs_is_not_waited_for_and_nothing_is_started_after_it(supervisor, scheduler, what):
    scheduler.hangs.add(what)
    supervisor.want(2)
    supervisor.want(3)
    if what != "stop":
        wait_for(lambda: f"{what} hangs" in scheduler.log)
    else:
        wait_for(lambda: "start 3" in scheduler.log)
    start = time.monotonic()
    assert "did not answer" in stop(supervisor, 0.1)
    assert time.monotonic() - start < 5.0
    scheduler.log.clear()
    scheduler.goes_on.set()
    wait_for(lambda: "stop" in scheduler.log)
    assert scheduler.log == (["start 2", "stop"] if what == "start" else ["stop"]), "late, but ended after all"


def test_what_could_not_be_ended_is_told(supervisor, scheduler):
    scheduler.failure = ce.StartError("scancel says: no")
    assert stop(supervisor) == "scancel says: no"
