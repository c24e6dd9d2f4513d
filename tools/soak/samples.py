"""Sample memory, descriptors and threads of head and node agents once a second; judge, write and draw the samples."""

from __future__ import annotations

import csv
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["GROWTH", "Sample", "Sampler", "draw", "growth", "judge", "write"]


class Sample(NamedTuple):
    """One sample; values of agents are the largest among them."""

    time_s: float
    head_mib: float
    head_fds: int
    head_threads: int
    agents: int
    agent_mib: float
    agent_fds: int
    agent_threads: int
    rows: int
    """Rows that the learner has got so far."""


GROWTH = {"head_mib": 32.0, "head_fds": 24.0, "head_threads": 12.0}
GROWTH |= {"agent_mib": 32.0, "agent_fds": 24.0, "agent_threads": 12.0}
"""Allowed growth from the second eighth of the run to the last."""


class Sampler(threading.Thread):
    """Samples until `stop()`."""

    def __init__(self) -> None:
        super().__init__(name="sampler", daemon=True)
        self.samples: list[Sample] = []
        self.rows = 0
        self._over = threading.Event()
        self._head = psutil.Process()

    def run(self) -> None:
        begin = time.monotonic()
        while not self._over.wait(1.0):
            self.samples.append(self._sample(time.monotonic() - begin))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _sample(self, now_s: float) -> Sample:
        agents = [found for child in self._head.children() if (found := _look(child, "--join")) is not None]
        head = _look(self._head)
        assert head is not None
        largest = [max((agent[i] for agent in agents), default=0) for i in range(3)]
        return Sample(now_s, *head, len(agents), largest[0], int(largest[1]), int(largest[2]), self.rows)


def _look(process: psutil.Process, word: str | None = None) -> tuple[float, int, int] | None:
    """Return MiB, descriptors and threads of a process; None if it is gone or its command line lacks `word`."""
    try:
        with process.oneshot():
            if word is not None and word not in process.cmdline():
                return None
            return process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
    except psutil.Error:
        return None


def growth(samples: Sequence[Sample], name: str) -> float:
    """Return the median of the last eighth minus that of the second, which leaves out the start."""
    eighth = max(1, len(samples) // 8)
    values = [float(getattr(sample, name)) for sample in samples]
    return statistics.median(values[-eighth:]) - statistics.median(values[eighth : 2 * eighth] or values[:1])


def judge(samples: Sequence[Sample]) -> list[str]:
    """Return a line for each value that grew by more than allowed."""
    grown = {name: growth(samples, name) for name in GROWTH} if len(samples) >= 16 else {}
    return [f"{name} grew by {by:.1f}, more than {GROWTH[name]:g}" for name, by in grown.items() if by > GROWTH[name]]


def write(samples: Sequence[Sample], path: Path) -> None:
    """Write the samples as comma-separated values."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(Sample._fields)
        rows.writerows([f"{value:.2f}" if isinstance(value, float) else value for value in row] for row in samples)


def draw(samples: Sequence[Sample], faults_s: Sequence[float], path: Path) -> None:
    """Draw memory, descriptors and threads over time; ticks at the bottom are faults."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [sample.time_s / 60 for sample in samples]
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 2.6), layout="constrained")
    for axis, (title, name) in zip(axes, (("MiB", "mib"), ("descriptors", "fds"), ("threads", "threads")), strict=True):
        for who, label in (("head", "head"), ("agent", "largest node agent")):
            axis.plot(minutes, [getattr(sample, f"{who}_{name}") for sample in samples], linewidth=0.8, label=label)
        axis.plot([at / 60 for at in faults_s], [0] * len(faults_s), "|", color="0.6", markersize=4)
        axis.set(title=title, xlabel="minutes", ylim=(0, None))
    axes[0].legend(fontsize=7)
    figure.savefig(path)
    pyplot.close(figure)
