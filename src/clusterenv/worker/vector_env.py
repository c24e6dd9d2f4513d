"""Run a worker's slots as one VectorEnv of the user (for example EnvPool); same methods as `EnvGroup`.

There is no per-environment Python here. All slots of the worker step, fail and restart together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from clusterenv.memory.progress import CALL, INIT, RESET, STEP
from clusterenv.memory.rows import Buffers, assemble, bad_rows, coerce, flatten, row_writer
from clusterenv.rollout import to_numpy
from clusterenv.spec import Vector
from clusterenv.wire.infos import Column, Columns, pack, select
from clusterenv.wire.requests import Build, Built, Call, Fault, Rebuild, Reply, Reset, SetAttr, Step, Sticky
from clusterenv.worker.single_env import Caught, close_env, describe

__all__ = ["VectorGroup", "has_rows", "is_mask", "make_vector", "row_of"]


class VectorGroup:
    def __init__(self, vector: Vector, mode: AutoresetMode | None, check: bool, progress: memoryview) -> None:
        self.vector = vector
        self._requested_mode = mode
        self.mode = AutoresetMode.NEXT_STEP  # of the vector environment
        self.resets_some = False  # its ended episodes are reset by `reset_mask`
        self.check = check
        self.at = progress
        self.venv: VectorEnv[Any, Any, Any] | None = None
        self.slots: list[int] = []
        self.first = 0
        self._incarnation = 0
        self.calls: Any = None  # [K], number of the last `step` call in each slot's episode; 0: its reset
        self.over: Any = None  # [K], this slot's episode has ended, and it was not reset yet
        self.moved: set[int] | None = None  # slots reset since the last fragment; None: any may have changed
        self._last_infos: dict[str, Any] = {}  # of the last step or reset of all slots; they may hold action masks
        self._reset_infos: dict[int, dict[str, Any]] = {}  # of slots reset since then

    def build(self, request: Build) -> Built:
        self.slots, self.first = request.slots, request.slots[0]
        self.calls = np.zeros(len(self.slots), dtype=np.int64)
        self.over = np.zeros(len(self.slots), dtype=np.bool_)
        self._incarnation = request.incarnations[0] if request.incarnations else 0
        if not request.make:
            return Built(request.request)
        try:
            self._make(request.seeds, [])
        except Caught as error:
            return Built(request.request, faults=self.fail(INIT, error))
        venv = self.venv
        assert venv is not None
        spaces = (venv.single_observation_space, venv.single_action_space)
        return Built(request.request, *spaces, dict(venv.metadata), venv.render_mode)

    def _make(self, seeds: list[int], stickies: list[list[Sticky]]) -> None:
        self.at[0], self.at[1] = self.slots[0], INIT
        self.venv = make_vector(self.vector, len(self.slots), seeds, stickies)
        mode = self.venv.metadata.get("autoreset_mode")
        if self._requested_mode is not None and mode is not self._requested_mode:
            raise ValueError(
                f"Vector(fn) resets as metadata['autoreset_mode']={mode}, but {self._requested_mode} was requested: "
                "leave autoreset_mode out, or make the vector environment with that mode"
            )
        self.mode = mode if isinstance(mode, AutoresetMode) else AutoresetMode.NEXT_STEP
        can_reset_some = isinstance(self.venv.unwrapped, (SyncVectorEnv, AsyncVectorEnv))  # others do not tell
        self.resets_some = self.mode is AutoresetMode.DISABLED or (
            self.mode is AutoresetMode.NEXT_STEP and can_reset_some
        )

    def attach(self, buffers: Buffers, observation_space: Any, action_space: Any) -> None:
        self.buffers = buffers
        self._space = observation_space
        self.rows = slice(self.slots[0], self.slots[-1] + 1)
        self._write_one = row_writer(observation_space, buffers)

    def step_all(self, request: int) -> Reply | None:
        venv, buffers, rows = self.venv, self.buffers, self.rows
        self.at[0], self.at[1] = self.slots[0], STEP
        try:
            if venv is None:
                raise RuntimeError("this vector environment failed and was not started again")
            blocks = [array[rows].copy() for array in buffers.actions]
            actions = assemble(venv.single_action_space, iter(blocks))
            self.moved = None
            self.calls += 1
            self.calls[self.over] = 0
            obs, *values, infos = venv.step(actions)
            rewards, terminations, truncations = map(to_numpy, values)
            self._refuse_bad_finals(infos)
            sides = self._write(obs)
            buffers.reward[rows] = rewards
            buffers.terminated[rows] = terminations
            buffers.truncated[rows] = truncations
            self._refuse_bad(sides)
            self.over = np.logical_or(terminations, truncations)
            if self.mode is AutoresetMode.SAME_STEP:
                self.calls[self.over] = 0
                self.over[:] = False
            self._last_infos, self._reset_infos = infos, {}
        except Caught as error:
            return Reply(request, self.slots, faults=self.fail(STEP, error))
        if infos:
            return Reply(request, self.slots, self._columns(infos))
        return None

    def step(self, request: Step, flush: Callable[[Reply], None]) -> Reply:
        return self.step_all(request.request) or Reply(request.request, self.slots)

    def reset(self, request: Reset | Rebuild) -> Reply:
        phase = INIT
        try:
            if isinstance(request, Rebuild):
                self.close()
                self._incarnation = request.incarnations[0]
                seeds = [0 if seed is None else seed for seed in request.seeds]
                self._make(seeds, request.stickies)
            phase = RESET
            self.at[0], self.at[1] = self.slots[0], RESET
            venv = self.venv
            if venv is None:
                raise RuntimeError("this vector environment failed and was not started again")
            seed: Any = None if all(seed is None for seed in request.seeds) else list(request.seeds)
            options = request.options
            asked = np.isin(self.slots, request.slots)
            if not asked.all():
                options = {**(options or {}), "reset_mask": asked}
                if seed is not None:
                    seed = [dict(zip(request.slots, request.seeds, strict=True)).get(s) for s in self.slots]
            obs, infos = venv.reset(seed=seed, options=options)
            self.calls[asked], self.over[asked] = 0, False
            if self.moved is not None:
                self.moved.update(request.slots)
            if asked.all():
                self._last_infos, self._reset_infos = infos, {}
            else:
                self._reset_infos |= {slot: row_of(infos, slot - self.first, len(asked)) for slot in request.slots}
            sides = self._write(obs)
            self.buffers.reward[request.slots] = 0.0
            self.buffers.terminated[request.slots] = False
            self.buffers.truncated[request.slots] = False
            self._refuse_bad(sides)
        except Caught as error:
            return Reply(request.request, request.slots, faults=self.fail(phase, error))
        columns = self._columns(infos) if infos else None
        if columns and len(request.slots) < len(self.slots):
            columns = select(columns, {slot: slot for slot in request.slots})
        return Reply(request.request, request.slots, columns or None)

    def call(self, request: Call | SetAttr) -> Reply:
        venv: Any = self.venv
        self.at[0], self.at[1] = self.slots[0], CALL
        try:
            if isinstance(request, SetAttr):
                if venv is not None:  # it could not be made: its next incarnation gets the attribute
                    venv.set_attr(request.name, request.values)
                return Reply(request.request, [], result=[])
            if request.name == "render":
                result = venv.render()
            else:
                result = venv.call(request.name, *request.args, **request.kwargs)
            return Reply(request.request, [], result=list(result))
        except Caught as error:
            return Reply(request.request, [], faults=self._describe(CALL, error)[:1])

    def close(self) -> None:
        venv, self.venv = self.venv, None
        close_env(venv)

    # -- fragments --------------------------------------------------------------------------------------------

    def lengths(self) -> Any:
        """Return how many steps each running episode has, [K]."""
        return self.calls.copy()

    def has_played(self, lengths: Any) -> None:
        """Note the lengths of the running episodes after a fragment."""
        self.calls[:] = lengths

    def take_recent(self) -> dict[int, dict[str, Any]]:
        """Return the infos of the slots that stepped or were reset since the last call."""
        infos, resets = self._last_infos, self._reset_infos
        self._last_infos, self._reset_infos = {}, {}
        count = len(self.slots)
        return {slot: row_of(infos, k, count) for k, slot in enumerate(self.slots) if infos} | resets

    def read(self, obs: Any, count: int) -> list[Any]:
        """Return the leaves of `count` observations as arrays; raise ValueError if they do not fit the space."""
        values = flatten(self._space, obs)
        return [
            coerce(to_numpy(value), leaf, "observation", count)
            for leaf, value in zip(self.buffers.layout.obs, values, strict=True)
        ]

    def fail(self, phase: int, error: BaseException) -> list[Fault]:
        """Drop the vector environment after a failure, which concerns all slots; describe it for each of them."""
        faults = self._describe(phase, error)
        self.close()
        return faults

    # -- rows -------------------------------------------------------------------------------------------------

    def _write(self, obs: Any) -> Any:
        """Write the observation of each slot on its undelivered side; return these sides, [K]."""
        sides = 1 - self.buffers.side[self.rows]
        is_one = (sides == sides[0]).all()  # not after a reset of some slots: only their rows were delivered
        for array, block in zip(self.buffers.obs, self.read(obs, len(self.slots)), strict=True):
            if is_one:
                array[sides[0]][self.rows] = block
            else:
                array[sides, self.slots] = block
        return sides

    def _refuse_bad(self, sides: Any) -> None:
        if not self.check:
            return
        for side in np.unique(sides).tolist():
            wrong = [i for i in bad_rows(self.buffers, side, self.rows) if sides[i[0]] == side]
            if wrong:
                raise ValueError(f"slot {self.slots[wrong[0][0]]}: {wrong[0][1]}")
        rewards = self.buffers.reward[self.rows]
        if not np.isfinite(rewards).all():
            raise ValueError(f"slot {self.slots[int(np.argmin(np.isfinite(rewards)))]}: reward is not finite")

    def _refuse_bad_finals(self, infos: dict[str, Any]) -> None:
        """Check last observations of episodes, which under SAME_STEP are infos, as if they were rows."""
        finals = infos.get("final_obs")
        if not self.check or not isinstance(finals, np.ndarray):
            return
        for i in np.flatnonzero(infos.get("_final_obs", ())).tolist():
            slot = self.slots[i]
            side = 1 - int(self.buffers.side[slot])
            self._write_one(side, slot, finals[i])
            wrong = bad_rows(self.buffers, side, [slot])
            if wrong:
                raise ValueError(f"slot {slot}: {wrong[0][1]}")

    def _columns(self, infos: dict[Any, Any]) -> Columns:
        """Return the infos of a step as columns; see `row_of` for what has no rows."""
        columns: Columns = {}
        for key, value in infos.items():
            if is_mask(infos, key):
                continue
            mask = infos.get(f"_{key}")
            places: Any = slice(None)
            rows = self.slots
            if mask is not None and has_rows(mask, len(rows)) and not np.all(mask):
                places = np.flatnonzero(mask)
                rows = [self.slots[i] for i in places]
            if isinstance(value, dict):
                columns[key] = Column(rows, self._columns(value), "dict")
                continue
            if not has_rows(value, len(self.slots)):
                columns |= pack((row, {key: value}) for row in rows)
                continue
            array = np.asarray(value)[places]
            if array.dtype == object:
                columns[key] = Column(rows, list(array), "object")
            elif array.ndim == 1:
                columns[key] = Column(rows, array, "number", array.dtype.type)
            else:
                columns[key] = Column(rows, array, "array")
        return columns

    def _describe(self, phase: int, error: BaseException) -> list[Fault]:
        calls = self.calls.tolist() if phase in (STEP, CALL) else [0] * len(self.slots)
        first = describe(self.slots[0], phase, error, None, self._incarnation, 0)
        return [first._replace(slot=slot, step=call) for slot, call in zip(self.slots, calls, strict=True)]


def make_vector(vector: Vector, count: int, seeds: list[int], stickies: list[list[Sticky]]) -> VectorEnv[Any, Any, Any]:
    """Make a vector environment of this size, with the sticky attributes of its slots."""
    venv = vector.fn(count, list(seeds))
    if not isinstance(venv, VectorEnv):
        raise TypeError(f"Vector(fn): fn returned {type(venv).__name__}, expected a gymnasium.vector.VectorEnv")
    if venv.num_envs != count:
        raise ValueError(f"Vector(fn): fn was asked for {count} environments, made {venv.num_envs}")
    many: Any = venv  # VectorEnv does not declare `call` and `set_attr`; Gymnasium's vector environments have them
    for each in zip(*stickies, strict=True):  # every slot has the same ones, with its own values
        sticky = each[0]
        if sticky.is_call:
            many.call(sticky.name, *sticky.args, **sticky.kwargs)
        else:
            many.set_attr(sticky.name, [its.args[0] for its in each])
    return venv


def row_of(infos: dict[Any, Any], k: int, count: int) -> dict[Any, Any]:
    """Return the info of one environment from the infos of a vector environment.

    What has no row for each of the `count` environments (a number, a text, an array of another length) concerns all.
    """
    row: dict[Any, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if is_mask(infos, key) or (mask is not None and has_rows(mask, count) and not mask[k]):
            continue
        if isinstance(value, dict):
            row[key] = row_of(value, k, count)
        else:
            row[key] = value[k] if has_rows(value, count) else value
    return row


def is_mask(infos: dict[Any, Any], key: Any) -> bool:
    """Return whether this key of Gymnasium's infos says which environments have a value of another one."""
    return isinstance(key, str) and key.startswith("_") and key[1:] in infos


def has_rows(value: Any, count: int) -> bool:
    """Return whether this is an array (of numpy, torch, JAX) or a list with a row for each of `count` environments."""
    if isinstance(value, list):
        return len(value) == count
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and shape[:1] == (count,)
