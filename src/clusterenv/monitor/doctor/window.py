"""`Window`: samples, events and fragments of the last minute, with the medians and rates that rules ask for. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from clusterenv.monitor.doctor import thresholds as at
from clusterenv.monitor.doctor.here import Here
from clusterenv.monitor.sample import EventRecord, FragmentRecord, NodeSample, RunInfo, Sample, WorkerSample

__all__ = ["Pace", "Window", "bounded", "median"]


class Pace(NamedTuple):
    """What one step of all slots of a worker costs, over its recent fragments."""

    environment_s: float
    policy_s: float
    gap_s: float
    """Median time per fragment between request and arrival that was neither: link, queue, start."""
    work_s: float
    """Median time per fragment in environment and policy."""


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are finite numbers; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def bounded(share: float) -> float:
    """Return a share between 0 and 1: nodes may send any number."""
    return min(1.0, max(0.0, share)) if share == share else 0.0


class Window:
    """Everything that a rule may ask about a run. At least one sample."""

    def __init__(
        self,
        info: RunInfo,
        samples: Sequence[Sample],
        events: Sequence[EventRecord],
        fragments: Sequence[FragmentRecord],
        here: Here | None,
    ) -> None:
        self.info, self.samples, self.events, self.here = info, samples, events, here
        self.last = samples[-1]
        self.now_s = max([self.last.point.time_s, *(event.time_s for event in events[-1:])])
        since_s = self.last.point.time_s - at.RECENT_S
        self.recent = [s for s in samples if s.point.time_s >= since_s] or [self.last]
        if len(self.recent) < at.FEW:
            self.recent = list(samples[-at.FEW :])
        self.fragments = fragments
        self.recent_fragments = [f for f in fragments if f.arrived_at >= since_s] or list(fragments)
        self.workers = {worker.worker: worker for worker in self.last.workers}
        self.nodes = {node.node: node for node in self.last.nodes}
        self.paces = self._paces()

    # -- series -----------------------------------------------------------------------------------------------

    def of_worker(self, worker: int, samples: Sequence[Sample] | None = None) -> list[WorkerSample]:
        """Return the recent samples of a worker, oldest first."""
        return [w for s in samples or self.recent for w in s.workers if w.worker == worker]

    def of_node(self, node: int, samples: Sequence[Sample] | None = None) -> list[NodeSample]:
        return [n for s in samples or self.recent for n in s.nodes if n.node == node]

    def of_host(self, node: int, value: Callable[[NodeSample], float | None]) -> float | None:
        """Return the median over the recent samples of a number of a node's machine."""
        return median(value(n) for n in self.of_node(node) if n.host is not None)

    def worker_median(self, worker: int, value: Callable[[WorkerSample], float | None]) -> float | None:
        return median(value(w) for w in self.of_worker(worker))

    def workers_on(self, node: int) -> list[int]:
        return [w.worker for w in self.workers.values() if w.node == node]

    def step_s(self) -> dict[int, float]:
        """Return the median step time of each slot that was measured."""
        found: dict[int, float] = {}
        for slot in range(len(self.last.step_s)):
            value = median(s.step_s[slot] for s in self.recent if slot < len(s.step_s) and s.step_s[slot] > 0)
            if value is not None:
                found[slot] = value
        return found

    def worker_of(self, slot: int) -> int | None:
        return next((w.worker for w in self.workers.values() if w.slots[0] <= slot <= w.slots[1]), None)

    # -- the script -------------------------------------------------------------------------------------------

    @property
    def is_stream(self) -> bool:
        """Whether the workers do not wait for each other."""
        return next((s.call in ("stream", "recv") for s in reversed(self.samples) if s.call), False)

    @property
    def in_call(self) -> float:
        """Share of the recent samples in which the script was in a call."""
        return sum(bool(s.call) for s in self.recent) / len(self.recent)

    def listened_until(self) -> float:
        """Return the latest time at which the head is known to have read answers: it does so only within calls."""
        times = [s.point.time_s for s in self.samples if s.call and s.call_s > 0]
        times += [f.arrived_at for f in self.fragments]
        return max(times, default=0.0)

    def busy_since(self, worker: WorkerSample) -> float:
        """Return since when a worker has been busy in the same place in every sample; now, if it is not."""
        since_s = self.last.point.time_s
        for sample in reversed(self.samples):
            its = next((w for w in sample.workers if w.worker == worker.worker), None)
            if its is None or not its.is_busy or (its.slot, its.phase) != (worker.slot, worker.phase):
                break
            since_s = sample.point.time_s
        return since_s

    def stepped_at(self) -> float:
        """Return the time of the first sample since which no step was counted."""
        steps, since_s = self.last.point.steps, self.last.point.time_s
        for sample in reversed(self.samples):
            if sample.point.steps != steps:
                break
            since_s = sample.point.time_s
        return since_s

    def lost_by_worker(self, extra: float) -> float:
        """Return what a worker costs that takes `extra` of its time more than the others (1: it does nothing)."""
        extra = min(1.0, max(0.0, extra))
        return extra / max(1, len(self.workers)) if self.is_stream else extra

    # -- fragments --------------------------------------------------------------------------------------------

    def _paces(self) -> dict[int, Pace]:
        before: dict[int, float] = {}
        by_worker: defaultdict[int, list[tuple[FragmentRecord, float]]] = defaultdict(list)
        recent = {id(fragment) for fragment in self.recent_fragments}
        for one in self.fragments:
            # The next fragment may be asked for while this one runs: its own time begins when this one has arrived.
            began = max(one.asked_at, before.get(one.worker, one.asked_at))
            before[one.worker] = one.arrived_at
            if id(one) in recent and one.num_steps > 0:
                by_worker[one.worker].append((one, max(0.0, one.arrived_at - began - one.environment_s - one.policy_s)))
        return {worker: _pace(measured) for worker, measured in by_worker.items()}

    def relative(self, worker: int, value: Callable[[Pace], float]) -> float | None:
        """Return a worker's value per slot against the median of the other workers; None: not comparable."""
        others = [self._per_slot(w, value) for w in self.paces if w != worker and w in self.workers]
        usual, own = median(others), self._per_slot(worker, value) if worker in self.paces else None
        return own / usual if own is not None and usual else None

    def _per_slot(self, worker: int, value: Callable[[Pace], float]) -> float:
        its = self.workers.get(worker)
        return value(self.paces[worker]) / (its.slots[1] - its.slots[0] + 1 if its else 1)

    # -- rates ------------------------------------------------------------------------------------------------

    def growth(self, value: Callable[[Sample], float | None], samples: Sequence[Sample] | None = None) -> float:
        """Return by how much a counter grew over these samples."""
        known = [v for v in map(value, samples or self.samples) if v is not None]
        return max(0.0, known[-1] - known[0]) if known else 0.0

    def span_s(self, samples: Sequence[Sample] | None = None) -> float:
        chosen = samples or self.samples
        return max(0.0, chosen[-1].point.time_s - chosen[0].point.time_s)


def _pace(measured: list[tuple[FragmentRecord, float]]) -> Pace:
    steps = sum(fragment.num_steps for fragment, _ in measured)
    return Pace(
        sum(fragment.environment_s for fragment, _ in measured) / steps,
        sum(fragment.policy_s for fragment, _ in measured) / steps,
        statistics.median(gap for _, gap in measured),
        statistics.median(fragment.environment_s + fragment.policy_s for fragment, _ in measured),
    )
