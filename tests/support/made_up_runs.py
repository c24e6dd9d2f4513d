"""Made-up runs for the doctor's tests: healthy ones of several shapes with noise, and ways to put a fault into one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from clusterenv.monitor.doctor.diagnose import diagnose
from clusterenv.monitor.doctor.findings import Cause, Finding
from clusterenv.monitor.doctor.here import Here, ProcessSample
from clusterenv.monitor.sample import (
    EventRecord,
    FragmentRecord,
    HostSample,
    NodeSample,
    Point,
    RunInfo,
    Sample,
    WorkerSample,
)

NOW = 1_700_000_000.0
STEP_S, POLICY_S = 0.0004, 0.0002
LENGTH = 128


@dataclass
class Run:
    """A run whose parts a fault changes; `findings()` diagnoses it."""

    samples: list[Sample]
    fragments: list[FragmentRecord]
    events: list[EventRecord] = field(default_factory=list)
    here: Here | None = None
    info: RunInfo = field(
        default_factory=lambda: RunInfo("run", "CartPole-v1", 8, "Local", "head", 100, "train.py", NOW - 300, "0.1.0")
    )

    def findings(self) -> list[Finding]:
        return diagnose(self.info, self.samples, self.events, self.fragments, self.here)

    def causes(self) -> list[tuple[Cause, str]]:
        return [(finding.cause, str(finding.subject)) for finding in self.findings()]

    # -- changes ----------------------------------------------------------------------------------------------

    def each(self, change: Callable[[float, Sample], Sample]) -> None:
        """Change every sample, given its age in seconds."""
        last = self.samples[-1].point.time_s
        self.samples = [change(last - sample.point.time_s, sample) for sample in self.samples]

    def worker(self, index: int, since_s: float = 1e9, **fields: Any) -> None:
        """Change a worker in the samples of the last `since_s` seconds; a function gets the sample's age."""

        def change(age_s: float, sample: Sample) -> Sample:
            if age_s > since_s:
                return sample
            values = {name: value(age_s) if callable(value) else value for name, value in fields.items()}
            return replace(sample, workers=[replace(w, **values) if w.worker == index else w for w in sample.workers])

        self.each(change)

    def node(self, index: int, **fields: Any) -> None:
        def change(age_s: float, sample: Sample) -> Sample:
            values = {name: value(age_s) if callable(value) else value for name, value in fields.items()}
            return replace(sample, nodes=[replace(n, **values) if n.node == index else n for n in sample.nodes])

        self.each(change)

    def host(self, index: int, **fields: Any) -> None:
        hosts = {n.node: n.host for n in self.samples[-1].nodes}
        self.node(index, host=replace(hosts[index], **fields))

    def point(self, **fields: Any) -> None:
        def change(age_s: float, sample: Sample) -> Sample:
            values = {name: value(age_s) if callable(value) else value for name, value in fields.items()}
            return replace(sample, point=replace(sample.point, **values))

        self.each(change)

    def slot(self, slot: int, step_s: float) -> None:
        """Let the steps of one slot take longer, in its step time and its worker's fragments."""

        def change(_: float, sample: Sample) -> Sample:
            return replace(sample, step_s=[step_s if s == slot else value for s, value in enumerate(sample.step_s)])

        worker = next(w.worker for w in self.samples[-1].workers if w.slots[0] <= slot <= w.slots[1])
        extra_s = step_s - self.samples[-1].step_s[slot]
        self.each(change)
        self.slower(worker, lambda f: replace(f, environment_s=f.environment_s + extra_s * f.num_steps))

    def slower(self, worker: int, change: Callable[[FragmentRecord], FragmentRecord]) -> None:
        self.fragments = [change(f) if f.worker == worker else f for f in self.fragments]

    def event(self, kind: str, reason: str, age_s: float = 5.0, **fields: Any) -> None:
        self.events.append(EventRecord(len(self.events), kind, reason, NOW - age_s, **fields))

    def process(self, worker: int, **fields: Any) -> None:
        if self.here is None:
            workers = self.samples[-1].workers
            processes = {w.worker: ProcessSample(200 + w.worker, "S", 0.6, 0.02) for w in workers}
            self.here = Here(8, 3.0, 2.8, [], ProcessSample(100, "S", 0.3, 0.0), processes)
        own = replace(self.here.workers[worker], **fields)
        self.here = replace(self.here, workers={**self.here.workers, worker: own})


def healthy(
    shape: str = "rollout", nodes: int = 1, workers: int = 4, slots: int = 2, seconds: int = 30, seed: int = 0
) -> Run:
    """Return a healthy run: "rollout", "stream", "prefetch", "learner" (mostly learning) or "step" (no collector).

    More than one node: they are joined over a network.
    """
    noise = random.Random(seed)

    def about(value: float, spread: float = 0.3) -> float:
        return value * noise.uniform(1 - spread, 1 + spread)

    collects, total = shape != "step", nodes * workers
    calls = {"rollout": ("rollout", "rollout", ""), "stream": ("stream", ""), "prefetch": ("rollout", "")}
    chosen = {**calls, "learner": ("", "rollout", "", ""), "step": ("step", "")}[shape]
    overlaps = shape in ("stream", "prefetch")
    samples, fragments = [], []
    for second in range(seconds):
        at_s, call = NOW - seconds + 1 + second, noise.choice(chosen)
        shares = {"environment": about(0.6), "policy": about(0.2), "waiting": about(0.15)}
        processes = []
        for index in range(total):
            is_busy = bool(call) if not overlaps else True
            processes.append(
                WorkerSample(
                    index,
                    index // workers,
                    (index * slots, index * slots + slots - 1),
                    "running",
                    200 + index if nodes == 1 else None,
                    noise.randrange(index * slots, index * slots + slots),
                    noise.choice(
                        ["step", "step", "step", "policy", "reset"] if second % 7 == 0 else ["step", "policy"]
                    ),
                    about(0.2, 0.9) if is_busy else 0.0,
                    is_busy,
                    about(STEP_S * slots + POLICY_S) if collects else None,
                    about(2000.0) if collects else None,
                    **(shares if collects else {}),
                    cpu=about(0.6) if nodes == 1 else None,
                )
            )
        machines = [
            NodeSample(
                n,
                "joined",
                host_name="head" if nodes == 1 else f"m{n}",
                silent_s=about(0.6, 0.5),
                host=HostSample(max(8, 2 * workers), about(0.5), about(float(workers)), 2 << 30, 16 << 30, 0.0, 0.0),
                sent_bytes=0 if nodes == 1 else 1000 + 30_000 * second,
                received_bytes=0 if nodes == 1 else 1000 + 400_000 * second,
                version=second // 2 if collects else None,
                pulls=second // 2 + 1 if collects else 0,
                weight_bytes=0 if nodes == 1 else 20_000 * second,
            )
            for n in range(nodes)
        ]
        point = Point(
            at_s,
            steps=2000 * second,
            steps_per_s=about(2000.0),
            **(shares if collects else {}),
            version=second // 2 + 1 if collects else None,
            held_version=second // 2 if collects else None,
            pulls=second // 2 + 1,
            cpu=about(0.5),
        )
        times = [about(STEP_S) for _ in range(total * slots)]
        samples.append(Sample(point, call, about(0.2), machines, processes, times, [0] * total * slots, [], {}, {}))
        if collects:
            work = {w: (LENGTH * about(STEP_S) * slots, LENGTH * about(POLICY_S)) for w in range(total)}
            fragments += [
                FragmentRecord(
                    w, at_s - 0.3, at_s - 0.3 + sum(work[w]) + about(0.01, 0.9), *work[w], LENGTH, second // 2
                )
                for w in range(total)
            ]
    return Run(samples, fragments)
