"""What a collector counts: steps, episodes, and where the workers' time goes. Pure.

Fed by `Collector` with every batch; read by `stats()` and `summary()`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from clusterenv.batch import Rollout

__all__ = ["Tally"]

_RECENT = 100

COUNTED = ("rollouts", "steps", "episodes", "invalid_rows", "dropped_fragments")


class Tally:
    def __init__(self, workers: int) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        self.collecting_s = 0.0  # while workers were at it; in a stream also while the learner worked
        self.waiting_s = 0.0  # of that, what the caller spent in `rollout` or between two batches of a stream
        self.publishing_s = 0.0
        self.considering_s = 0.0  # what the rule needs to know: the drift
        self._worker_s = {"environment": np.zeros(workers), "policy": np.zeros(workers)}
        self._worker_steps = np.zeros(workers, dtype=np.int64)
        self._recent: list[tuple[float, int]] = []  # returns and lengths of the last episodes

    def fragment(self, worker: int, steps: int, env_s: float, policy_s: float) -> None:
        self._worker_s["environment"][worker] += env_s
        self._worker_s["policy"][worker] += policy_s
        self._worker_steps[worker] += steps

    def batch(self, batch: Rollout) -> None:
        counts, valid = self.counts, int(np.count_nonzero(batch.valid))
        counts["rollouts"] += 1
        counts["steps"] += valid
        counts["episodes"] += len(batch.episodes)
        counts["invalid_rows"] += int(batch.valid.size) - valid
        pairs = zip(batch.episodes.returns.tolist(), batch.episodes.lengths.tolist(), strict=True)
        self._recent = [*self._recent, *pairs][-_RECENT:]

    def stats(self) -> dict[str, Any]:
        total, workers = self.collecting_s, len(self._worker_steps)
        waiting = np.maximum(0.0, total - sum(self._worker_s.values()))
        busy = {name: _share(seconds.sum(), total * workers) for name, seconds in self._worker_s.items()}
        return {
            **self.counts,
            "collecting_s": total,
            "waiting_s": self.waiting_s,
            "publishing_s": self.publishing_s,
            "considering_s": self.considering_s,
            "steps_per_s": self.counts["steps"] / total if total else 0.0,
            "worker_steps_per_s": self._worker_steps / total if total else np.zeros(workers),
            "time_shares": {**busy, "waiting": _share(waiting.sum(), total * workers)},
        }

    def recent(self) -> tuple[float, float]:
        """Mean return and length of the last 100 episodes."""
        if not self._recent:
            return float("nan"), float("nan")
        returns, lengths = np.array(self._recent).T
        return float(returns.mean()), float(lengths.mean())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
