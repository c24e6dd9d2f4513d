"""Run one fragment on a worker: what is the same for environments stepped one by one and for a vector environment.

Enters: `RunFragment`. Leaves: rows in the arena and a `FragmentResult`. `act_and_step.py` and `vector_fragment.py` do
the stepping.
"""

from __future__ import annotations

import mmap
import time
import traceback
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.wire.requests import Reply, RunFragment
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.fragment import Bad, FragmentColumns, RunningFragment
from clusterenv.worker.policy import WorkerPolicy, policy_failed
from clusterenv.worker.vector_env import VectorGroup

__all__ = ["FragmentLoop", "note_policy_error"]

_UNKNOWN = -(1 << 40)
"""Initial step count of an episode whose beginning the user stepped: it never equals the episode's length."""


class FragmentLoop(ABC):
    """One per worker, beside its environments and its `WorkerPolicy`."""

    def __init__(self, group: EnvGroup | VectorGroup, policy: WorkerPolicy, observation_space: Any) -> None:
        self._of = group
        self._policy = policy
        self._space = observation_space
        count = len(group.slots)
        self._returns = np.zeros(count)
        self._counted = np.zeros(count, dtype=np.int64)  # steps summed in `_returns`
        self._tail: list[Any] | None = None  # the observations after the last fragment

    def map_arena(self, layout: ArenaLayout, memory: mmap.mmap) -> None:
        self._arena = Arena(layout, memory)
        self._columns: dict[int, FragmentColumns] = {}  # by side, of the last fragment there

    def run(self, request: RunFragment) -> Reply:
        """Run one fragment and return its answer."""
        if self._policy.actor is None:  # requested before the head learned that the policy could not be built
            return policy_failed(request.request, "there is no policy on a worker", PolicyError("it was not built"))
        group, policy = self._of, self._policy
        columns = self._columns.get(request.side)
        if columns is None or len(columns.valid) != request.num_steps:
            side, leaves = self._arena.sides[request.side], group.buffers.layout.obs
            columns = FragmentColumns(side, group.rows, request.num_steps, self._space, leaves)
            self._columns[request.side] = columns
        run = RunningFragment(columns, self._space, group, policy, request)
        columns.clear()
        self._fill_first_row(run)
        self._begin(run)
        self._play(run)
        self._score(run)
        group.has_played(run.lengths)
        finals = run.pack_finals()
        bad = columns.find_bad(run.done, finals) if group.check else {}
        if bad:
            self._lose_bad(run, bad)
            finals = run.pack_finals()
        self._tail = [leaf[run.done].copy() for leaf in columns.obs]  # without the bad values, which were replaced
        missing = run.watch.episode_ended() if run.watch is not None and run.any_ended else None
        result = run.result(policy.version, finals, self._pace_s(), self._over())
        return Reply(request.request, group.slots, missing, faults=run.faults, result=result)

    @abstractmethod
    def _begin(self, run: RunningFragment) -> None:
        """Reset what has ended: row 0 has the first observation of a new episode, or the last one of a running one."""

    @abstractmethod
    def _play(self, run: RunningFragment) -> None:
        """Act and step until the fragment is full, the node has to leave, or the policy fails."""

    @abstractmethod
    def _lose_bad(self, run: RunningFragment, bad: Bad) -> None:
        """Lose each of these columns from its first unusable value on."""

    def _pace_s(self) -> Any:
        """Return how long a step of each environment takes, [K] float32; None if it was not measured."""
        return None

    def _over(self) -> Any:
        """Return which environments of a vector environment are still to be reset, [K]; None: none."""
        group = self._of
        return group.over.copy() if isinstance(group, VectorGroup) and group.over.any() else None

    def _fill_first_row(self, run: RunningFragment) -> None:
        """Fill row 0 with the last observations that the user, or the last fragment, saw."""
        group, first = self._of, self._of.slots[0]
        buffers = group.buffers
        sides = buffers.side[group.rows]
        for i, (out, shared) in enumerate(zip(run.columns.obs, buffers.obs, strict=True)):
            if group.moved is None or self._tail is None:
                out[0] = shared[sides, np.arange(first, first + len(group.slots))]
            else:  # a stream's next fragment begins before the head has seen the last one
                out[0] = self._tail[i]
                for slot in group.moved:
                    out[0, slot - first] = shared[sides[slot - first], slot]
        run.was_stepped = group.moved is None
        group.moved = set()

    def _continue_episode(self, run: RunningFragment, k: int) -> None:
        """Count the return of an episode that began before this fragment."""
        if run.lengths[k] == 0:
            self._returns[k] = self._counted[k] = 0
        elif run.was_stepped:
            self._counted[k] = _UNKNOWN

    def _end_episode(self, run: RunningFragment, t: int, k: int, info: dict[str, Any]) -> None:
        own = info.get("episode")
        if isinstance(own, dict) and "r" in own and "l" in own:
            run.episodes.append((t, k, float(np.ravel(own["r"])[0]), int(np.ravel(own["l"])[0]), info))
        elif self._counted[k] == run.lengths[k]:  # else the user stepped its beginning, which is not known
            run.episodes.append((t, k, float(self._returns[k]), int(run.lengths[k]), info))
        self._returns[k] = self._counted[k] = run.lengths[k] = 0

    def _score(self, run: RunningFragment) -> None:
        """Compute the whole fragment's log-probabilities: one call of each numpy function instead of one per step."""
        begin, done, columns = time.perf_counter(), run.done, run.columns
        steps, count = done, len(self._of.slots)
        values = (run.params[:done], run.noise[:done], columns.actions[:done])
        rows = [value.reshape(steps * count, *value.shape[2:]) for value in values]
        scores = self._policy.family.score(rows[0], rows[1], rows[2], run.knobs)
        columns.logprobs[:done] = scores.reshape(steps, count)
        run.policy_s += time.perf_counter() - begin


def note_policy_error(run: RunningFragment, error: Exception) -> None:
    """Keep an exception of the user's policy for the head, which raises it."""
    run.policy_error = (f"{type(error).__name__}: {error}", traceback.format_exc())
