"""Run a worker's slots as one VectorEnv of the user (for example EnvPool); same methods as `EnvGroup`.

There is no per-environment Python here. All slots of the worker step, fail and restart together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from clusterenv.memory.progress import CALL, INIT, RESET, STEP
from clusterenv.memory.rows import Buffers, assemble, bad_rows, coerce, flatten, row_writer
from clusterenv.spec import Vector
from clusterenv.wire.infos import Column, Columns, select
from clusterenv.wire.requests import Build, Built, Call, Fault, Rebuild, Reply, Reset, SetAttr, Step, Sticky
from clusterenv.worker.single_env import Caught, close_env, describe

__all__ = ["VectorGroup"]


class VectorGroup:
    def __init__(self, vector: Vector, mode: AutoresetMode | None, check: bool, progress: memoryview) -> None:
        self._vector = vector
        self._mode = mode
        self._check = check
        self._at = progress
        self._venv: VectorEnv[Any, Any, Any] | None = None
        self._slots: list[int] = []
        self._incarnation = 0
        self._calls: Any = None  # [K], number of the last `step` call in each slot's episode; 0: its reset
        self._over: Any = None  # [K], the next step of this slot is its reset

    def build(self, request: Build) -> Built:
        self._slots = request.slots
        self._calls = np.zeros(len(self._slots), dtype=np.int64)
        self._over = np.zeros(len(self._slots), dtype=np.bool_)
        self._incarnation = request.incarnations[0] if request.incarnations else 0
        if not request.make:
            return Built(request.request)
        try:
            self._make(request.seeds, [])
        except Caught as error:
            return Built(request.request, faults=self._faults(INIT, error))
        venv = self._venv
        assert venv is not None
        spaces = (venv.single_observation_space, venv.single_action_space)
        return Built(request.request, *spaces, dict(venv.metadata), venv.render_mode)

    def _make(self, seeds: list[int], stickies: list[list[Sticky]]) -> None:
        self._at[0], self._at[1] = self._slots[0], INIT
        venv = self._vector.fn(len(self._slots), list(seeds))
        if not isinstance(venv, VectorEnv):
            raise TypeError(f"Vector(fn): fn returned {type(venv).__name__}, expected a gymnasium.vector.VectorEnv")
        if venv.num_envs != len(self._slots):
            raise ValueError(f"Vector(fn): fn was asked for {len(self._slots)} environments, made {venv.num_envs}")
        mode = venv.metadata.get("autoreset_mode")
        if self._mode is not None and mode is not self._mode:
            raise ValueError(
                f"Vector(fn) resets as metadata['autoreset_mode']={mode}, but {self._mode} was requested: "
                "leave autoreset_mode out, or make the vector environment with that mode"
            )
        self._venv = venv
        many: Any = venv  # VectorEnv does not declare `call` and `set_attr`; Gymnasium's vector environments have them
        for each in zip(*stickies, strict=True):  # every slot has the same ones, with its own values
            sticky = each[0]
            if sticky.is_call:
                many.call(sticky.name, *sticky.args, **sticky.kwargs)
            else:
                many.set_attr(sticky.name, [its.args[0] for its in each])

    def attach(self, buffers: Buffers, observation_space: Any, action_space: Any) -> None:
        self._buffers = buffers
        self._space = observation_space
        self._rows = slice(self._slots[0], self._slots[-1] + 1)
        self._write_one = row_writer(observation_space, buffers)

    def step_all(self, request: int) -> Reply | None:
        venv, buffers, rows = self._venv, self._buffers, self._rows
        self._at[0], self._at[1] = self._slots[0], STEP
        try:
            if venv is None:
                raise RuntimeError("this vector environment failed and was not started again")
            blocks = [array[rows].copy() for array in buffers.actions]
            actions = assemble(venv.single_action_space, iter(blocks))
            self._calls += 1
            self._calls[self._over] = 0
            obs, rewards, terminations, truncations, infos = venv.step(actions)
            self._refuse_bad_finals(infos)
            sides = self._write(obs)
            buffers.reward[rows] = rewards
            buffers.terminated[rows] = terminations
            buffers.truncated[rows] = truncations
            self._refuse_bad(sides)
            self._over = np.logical_or(terminations, truncations)
            if venv.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP:
                self._calls[self._over] = 0
                self._over[:] = False
        except Caught as error:
            return Reply(request, self._slots, faults=self._faults(STEP, error))
        if infos:
            return Reply(request, self._slots, self._columns(infos))
        return None

    def step(self, request: Step, flush: Callable[[Reply], None]) -> Reply:
        return self.step_all(request.request) or Reply(request.request, self._slots)

    def reset(self, request: Reset | Rebuild) -> Reply:
        phase = INIT
        try:
            if isinstance(request, Rebuild):
                self.close()
                self._incarnation = request.incarnations[0]
                seeds = [0 if seed is None else seed for seed in request.seeds]
                self._make(seeds, request.stickies)
            phase = RESET
            self._at[0], self._at[1] = self._slots[0], RESET
            venv = self._venv
            if venv is None:
                raise RuntimeError("this vector environment failed and was not started again")
            seed: Any = None if all(seed is None for seed in request.seeds) else list(request.seeds)
            options = request.options
            asked = np.isin(self._slots, request.slots)
            if not asked.all():
                options = {**(options or {}), "reset_mask": asked}
                if seed is not None:
                    seed = [dict(zip(request.slots, request.seeds, strict=True)).get(s) for s in self._slots]
            obs, infos = venv.reset(seed=seed, options=options)
            self._calls[asked], self._over[asked] = 0, False
            sides = self._write(obs)
            self._buffers.reward[request.slots] = 0.0
            self._buffers.terminated[request.slots] = False
            self._buffers.truncated[request.slots] = False
            self._refuse_bad(sides)
        except Caught as error:
            return Reply(request.request, request.slots, faults=self._faults(phase, error))
        columns = self._columns(infos) if infos else None
        if columns and len(request.slots) < len(self._slots):
            columns = select(columns, {slot: slot for slot in request.slots})
        return Reply(request.request, request.slots, columns or None)

    def call(self, request: Call | SetAttr) -> Reply:
        venv: Any = self._venv
        self._at[0], self._at[1] = self._slots[0], CALL
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
        venv, self._venv = self._venv, None
        close_env(venv)

    def _write(self, obs: Any) -> Any:
        """Write the observation of each slot on its undelivered side; return these sides, [K]."""
        sides, leaves = 1 - self._buffers.side[self._rows], self._buffers.layout.obs
        is_one = (sides == sides[0]).all()  # not after a reset of some slots: only their rows were delivered
        for leaf, array, values in zip(leaves, self._buffers.obs, flatten(self._space, obs), strict=True):
            block = coerce(values, leaf, "observation", len(self._slots))
            if is_one:
                array[sides[0]][self._rows] = block
            else:
                array[sides, self._slots] = block
        return sides

    def _refuse_bad(self, sides: Any) -> None:
        if not self._check:
            return
        for side in np.unique(sides).tolist():
            wrong = [i for i in bad_rows(self._buffers, side, self._rows) if sides[i[0]] == side]
            if wrong:
                raise ValueError(f"slot {self._slots[wrong[0][0]]}: {wrong[0][1]}")
        rewards = self._buffers.reward[self._rows]
        if not np.isfinite(rewards).all():
            raise ValueError(f"slot {self._slots[int(np.argmin(np.isfinite(rewards)))]}: reward is not finite")

    def _refuse_bad_finals(self, infos: dict[str, Any]) -> None:
        """Check last observations of episodes, which under SAME_STEP are infos, as if they were rows."""
        finals = infos.get("final_obs")
        if not self._check or not isinstance(finals, np.ndarray):
            return
        for i in np.flatnonzero(infos.get("_final_obs", ())).tolist():
            slot = self._slots[i]
            side = 1 - int(self._buffers.side[slot])
            self._write_one(side, slot, finals[i])
            wrong = bad_rows(self._buffers, side, [slot])
            if wrong:
                raise ValueError(f"slot {slot}: {wrong[0][1]}")

    def _columns(self, infos: dict[str, Any]) -> Columns:
        columns: Columns = {}
        for key, value in infos.items():
            if key.startswith("_") and key[1:] in infos:
                continue
            mask = infos.get(f"_{key}")
            places: Any = slice(None)
            rows = self._slots
            if mask is not None and not np.all(mask):
                places = np.flatnonzero(mask)
                rows = [self._slots[i] for i in places]
            if isinstance(value, dict):
                columns[key] = Column(rows, self._columns(value), "dict")
                continue
            array = np.asarray(value)[places]
            if array.dtype == object:
                columns[key] = Column(rows, list(array), "object")
            elif array.ndim == 1:
                columns[key] = Column(rows, array, "number", array.dtype.type)
            else:
                columns[key] = Column(rows, array, "array")
        return columns

    def _faults(self, phase: int, error: BaseException) -> list[Fault]:
        faults = self._describe(phase, error)
        self.close()
        return faults

    def _describe(self, phase: int, error: BaseException) -> list[Fault]:
        calls = self._calls.tolist() if phase in (STEP, CALL) else [0] * len(self._slots)
        first = describe(self._slots[0], phase, error, None, self._incarnation, 0)
        return [first._replace(slot=slot, step=call) for slot, call in zip(self._slots, calls, strict=True)]
