"""One fragment while it is under way: its columns, what it gathers beside them, its drift sample, its result."""

from __future__ import annotations

from typing import Any

import numpy as np

from clusterenv.memory.fragments import Side
from clusterenv.memory.rows import Leaf, flatten
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.rollout import map_arrays
from clusterenv.wire.requests import DriftSamples, Fault, Finals, FragmentResult, RunFragment
from clusterenv.worker.columns import Columns
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.policy import WorkerPolicy

__all__ = ["Fragment"]


class Fragment:
    """Made when a fragment is asked for; `result` is what travels to the head."""

    def __init__(self, side: Side, space: Any, group: EnvGroup, policy: WorkerPolicy, request: RunFragment) -> None:
        slots, family, num_steps = group.slots, policy.family, request.num_steps
        self._space, self._leaves = space, group.buffers.layout.obs
        self.columns = Columns(side, group.rows, num_steps, space, self._leaves)
        self.steps = list(group.steps)
        """Of environments that are gone, what stands in for their step."""
        self.lengths = np.array([group.clock - began for began in group.began])
        """Steps of the running episodes so far."""
        self._first_lengths = self.lengths.copy()  # before row 0
        self._initial_state = _to_numpy(policy.state, len(slots))
        self.noise = policy.streams.draw(slots, request.incarnations, num_steps, family.noise, family.noise_size)
        self.picked = Picked(policy.streams, slots, request)
        self.params = np.empty((num_steps, len(slots), family.num_params), dtype=np.float32)
        self.knobs = request.knobs
        self.timed_at = group.pace.next_timed(num_steps)
        self.watch = policy.watch or None
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
        """Row 0 of this column is the first of an episode."""
        self.lengths[k] = self._first_lengths[k] = 0

    def note_infos(self, t: int, k: int, info: dict[str, Any], keys: tuple[str, ...]) -> None:
        for key in keys:
            if key in info:
                self._infos.setdefault(key, []).append((t, k, info[key]))

    def call(self, t: int, k: int, is_after: bool) -> int:
        """Number of the `step` call of row t in its episode; 0 where the observation after it is a reset's."""
        columns = self.columns
        if is_after and (columns.terminations[t, k] or columns.truncations[t, k]):
            return 0
        starts = np.flatnonzero(columns.starts[: t + 1, k])
        return t + 1 - int(starts[-1]) if len(starts) else t + 1 + int(self._first_lengths[k])

    def drop_after(self, t: int, k: int) -> None:
        self.finals = [item for item in self.finals if item[1] != k or item[0] < t]
        self.episodes = [item for item in self.episodes if item[1] != k or item[0] < t]

    def pack_finals(self) -> Finals:
        return _pack_finals(self.finals, self._space, self._leaves)

    def result(self, version: int, finals: Finals, pace_s: Any) -> FragmentResult:
        return FragmentResult(
            self.done,
            version,
            finals,
            self.episodes,
            self._infos,
            self._initial_state,
            self.policy_error,
            self.picked.samples(),
            self.env_s,
            self.policy_s,
            pace_s,
        )


class Picked:
    """The drift sample of one fragment: states chosen beforehand, by each slot's own stream."""

    def __init__(self, streams: Streams, slots: list[int], request: RunFragment) -> None:
        states: list[tuple[int, int]] = []
        if request.sample_every:
            within = min(request.num_steps, request.sample_within or request.num_steps)
            states = streams.pick(slots, request.incarnations, within, request.sample_every)
        self._types = [np.min_scalar_type(limit) for limit in (request.num_steps, len(slots))]  # small: they travel
        self._columns_at: dict[int, list[int]] = {}
        for t, k in states:
            self._columns_at.setdefault(t, []).append(k)
        self._order = iter(self._columns_at)
        self.next_t = next(self._order, -1)
        self._params: list[Any] = []

    def take(self, t: int, params: Any) -> None:
        self._params.append(params[self._columns_at[t]])
        self.next_t = next(self._order, -1)

    def samples(self) -> DriftSamples | None:
        if not self._params:
            return None
        taken = list(self._columns_at.items())[: len(self._params)]
        t = np.array([at for at, columns in taken for _ in columns], self._types[0])
        k = np.array([k for _, columns in taken for k in columns], self._types[1])
        return DriftSamples(t, k, np.concatenate(self._params))


def _pack_finals(finals: list[tuple[int, int, Any]], space: Any, leaves: tuple[Leaf, ...]) -> Finals:
    """As one array per leaf: hundreds of small ones would take long to pickle."""
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


def _to_numpy(state: Any, rows: int) -> Any:
    return map_arrays(lambda value: np.array(value[:rows].numpy() if hasattr(value, "numpy") else value[:rows]), state)
