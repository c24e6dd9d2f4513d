"""Run a node with a valid key that lies and floods beside three good ones; measure what that costs the good ones.

Windows in which it is asked for one lie after the other alternate with windows in which it behaves; the rows that come
from the good nodes in each are compared. Rows are taken by `stream`, and by `send` and `recv`, in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import clusterenv as ce
from clusterenv.testing import chaos
from clusterenv.testing.chaos import lying
from tools.soak import samples
from tools.soak.places import options, place
from tools.soak.run import RECOVERY, Watchdog

NODES = 4
ENVS_PER_NODE = 2
GOOD = range(ENVS_PER_NODE * (NODES - 1))
"""Slots of the good nodes; the hostile node is the last."""

WINDOW_S = 10.0
PACE_S = 0.005
"""Slow enough that the two sides do not compete for the cores of one test machine."""
STEPS = 32
PATIENCE_S = 30.0
"""Time within which an ended node must join again, honest."""
LIMIT_MIB, LEAST_SHARE = 64.0, 0.9
FLOODS = [("control", name) for name in lying.CONTROL if name not in lying.FOR_GOOD]
LIES = {
    "stream": [("fragments", name) for name in lying.FRAGMENTS] + FLOODS,
    "recv": [("answers", name) for name in lying.ANSWERS] + FLOODS,
}


@dataclass
class Report:
    minutes: float
    where: str
    rows_per_s: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"stream": [], "recv": []})
    """Of the good nodes, in pairs of consecutive windows: without lies, and with lies."""
    share: float = 0.0
    """Median over all pairs of the ratio of the second to the first."""
    shares: dict[str, float] = field(default_factory=dict)
    """The same for `stream` alone, and for `send` and `recv`."""
    head_mib: float = 0.0
    """Peak memory of the head, less its memory after the first window."""
    lies: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    """Reasons for which the hostile node was ended, with counts."""
    unpunished: list[str] = field(default_factory=list)
    """Lies after which the node was not ended."""
    good_lost: int = 0
    """Number of times that a good node was lost."""
    balance: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Hostile:
    """Asks the last node for one lie after the other, each when the node has joined again after the previous one."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, draw = folder, random.Random(seed)
        self._lies = {how: itertools.cycle(draw.sample(lies, len(lies))) for how, lies in LIES.items()}
        self.said: Counter[str] = Counter()
        self.unpunished: list[str] = []
        """Lies after which the node was not ended."""
        self._request = folder / f"lie-{NODES - 1}"
        self._lie: str | None = None
        self._sessions = 0
        """Number of joins when the current lie was requested."""
        self._said_at: float | None = None
        self._next_look = 0.0

    def go_on(self, how: str, count_sessions: Callable[[], int]) -> None:
        """Request another lie, if it is time to; `count_sessions` returns how often nodes have joined so far."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look, sessions = now + 0.1, count_sessions()
        if self._lie is not None and self._said_at is None and self._request.with_suffix(".said").exists():
            self._request.with_suffix(".said").unlink()
            self.said[self._lie] += 1
            self._said_at = now
        if self._said_at is not None:
            if sessions == self._sessions and now - self._said_at < PATIENCE_S:
                return
            if sessions == self._sessions:
                self.unpunished.append(str(self._lie))
            self._lie = self._said_at = None
        if self._lie is None:
            group, name = next(self._lies[how])
            self._lie, self._sessions = f"{group}: {name}", sessions
            lying.ask_lie(self._folder, NODES - 1, group, name)

    def rest(self) -> None:
        """Withdraw a request that was not carried out yet."""
        with contextlib.suppress(FileNotFoundError):
            self._request.unlink()
            self._lie = None


class Good:
    """Takes rows, and counts those of the good nodes."""

    def __init__(self, envs: ce.ClusterEnv, folder: Path, watch: Watchdog) -> None:
        self._envs, self._watch = envs, watch
        self.ledger = chaos.Ledger(folder, envs.num_envs)
        self._collector = envs.collector(
            ce.NumpyPolicy(chaos.logits, {"w": np.zeros(chaos.ACTIONS, np.float32)}, dist="categorical"), seed=1
        )
        self.ledger.reset(envs.reset(seed=1)[0])

    def _sessions(self) -> int:
        """Return how often nodes have joined."""
        return int(self._envs.stats()["events"]["node_joined"])

    def stream(self, end: float, hostile: Hostile | None) -> int:
        """Stream until `end`; return the number of rows of the good nodes."""
        rows, before = 0, self._collector.stats()["dropped_fragments"]
        stream = self._collector.stream(STEPS, timeout_s=60.0)
        while time.monotonic() < end:
            if hostile is not None:
                hostile.go_on("stream", self._sessions)
            with self._watch("stream"):
                batch = next(stream)
            self.ledger.batch(batch, self._envs.events())
            rows += int(batch.valid[:, np.isin(batch.slots, GOOD)].sum())
        with self._watch("leaving a stream"):
            stream.close()
        dropped = self._collector.stats()["dropped_fragments"] - before
        self.ledger.left_stream(STEPS, 2, dropped * STEPS * ENVS_PER_NODE)
        return rows

    def recv(self, end: float, hostile: Hostile | None) -> int:
        """Do the same with `send` and `recv`: step whichever slots are back, so that none waits for another."""
        rows, actions = 0, np.zeros(self._envs.num_envs, np.int64)
        self._envs.send(actions)
        while True:
            if hostile is not None:
                hostile.go_on("recv", self._sessions)
            is_last = time.monotonic() >= end
            with self._watch("recv"):
                result = self._envs.recv(None if is_last else 1, timeout_s=60.0)
            slots = result[4]["slot"]
            self.ledger.step(actions[slots], result, self._envs.events())
            if is_last:  # not counted: rows in flight, some of which may have waited for the hostile node's rebuild
                return rows
            rows += int((slots < len(GOOD)).sum())
            self._envs.send(actions[slots], slots)


@contextlib.contextmanager
def _place() -> Iterator[tuple[str, Any, Path]]:
    if os.geteuid() == 0 and os.environ.get("CLUSTERENV_NO_NETNS") != "1":
        with place(NODES, NODES, True) as found:
            assert found.lies is not None
            yield found.name, found.backend, found.lies
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield "loopback", lying.Lying(NODES, lies=Path(folder), **options(NODES, NODES)), Path(folder)


def run(minutes: float, folder: Path, seed: int = 0) -> Report:
    """Run, and write the report to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with _place() as (where, backend, lies), tempfile.TemporaryDirectory() as counts:
        report = Report(minutes, where)
        sampler, watch = samples.Sampler(), Watchdog(_hung)
        sampler.start()
        try:
            _run(report, backend, Hostile(lies, seed), Path(counts), sampler, watch)
        except Exception as error:
            report.problems.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            sampler.stop()
            watch.stop()
            (folder / "hostile.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def _hung(text: str) -> None:
    print(f"hostile: {text}", flush=True)
    os._exit(3)


def _run(
    report: Report, backend: Any, hostile: Hostile, counts: Path, sampler: samples.Sampler, watch: Watchdog
) -> None:
    num_envs = NODES * ENVS_PER_NODE
    names: list[str] = []
    with ce.ClusterEnv(chaos.numbered(counts, num_envs, PACE_S), backend=backend, recovery=RECOVERY) as envs:
        good = Good(envs, counts, watch)
        good.stream(time.monotonic() + WINDOW_S / 2, None)
        begins_mib = sampler.samples[-1].head_mib if sampler.samples else 0.0
        end, seen = time.monotonic() + report.minutes * 60, 0.0
        for how in itertools.cycle(report.rows_per_s):
            if time.monotonic() >= end:
                break
            pair = [_rate(good, how, None), _rate(good, how, hostile)]
            hostile.rest()
            report.rows_per_s[how].append((pair[0], pair[1]))
            lost = [event for event in envs.events() if event.kind in ("node_lost", "node_unfit")]
            names += [event.reason for event in lost if event.time_s > seen]
            seen = max([seen, *(event.time_s for event in lost)])
        good.recv(time.monotonic() + 2.0, None)
        report.balance = good.ledger.check()._asdict()
    report.head_mib = max(sample.head_mib for sample in sampler.samples) - begins_mib
    ratios = {how: [beside / alone for alone, beside in pairs] for how, pairs in report.rows_per_s.items()}
    report.share = statistics.median(ratio for of_one in ratios.values() for ratio in of_one)
    report.shares = {how: statistics.median(of_one) for how, of_one in ratios.items() if of_one}
    report.lies, report.unpunished = dict(hostile.said), hostile.unpunished
    _count_ends(report, names)


def _rate(good: Good, how: str, hostile: Hostile | None) -> float:
    rows: int = getattr(good, how)(time.monotonic() + WINDOW_S, hostile)
    return rows / WINDOW_S


def _count_ends(report: Report, reasons: list[str]) -> None:
    its_own = [reason for reason in reasons if reason.startswith(f"node {NODES - 1}:")]
    report.good_lost = len(reasons) - len(its_own)
    report.ended = dict(Counter(reason.split(": ", 1)[-1][:160] for reason in its_own).most_common())
    if report.share < LEAST_SHARE:
        report.problems.append(f"the good nodes had {report.share:.3f} of their throughput, less than {LEAST_SHARE}")
    if report.head_mib > LIMIT_MIB:
        report.problems.append(f"the head grew by {report.head_mib:.1f} MiB, more than {LIMIT_MIB:g}")
    if not its_own:
        report.problems.append("the hostile node was never named and ended")
    if report.unpunished:
        report.problems.append(f"not ended after: {', '.join(report.unpunished)}")
    if report.good_lost:
        report.problems.append(f"good nodes were lost {report.good_lost} times")
