"""Find hung workers and slow environments, from the workers' progress, step times and a passed-in clock. Pure."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from clusterenv.engine.collecting.weights import WeightLedger
from clusterenv.engine.instructions import Instruction, Kill, TraceStack
from clusterenv.engine.requests import Requests
from clusterenv.engine.workers import Progress, Workers, WorkerState
from clusterenv.events import Event
from clusterenv.memory.progress import PHASES
from clusterenv.recovery import Recovery

__all__ = ["Health", "PaceWatch", "innermost_line"]

_SLOW_FACTOR = 5.0
_SLOW_S = 0.001
"""Shorter step times are dominated by scheduling noise, not by the environment."""


class Health:
    """Find workers that have something to do and make no progress."""

    def __init__(self, workers: Workers, requests: Requests, weights: WeightLedger, recovery: Recovery) -> None:
        self._workers = workers
        self._requests = requests
        self._weights = weights
        self._recovery = recovery

    def watched(self) -> list[int]:
        """Return the workers to check with `watch`."""
        is_busy = self._requests.is_busy
        return [w.index for w in self._workers if w.state is WorkerState.RUNNING and is_busy(w.index)]

    def watch(self, index: int, at: Progress, now_s: float) -> Instruction | None:
        """Return an instruction to kill a worker that is stuck for too long or, before that, to trace its stack."""
        worker, phase = self._workers[index], PHASES[at[1]]
        if self._weights.is_travelling(index):  # its requests wait on its node, and have not begun
            worker.asked(now_s)
            return None
        stuck_s, (option, limit_s) = worker.stuck_s(at, now_s), self._recovery.timeout_of(phase)
        if limit_s is not None and stuck_s > limit_s:
            worker.killed(f"hung for {stuck_s:.1f} s ({option}={limit_s})")
            return Kill(index)
        return TraceStack(index) if at[0] >= 0 and worker.is_warning_due(stuck_s) else None

    def trace(self, index: int) -> Instruction:
        """Return the instruction to trace the stack of a worker, on a user's request."""
        self._workers[index].is_stack_wanted = True
        return TraceStack(index)

    def long_call(self, index: int, stack: str, at: Progress, now_s: float) -> Event | None:
        """Return a warning about a worker's long call; `stack` shows where it is. None: the call has ended, or the
        stack was not requested. A stack that a user wanted is an event in any case."""
        slot, phase, _ = at
        worker = self._workers[index]
        stuck_s, is_traced, worker.is_traced = worker.stuck_s(at, now_s), worker.is_traced, False
        option, limit_s = self._recovery.timeout_of(PHASES[phase])
        if worker.is_stack_wanted:
            worker.is_stack_wanted = False
            reason = f"worker {index} is at {innermost_line(stack) or 'an unknown line'}"
            return Event("stack", reason, (slot,) if slot >= 0 else (), index, PHASES[phase], detail=stack)
        if stuck_s == 0.0 or not is_traced:
            return None
        limit = "no limit" if limit_s is None else f"{option}={limit_s:g}"
        place = innermost_line(stack)
        reason = f"worker {index} has been in one call for {stuck_s:.0f} s ({limit}){' at ' * bool(place)}{place}"
        return Event("long_call", reason, (slot,), index, PHASES[phase], detail=stack)


def innermost_line(stack: str) -> str:
    """Return the current line of the main thread in a faulthandler text, e.g. "env.py:12 in step"; empty if none."""
    _, _, current = stack.partition("Current thread ")
    found = re.search(r'File "(.*)", line (\d+) in (.*)', current)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else ""


class PaceWatch:
    """Report environments that are much slower than the others, without treating them as failed."""

    def __init__(self) -> None:
        self.slow: set[int] = set()

    def newly_slow(self, pace_s: Any) -> list[tuple[int, str]]:
        """Return (slot, reason) of those that are slow now and were not before; `pace_s` [N], 0: not measured."""
        known = pace_s > 0
        if known.sum() < 3:
            return []
        median = float(np.median(pace_s[known]))
        self.slow = {slot for slot in self.slow if pace_s[slot] > max(_SLOW_FACTOR / 2 * median, _SLOW_S / 2)}
        found = []
        for slot in np.flatnonzero(pace_s > max(_SLOW_FACTOR * median, _SLOW_S)).tolist():
            if slot not in self.slow:
                self.slow.add(slot)
                times = pace_s[slot] / median
                found.append((slot, f"a step takes {pace_s[slot] * 1000:.2f} ms, {times:.0f}x the median"))
        return found
