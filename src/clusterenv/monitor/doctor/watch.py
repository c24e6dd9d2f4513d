"""`diagnose_run`: watch a run for a few seconds, on this machine also its processes, and diagnose it."""

from __future__ import annotations

import time

from clusterenv.monitor.doctor.dead_workers import stopped_head
from clusterenv.monitor.doctor.diagnose import diagnose
from clusterenv.monitor.doctor.findings import Finding
from clusterenv.monitor.doctor.probe import Probe, is_here, state_of
from clusterenv.monitor.sample import Sample
from clusterenv.monitor.source import Source

__all__ = ["WATCH_S", "diagnose_run"]

WATCH_S = 8.0
"""Enough samples, of one per second, to tell a condition from a moment."""
_LOOK_S = 0.25
_HISTORY_S = 60.0


def diagnose_run(source: Source, watch_s: float = WATCH_S) -> list[Finding]:
    """Return why a run is slow, stale or dead; an empty list if nothing is wrong. Takes `watch_s` seconds."""
    info = source.info()
    is_near = is_here(info)
    probe: Probe | None = None
    samples: list[Sample] = []
    deadline = time.monotonic() + watch_s
    while True:
        if is_near and (stopped := list(stopped_head(info.pid, state_of(info.pid)))):
            return stopped  # it would not answer
        if is_near and probe is None:
            probe = Probe(info, source.sample())
        sample = source.sample()
        if sample is not None and (not samples or sample.point.time_s > samples[-1].point.time_s):
            samples.append(sample)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or (samples and samples[-1].is_over):
            break
        time.sleep(min(_LOOK_S, left_s))
    here = probe.measure(samples[-1]) if probe is not None and samples else None
    since_s = samples[0].point.time_s - _HISTORY_S if samples else 0.0
    return diagnose(info, samples, source.events(), source.fragments(since_s), here)
