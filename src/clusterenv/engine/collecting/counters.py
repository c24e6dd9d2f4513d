"""Counters of a collector: steps, episodes, and where the workers' time goes. Pure.

`Collection` updates them with every batch; `stats()` and `summary()` read them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from clusterenv.rollout import Rollout

__all__ = ["Counters"]

_RECENT_EPISODES = 100
_RECENT_BATCHES = 32
"""Rates and shares cover this many recent batches, or four per worker if that is more."""

_EVEN = 0.9
"""Workers that are at least this fast, compared with the fastest, get fragments of full length: times vary."""

COUNTED = ("rollouts", "steps", "episodes", "invalid_rows", "dropped_fragments", "late_fragments")


class _Batch(NamedTuple):
    """The time of one batch, and what each worker did for it."""

    collecting_s: float
    steps: int
    worker_steps: Any  # [W]
    environment_s: Any  # [W]
    policy_s: Any  # [W]


class Counters:
    def __init__(self, workers: int) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        self.collecting_s = 0.0  # time in which workers collected; in a stream also while the learner worked
        self.waiting_s = 0.0  # of that, the caller's time in `rollout` or between two batches of a stream
        self.publishing_s = 0.0
        self.considering_s = 0.0  # applying the rule, mostly measuring drift
        self._workers = workers
        self._busy_s = {"environment": 0.0, "policy": 0.0}  # of all workers together
        self._batches: deque[_Batch] = deque(maxlen=max(_RECENT_BATCHES, 4 * workers))
        self._has_first = False  # `_batches` still has the very first batch, in which the workers started
        self._step_s = np.zeros(workers)  # of each worker, for one step of all its slots: smoothed; 0: not known yet
        self._begin_batch()
        self._episodes: deque[tuple[float, int]] = deque(maxlen=_RECENT_EPISODES)  # returns, lengths

    def _begin_batch(self) -> None:
        self._batch = _Batch(0.0, 0, *(np.zeros(self._workers) for _ in range(3)))

    def fragment(self, worker: int, num_steps: int, num_envs: int, env_s: float, policy_s: float) -> None:
        self._batch.environment_s[worker] += env_s
        self._batch.policy_s[worker] += policy_s
        self._batch.worker_steps[worker] += num_steps * num_envs
        if num_steps:
            step_s, before = (env_s + policy_s) / num_steps, self._step_s[worker]
            self._step_s[worker] = (step_s + before) / 2 if before else step_s
        self._busy_s["environment"] += env_s
        self._busy_s["policy"] += policy_s

    def balanced_lengths(self, num_steps: int) -> list[int]:
        """Return for each worker how many of `num_steps` steps it does while the fastest one does all of them."""
        known = self._step_s[self._step_s > 0]
        if not len(known):
            return [num_steps] * self._workers
        shares = known.min() / np.maximum(self._step_s, known.min())
        return [num_steps if share > _EVEN else max(1, round(num_steps * share)) for share in shares.tolist()]

    def batch(self, batch: Rollout, rows: int) -> None:
        """Count a batch of which so many rows were requested."""
        counts, valid = self.counts, int(np.count_nonzero(batch.valid))
        counts["rollouts"] += 1
        counts["steps"] += valid
        counts["episodes"] += len(batch.episodes)
        counts["invalid_rows"] += rows - valid
        self._batch = self._batch._replace(steps=self._batch.steps + valid)
        self._episodes.extend(zip(batch.episodes.returns.tolist(), batch.episodes.lengths.tolist(), strict=True))

    def spent(self, collecting_s: float) -> None:
        """Add the time since the last call, in which the fragments and batches since then were collected."""
        self.collecting_s += collecting_s
        if not self._batch.worker_steps.any():
            return  # after the last batch of a stream
        if not self._batches:
            self._has_first = True
        elif len(self._batches) == self._batches.maxlen or (self._has_first and len(self._batches) == 1):
            self._batches.popleft()
            self._has_first = False
        self._batches.append(self._batch._replace(collecting_s=collecting_s))
        self._begin_batch()

    def stats(self) -> dict[str, Any]:
        """Return totals; `steps_per_s`, `worker_steps_per_s` and `time_shares` cover only the recent batches."""
        workers, batches = self._workers, self._batches
        total = sum(batch.collecting_s for batch in batches)
        environment, policy = (
            sum((getattr(batch, name) for batch in batches), np.zeros(workers))
            for name in ("environment_s", "policy_s")
        )
        waiting = np.maximum(0.0, total - environment - policy)
        shares = {"environment": environment, "policy": policy, "waiting": waiting}
        steps = sum((batch.worker_steps for batch in batches), np.zeros(workers))
        return {
            **self.counts,
            "collecting_s": self.collecting_s,
            "waiting_s": self.waiting_s,
            "publishing_s": self.publishing_s,
            "considering_s": self.considering_s,
            "busy_s": {name: seconds / workers for name, seconds in self._busy_s.items()},
            "steps_per_s": _share(sum(batch.steps for batch in batches), total),
            "worker_step_s": self._step_s.copy(),
            "worker_steps_per_s": steps / total if total else np.zeros(workers),
            "worker_shares": {name: seconds / total if total else seconds for name, seconds in shares.items()},
            "time_shares": {name: _share(seconds.sum(), total * workers) for name, seconds in shares.items()},
        }

    def recent(self) -> tuple[float, float]:
        """Return the mean return and length of the last 100 episodes."""
        if not self._episodes:
            return float("nan"), float("nan")
        returns, lengths = np.array(self._episodes).T
        return float(returns.mean()), float(lengths.mean())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
