"""The state of one running fragment: its columns, what is collected beside them, its drift sample, its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.memory.fragments import FragmentArrays, Side
from clusterenv.memory.rows import Leaf, assemble, blocks_of, coerce, flatten
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.rollout import map_arrays, to_numpy
from clusterenv.wire.requests import DriftSamples, Fault, Finals, FragmentResult, RunFragment
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.policy import WorkerPolicy
from clusterenv.worker.vector_env import VectorGroup

__all__ = ["Bad", "FragmentColumns", "RunningFragment"]

Bad = dict[int, tuple[int, str, bool]]
"""Column → (first step with an unusable value, why, whether it is the observation after that step)."""


class RunningFragment:
    """Collect one fragment. Made by `FragmentLoop` for each request; `result` is sent to the head."""

    def __init__(
        self,
        columns: FragmentColumns,
        space: Any,
        group: EnvGroup | VectorGroup,
        policy: WorkerPolicy,
        request: RunFragment,
    ) -> None:
        slots, family, num_steps = group.slots, policy.family, request.num_steps
        self._space, self._leaves = space, group.buffers.layout.obs
        self.columns = columns
        self.lengths = group.lengths()
        """Steps of the running episodes so far."""
        self._first_lengths = self.lengths.copy()  # before row 0
        self._initial_state = _first_rows(policy.state, len(slots))
        self.noise = policy.streams.draw(slots, request.incarnations, num_steps, family.noise, family.noise_size)
        self._picked = _pick(policy.streams, slots, request)
        self.params = np.empty((num_steps, len(slots), family.num_params), dtype=np.float32)
        self.knobs = request.knobs
        self.watch = policy.watch or None
        self.played: Any = None  # [K], rows of each column, if they are not all `done`
        self.lost: set[int] = set()  # columns whose environment was lost, if others continue
        self.was_stepped = False  # by the user, since the last fragment
        self.done = 0
        self.env_s = self.policy_s = 0.0
        self.policy_error: tuple[str, str] | None = None
        self.any_ended = False
        self.finals: list[tuple[int, int, Any]] = []
        self.episodes: list[tuple[int, int, float, int, dict[str, Any]]] = []
        self._infos: dict[str, list[tuple[int, int, Any]]] = {}
        self.faults: list[Fault] = []
        self.failed: set[int] = set()

    def begin_again(self, k: int) -> None:
        """Note that row 0 of this column is the first of an episode."""
        self.lengths[k] = self._first_lengths[k] = 0

    def note_infos(self, t: int, k: int, info: dict[str, Any], keys: tuple[str, ...]) -> None:
        for key in keys:
            if key in info:
                self._infos.setdefault(key, []).append((t, k, info[key]))

    def call(self, t: int, k: int, is_after: bool) -> int:
        """Return the number of row t's `step` call in its episode; 0 if the observation after it is from a reset."""
        columns = self.columns
        if is_after and (columns.terminations[t, k] or columns.truncations[t, k]):
            return 0
        starts = np.flatnonzero(columns.starts[: t + 1, k])
        return t + 1 - int(starts[-1]) if len(starts) else t + 1 + int(self._first_lengths[k])

    def drop_after(self, t: int, k: int) -> None:
        self.finals = [item for item in self.finals if item[1] != k or item[0] < t]
        self.episodes = [item for item in self.episodes if item[1] != k or item[0] < t]

    def _samples(self) -> DriftSamples | None:
        """Return the drift sample: the policy's outputs for the states chosen in advance, where they were reached."""
        if self._picked is None:
            return None
        t, k = self._picked
        reached = t < (self.done if self.played is None else self.played[k])
        if not reached.any():
            return None
        return DriftSamples(t[reached], k[reached], self.params[t[reached], k[reached]])

    def pack_finals(self) -> Finals:
        return _pack_finals(self.finals, self._space, self._leaves)

    def result(self, version: int, finals: Finals, pace_s: Any, over: Any) -> FragmentResult:
        return FragmentResult(
            self.done,
            version,
            finals,
            self.episodes,
            self._infos,
            self._initial_state,
            self.policy_error,
            self._samples(),
            self.env_s,
            self.policy_s,
            pace_s,
            at_start=self.lengths == 0 if over is None else (self.lengths == 0) & ~over,
            over=over,
        )


class FragmentColumns(FragmentArrays):
    """This worker's columns of one side of the arena."""

    def __init__(self, side: Side, rows: slice, num_steps: int, space: Any, leaves: tuple[Leaf, ...]) -> None:
        super().__init__(side.specs, side.part(num_steps, rows))
        self.side, self.first = side, rows.start
        self._space = space
        self._leaves = leaves
        self._nested = len(leaves) != 1 or bool(leaves[0].path)
        self.blocks = blocks_of(leaves, self.obs[0])  # [T + 1, ...], for `write_block`
        self.shapes = [leaves[0].shape] * self.obs[0].shape[1]

    def clear(self) -> None:
        for array in (self.terminations, self.truncations, self.starts):
            array.fill(False)
        self.valid.fill(True)

    def obs_at(self, t: int) -> Any:
        """Return views of row t, [K, ...], in the structure of the space."""
        if not self._nested:
            return self.obs[0][t]
        return assemble(self._space, iter([leaf[t] for leaf in self.obs]))

    def row(self, t: int, k: int) -> Any:
        return assemble(self._space, iter([leaf[t, k].copy() for leaf in self.obs]))

    def check_shape(self, obs: Any) -> None:
        """Raise if an episode's last observation does not fit the space: it is kept beside the rows."""
        if (
            self.blocks is None
            or obs.__class__ is not np.ndarray
            or obs.shape != self.shapes[0]
            or obs.dtype != self.blocks.dtype
        ):
            for leaf, value in zip(self._leaves, flatten(self._space, obs), strict=True):
                coerce(value, leaf, "observation")

    def write_row(self, t: int, k: int, obs: Any) -> None:
        for out, leaf, value in zip(self.obs, self._leaves, flatten(self._space, obs), strict=True):
            out[t, k] = coerce(value, leaf, "observation")

    def check_row(self, t: int, k: int) -> None:
        """Raise ValueError for an observation that is not finite or outside its bounds."""
        for leaf, values in zip(self._leaves, self.obs, strict=True):
            if leaf.unusable(values[t, k]) is not None:
                raise ValueError(leaf.problem(values[t, k]))

    def frozen(self, t: int, k: int) -> Callable[[Any], Any]:
        """Return a stand-in for the step of an environment that is gone: it repeats the last observation."""
        obs = self.row(t, k)
        return lambda action: (obs, 0.0, False, False, {})

    def find_bad(self, done: int, finals: Finals | None = None) -> Bad:
        """Return the columns with unusable values in the first `done` steps, and in the last observations given."""
        bad: Bad = {}

        def note(t: int, k: int, what: str, is_after: bool) -> None:
            if self.valid[t, k] and (k not in bad or bad[k][0] > t):
                bad[k] = (t, what, is_after)

        for leaf, values in zip(self._leaves, self.obs, strict=True):
            after = values[1 : done + 1]
            unusable = leaf.unusable(after)  # [done, K]
            for t, k in () if unusable is None else np.argwhere(unusable).tolist():
                note(t, k, leaf.problem(after[t, k]), True)
        finite = np.isfinite(self.rewards[:done])
        for t, k in () if finite.all() else np.argwhere(~finite).tolist():
            note(t, k, "reward is not finite", False)
        if finals is not None:
            for leaf, values in zip(self._leaves, finals.leaves, strict=True):
                unusable = leaf.unusable(values)  # [number of finals]
                for i in () if unusable is None else np.flatnonzero(unusable).tolist():
                    text = f"at the end of the episode, {leaf.problem(values[i])}"
                    note(int(finals.t[i]), int(finals.columns[i]), text, False)
        return bad


def _pick(streams: Streams, slots: list[int], request: RunFragment) -> tuple[Any, Any] | None:
    """Choose the states of the drift sample by each slot's own random stream; return their (t, column), by t."""
    if not request.sample_every:
        return None
    within = min(request.num_steps, request.sample_within or request.num_steps)
    states = streams.pick(slots, request.incarnations, within, request.sample_every)
    types = [np.min_scalar_type(limit) for limit in (request.num_steps, len(slots))]  # small: they are sent
    t, k = (np.array(values, dtype) for values, dtype in zip(zip(*states, strict=True), types, strict=True))
    return t, k


def _pack_finals(finals: list[tuple[int, int, Any]], space: Any, leaves: tuple[Leaf, ...]) -> Finals:
    """Pack them as one array per leaf: hundreds of small arrays would take long to pickle."""
    if len({(t, k) for t, k, _ in finals}) < len(finals):  # an environment that failed after its episode had ended
        finals = list({(t, k): (t, k, obs) for t, k, obs in finals}.values())
    if len(leaves) == 1 and not leaves[0].path:
        columns = [[obs for _, _, obs in finals]]
    else:
        columns = [list(values) for values in zip(*(flatten(space, obs) for _, _, obs in finals), strict=True)]
    arrays = [
        np.array(values, dtype=leaf.dtype).reshape(-1, *leaf.shape)
        for leaf, values in zip(leaves, columns or [[] for _ in leaves], strict=True)
    ]
    t = np.array([t for t, _, _ in finals], dtype=np.int64)
    return Finals(t, np.array([k for _, k, _ in finals], dtype=np.int64), arrays)


def _first_rows(state: Any, rows: int) -> Any:
    return map_arrays(lambda value: np.array(to_numpy(value[:rows])), state)
