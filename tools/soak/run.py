"""Run the soak: `step`, `rollout` and `stream` in turn under faults, with every row checked by the ledger."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import clusterenv as ce
from clusterenv.testing import chaos
from tools.soak import samples
from tools.soak.places import HEARTBEAT_S, MOVE_AFTER_S, Place, place

HANG_S = 90.0
"""A call that has not returned after this time counts as hung."""

RECOVERY = ce.Recovery(
    init_timeout_s=30.0,
    reset_timeout_s=30.0,
    step_timeout_s=4.0,
    recovery_timeout_s=60.0,
    max_restarts=1000,
    restart_window_s=600.0,
    backoff_s=(0.05, 1.0),
)
"""`max_restarts` is high because faults hit the same few workers again and again, which is not a crash loop."""

PHASE_S = 10.0
STEPS = 32
"""Steps per fragment."""
QUEUE = 2
PACE_S = 0.002
ENVS_PER_WORKER = 2


@dataclass
class Report:
    """Result of a soak; written as JSON."""

    seed: int
    minutes: float
    where: str
    workers: int
    nodes: int
    every_s: float
    recovery: dict[str, Any] = field(default_factory=lambda: asdict(RECOVERY))
    heartbeat_s: tuple[float, ...] = HEARTBEAT_S
    move_after_s: float = MOVE_AFTER_S
    balance: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    missed: int = 0
    events: dict[str, int] = field(default_factory=dict)
    longest_call_s: dict[str, float] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Watchdog:
    """Calls `on_hang` when a call takes longer than `HANG_S`; records the longest time of each call."""

    def __init__(self, on_hang: Callable[[str], None]) -> None:
        self.longest_s: dict[str, float] = {}
        self._call: tuple[str, float] | None = None
        self._on_hang = on_hang
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        self._call = (what, begin)
        try:
            yield
        finally:
            self._call = None
            self.longest_s[what] = max(self.longest_s.get(what, 0.0), time.monotonic() - begin)

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            call = self._call
            if call is not None and time.monotonic() - call[1] > HANG_S:
                faulthandler.dump_traceback(all_threads=True)
                self._on_hang(f"{call[0]} has not returned for {HANG_S:g} s")


class Learner:
    """Takes rows in each of the three ways; the action of its policy identifies the version."""

    def __init__(self, envs: ce.ClusterEnv, folder: Path, seed: int, watch: Watchdog) -> None:
        self.envs, self.watch = envs, watch
        self.rows: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._actions: dict[int, int] = {}
        self.ledger = chaos.Ledger(folder, envs.num_envs, self._actions.__getitem__)
        self._weights = {"w": np.zeros(chaos.ACTIONS, np.float32)}
        self._policy = ce.NumpyPolicy(chaos.logits, self._weights, dist="categorical")
        self._collector = envs.collector(self._policy, seed=seed)
        self._published = 0

    def reset(self) -> None:
        with self.watch("reset"):
            obs, _ = self.envs.reset(seed=self._draw.getrandbits(31))
        self.ledger.note(self.envs.events())
        self.ledger.reset(obs)

    def publish(self) -> None:
        """Publish new weights, which take another action with probability almost 1."""
        self._published += 1
        action = self._published % chaos.ACTIONS
        self._weights["w"][:] = -1e4
        self._weights["w"][action] = 1e4
        with self.watch("publish"):
            version = self._collector.publish()
        self._actions[version] = action
        self._actions.pop(version - 10_000, None)

    def step(self, until: Callable[[], bool]) -> None:
        while not until():
            actions = np.array([self._draw.randrange(chaos.ACTIONS) for _ in range(self.envs.num_envs)])
            with self.watch("step"):
                result = self.envs.step(actions)
            self.ledger.step(actions, result, self.envs.events())
            self.rows["step"] += len(actions)

    def rollout(self, until: Callable[[], bool]) -> None:
        while not until():
            self.publish()
            with self.watch("rollout"):
                batch = self._collector.rollout(STEPS)
            self._take("rollout", batch)

    def stream(self, until: Callable[[], bool]) -> None:
        before = self._collector.stats()["dropped_fragments"]
        stream = self._collector.stream(STEPS, queue=QUEUE)
        while not until():
            with self.watch("stream"):
                batch = next(stream)
            self._take("stream", batch)
            self.publish()
        with self.watch("leaving a stream"):
            stream.close()
        dropped = self._collector.stats()["dropped_fragments"] - before
        self.ledger.left_stream(STEPS, QUEUE, dropped * STEPS * ENVS_PER_WORKER)

    def _take(self, how: str, batch: ce.Rollout) -> None:
        self.ledger.batch(batch, self.envs.events())
        self.rows[how] += batch.rewards.size


def soak(
    seed: int,
    minutes: float,
    folder: Path,
    *,
    workers: int = 8,
    nodes: int = 3,
    every_s: float = 5.0,
    use_namespaces: bool | None = None,
) -> Report:
    """Run, and write report, samples and plot to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with place(workers, nodes, use_namespaces) as where, tempfile.TemporaryDirectory() as counts:
        report = Report(seed, minutes, where.name, workers, nodes, every_s)
        sampler = samples.Sampler()
        injectors: list[chaos.Injector] = []

        def finish(*problems: str) -> None:
            report.problems += problems
            _write(report, folder, sampler, injectors)

        def hung(text: str) -> None:
            finish(f"hang: {text}")
            print(f"soak: seed {seed}: {text}", file=sys.stderr, flush=True)
            os._exit(3)

        watch = Watchdog(hung)
        sampler.start()
        try:
            _run(report, where, Path(counts), watch, sampler, injectors)
        except Exception as error:
            report.problems.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            sampler.stop()
            watch.stop()
            report.longest_call_s = {name: round(longest, 2) for name, longest in watch.longest_s.items()}
            finish()
    return report


def _run(
    report: Report,
    where: Place,
    counts: Path,
    watch: Watchdog,
    sampler: samples.Sampler,
    injectors: list[chaos.Injector],
) -> None:
    num_envs = report.workers * ENVS_PER_WORKER
    plan = chaos.plan_faults(
        report.seed, report.minutes * 60, num_envs=num_envs, kinds=where.kinds, every_s=report.every_s
    )
    envs = ce.ClusterEnv(chaos.numbered(counts, num_envs, PACE_S), backend=where.backend, recovery=RECOVERY)
    events: deque[str] = deque(maxlen=40)
    try:
        learner = Learner(envs, counts, report.seed, watch)
        learner.reset()
        draw, end = random.Random(report.seed), time.monotonic() + report.minutes * 60
        with chaos.Injector(counts, plan, where.acts(), events.append) as injector:
            injectors.append(injector)
            for call in itertools.cycle((learner.step, learner.rollout, learner.stream)):
                if time.monotonic() >= end:
                    break
                if draw.random() < 0.25:
                    learner.reset()
                if where.backend.max_nodes is not None and draw.random() < 0.25:
                    with watch("scale"):
                        envs.scale(draw.choice((report.nodes, where.backend.max_nodes)))
                call(_Until(min(end, time.monotonic() + PHASE_S), sampler, learner))
        last = time.monotonic() + 5.0
        learner.step(lambda: time.monotonic() > last)  # afterwards every row has come or is lost
        report.balance = learner.ledger.check()._asdict()
        report.rows = dict(learner.rows)
    except BaseException:
        print("the last faults:", *events, "the last events:", *envs.events()[-20:], sep="\n  ", file=sys.stderr)
        raise
    finally:
        report.events = dict(sorted(envs.stats()["events"].items())) if not envs.closed else {}
        with watch("close"):
            envs.close()


class _Until:
    """Returns whether `end` has passed; also updates the sampler's number of rows."""

    def __init__(self, end: float, sampler: samples.Sampler, learner: Learner) -> None:
        self._end, self._sampler, self._learner = end, sampler, learner

    def __call__(self) -> bool:
        self._sampler.rows = sum(self._learner.rows.values())
        return time.monotonic() >= self._end


def _write(report: Report, folder: Path, sampler: samples.Sampler, injectors: list[chaos.Injector]) -> None:
    taken = list(sampler.samples)
    done = [fault for injector in injectors for fault in injector.done]
    report.faults = dict(sorted(Counter(fault.kind.name.lower() for fault in done).items()))
    report.missed = sum(len(injector.missed) for injector in injectors)
    if taken:
        report.growth = {name: round(samples.growth(taken, name), 2) for name in samples.GROWTH}
        report.problems += samples.judge(taken)
        samples.write(taken, folder / "samples.csv")
        samples.draw(taken, [fault.at_s for fault in done], folder / "soak.png")
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
