"""Read what a run's driver knows, once a second, as a `Sample`. Runs in the monitor's thread, and changes nothing.

The caller's thread may change what is read here at any moment: a collection that changes while it is iterated over
raises RuntimeError, and `Probe.sample` tries again.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from typing import Any

import psutil

from clusterenv.driver import Driver
from clusterenv.engine.workers import WorkerState
from clusterenv.events import LOSSES
from clusterenv.memory.progress import PHASES
from clusterenv.monitor.calls import CallWatch
from clusterenv.monitor.sample import EventRecord, FragmentRecord, NodeSample, Point, Sample, WorkerSample
from clusterenv.system.host_load import HostMeter
from clusterenv.system.jobs import own_job

__all__ = ["Probe"]

_TRIES = 10


class Probe:
    """Make the samples of one run."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._meter = HostMeter()
        self._calls = CallWatch(driver)
        self._progress: dict[int, tuple[Any, float]] = {}  # worker → its progress, and since when
        self._processes: dict[int, psutil.Process] = {}  # by pid
        self._before: tuple[float, int] | None = None  # when, and transitions
        self._losses: dict[int, int] = {}  # worker → number of losses
        self._last_loss: dict[int, str] = {}
        self._events_read = 0
        self._offset_s = time.time() - time.monotonic()  # of one moment: fragments are found again by their times
        psutil.cpu_percent()  # counts from here

    def sample(self, is_over: bool = False) -> Sample:
        for _ in range(_TRIES):
            with contextlib.suppress(RuntimeError):  # something changed while it was read
                return self._sample(is_over)
        return self._sample(is_over)

    def _sample(self, is_over: bool) -> Sample:
        driver = self._driver
        stats = driver.stats()
        attached = driver.weights.attached
        collected: dict[str, Any] = {} if attached is None else {**attached.counts.stats(), **attached.stats()}
        call, call_s = ("", 0.0) if is_over else self._calls.look()
        self._note_losses()
        recent = (math.nan, math.nan) if attached is None else attached.counts.recent()
        nodes, workers = self._nodes(collected), self._workers(stats, collected)
        return Sample(
            point=self._point(stats, collected, recent),  # last: a sample that is tried again has one rate, of a second
            call=call,
            call_s=call_s,
            nodes=nodes,
            workers=workers,
            step_s=stats["step_time_s"].astype(float).tolist(),
            incarnations=stats["incarnations"].tolist(),
            slow=list(stats["slow_slots"]),
            last_loss=dict(self._last_loss),
            event_counts=dict(stats["events"]),
            policy={} if attached is None else attached.described,
            is_over=is_over,
        )

    def _point(self, stats: dict[str, Any], collected: dict[str, Any], recent: tuple[float, float]) -> Point:
        now, steps = time.time(), self._driver.rows.transitions
        rate = 0.0
        if self._before is not None and now > self._before[0]:
            rate = max(0.0, (steps - self._before[1]) / (now - self._before[0]))
        self._before = (now, steps)
        shares = collected.get("time_shares", {}) if collected.get("rollouts") else {}
        own = self._process(os.getpid())
        return Point(
            time_s=now,
            steps=steps,
            steps_per_s=rate,
            environment=shares.get("environment"),
            policy=shares.get("policy"),
            waiting=shares.get("waiting"),
            episodes=collected.get("episodes", 0),
            episode_return=_known(recent[0]),
            episode_length=_known(recent[1]),
            version=collected.get("version"),
            held_version=collected.get("held_version"),
            drift=_known(collected.get("drift")),
            drift_se=_known(collected.get("drift_se")),
            threshold=_known(collected.get("threshold")),
            pulls=collected.get("pulls", 0),
            weight_bytes=collected.get("weight_bytes", 0),
            pushed_bytes=collected.get("pushed_bytes", 0),
            fragment_bytes=collected.get("fragment_bytes_sent", 0),
            invalid_rows=collected.get("invalid_rows", 0),
            losses=sum(stats["events"].get(kind, 0) for kind in LOSSES),
            sent_bytes=sum(stats.get("sent_bytes", ())),
            received_bytes=sum(stats.get("received_bytes", ())),
            cpu=psutil.cpu_percent() / 100.0,
            memory=None if own is None else own.memory_info().rss,
        )

    # -- nodes ------------------------------------------------------------------------------------------------

    def _nodes(self, collected: dict[str, Any]) -> list[NodeSample]:
        synced: list[dict[str, Any]] = collected.get("nodes", [])
        nodes = self._driver.executor.nodes
        if nodes is None:
            job = own_job()
            left = None if job.ends_at is None else job.ends_at - time.time()
            here = (job.number, socket.gethostname(), os.getpid(), left)
            return [NodeSample(0, "joined", "", *here, None, self._meter.read(), **_weights_of(synced, 0))]
        samples = []
        for view in nodes.overview():
            left = None if view.ends_at is None else view.ends_at - time.time()
            who = (view.job, view.host_name, view.pid, left, view.silent_s, view.load)
            traffic = (view.sent_bytes, view.received_bytes)
            samples.append(
                NodeSample(view.node, view.state, view.scheduler, *who, *traffic, **_weights_of(synced, view.node))
            )
        return samples

    # -- workers ----------------------------------------------------------------------------------------------

    def _workers(self, stats: dict[str, Any], collected: dict[str, Any]) -> list[WorkerSample]:
        driver, now = self._driver, time.monotonic()
        is_local = driver.executor.nodes is None
        shares = collected.get("worker_shares", {})
        samples = []
        for worker in driver.workers:
            index = worker.index
            pid = stats["worker_pids"][index] if worker.state is WorkerState.RUNNING else None
            progress = driver.executor.progress(index)
            # The same progress in another request is no standstill: short fragments end with the same step.
            requests = tuple(request.number for request in driver.requests.of(index))
            key = (pid, progress, requests, driver.requests.step_all)
            seen = self._progress.get(index)
            if seen is None or seen[0] != key:
                seen = self._progress[index] = (key, now)
            slot, phase, _ = progress
            process = self._process(pid) if is_local and pid is not None else None
            cpu, memory = _usage(process)
            step_s, rate = (float(collected[name][index]) if name in collected else 0.0 for name in _RATES)
            samples.append(
                WorkerSample(
                    worker=index,
                    node=worker.node,
                    slots=(worker.slots[0], worker.slots[-1]),
                    state=_STATES[worker.state],
                    pid=pid,
                    slot=slot if slot >= 0 else None,
                    phase=PHASES[phase] if slot >= 0 else "",
                    stuck_s=now - seen[1],
                    is_busy=driver.requests.is_busy(index),
                    step_s=step_s or None,
                    steps_per_s=rate or None,
                    **{name: float(values[index]) for name, values in shares.items()},
                    losses=self._losses.get(index, 0),
                    cpu=cpu,
                    memory=memory,
                )
            )
        alive = {sample.pid for sample in samples} | {os.getpid()}
        self._processes = {pid: process for pid, process in self._processes.items() if pid in alive}
        return samples

    def _process(self, pid: int) -> psutil.Process | None:
        if pid not in self._processes:
            try:
                self._processes[pid] = psutil.Process(pid)
            except psutil.Error:
                return None
        return self._processes[pid]

    # -- events and fragments ---------------------------------------------------------------------------------

    def _note_losses(self) -> None:
        for event in self.events(self._events_read - 1):
            self._events_read = event.number + 1
            if event.kind in LOSSES:
                for slot in event.slots:
                    self._last_loss[slot] = event.reason
                worker = event.worker
                if worker is None and event.slots:
                    worker = self._driver.workers.of_slot(event.slots[0]).index
                if worker is not None:
                    self._losses[worker] = self._losses.get(worker, 0) + 1

    def events(self, after: int = -1) -> list[EventRecord]:
        """Return the events with higher numbers than this, oldest first."""
        return [
            EventRecord(number, **{name: getattr(event, name) for name in _OF_EVENTS})
            for number, event in self._driver.events.numbered()
            if number > after
        ]

    def fragments(self, after_s: float = 0.0) -> list[FragmentRecord]:
        """Return the fragments that were read later than this Unix time, oldest first."""
        offset = self._offset_s
        return [
            FragmentRecord(done.worker, done.asked_at_s + offset, done.read_at_s + offset, *done[3:])
            for done in self._driver.collecting.fragments.done.copy()
            if done.read_at_s + offset > after_s
        ]


_OF_EVENTS = [field for field in EventRecord.__struct_fields__ if field != "number"]
_RATES = ("worker_step_s", "worker_steps_per_s")
_STATES = {WorkerState.RUNNING: "running", WorkerState.ABSENT: "absent", WorkerState.KILLED: "killed"}


def _weights_of(synced: list[dict[str, Any]], node: int) -> dict[str, Any]:
    if node >= len(synced):
        return {}
    names = ("version", "drift", "drift_se", "pulls", "forms", "weight_bytes", "lags")
    return {name: synced[node][name] for name in names}


def _usage(process: psutil.Process | None) -> tuple[float | None, int | None]:
    if process is None:
        return None, None
    try:
        return process.cpu_percent() / 100.0, process.memory_info().rss
    except psutil.Error:
        return None, None


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
