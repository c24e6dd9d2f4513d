"""Step the environments of one worker in a plain loop that writes directly into the buffers.

Enters: requests of `wire/requests.py`. Leaves: rows in `Buffers` and a `Reply`. Nothing here uses processes, sockets or
signals, so the same group runs in a worker process and in the caller's process (`Local(workers=0)`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from clusterenv.memory.progress import CALL, INIT, RESET, STEP
from clusterenv.memory.rows import (
    Buffers,
    assemble,
    bad_rows,
    blocks_of,
    finite_checker,
    has_room,
    row_writer,
    write_block,
    wrong_rows,
)
from clusterenv.spec import refuse_other
from clusterenv.wire.requests import Build, Built, Call, Fault, Rebuild, Reply, Reset, SetAttr, Step, Sticky
from clusterenv.worker.pace import TIMED_EVERY, Pace
from clusterenv.worker.single_env import Caught, apply_stickies, call_env, close_env, describe, rows_reply

__all__ = ["EnvGroup"]

_FLUSH_AFTER_S = 0.001
"""`step` sends the rows that are done after this time: fast environments answer together, slow ones one by one."""


class EnvGroup:
    """Hold the environments of the slots `first .. first + len - 1`.

    Args:
        makers: one function per slot of the whole run.
        progress: the words of `memory.progress`; the head reads them when a call takes long.
    """

    def __init__(self, makers: list[Callable[[], Any]], mode: AutoresetMode, check: bool, progress: memoryview) -> None:
        self.makers = makers
        self._mode = mode
        self.check = check
        self.at = progress
        self.first = 0
        self.envs: list[Any] = []
        self.steps: list[Callable[[Any], Any]] = []
        self.ended: list[bool] = []  # the next step of this environment is a reset
        self._seeds: list[int | None] = []
        self._incarnations: list[int] = []
        self.moved: set[int] | None = None  # slots reset since the last fragment; None: any may have changed
        self.recent: dict[int, dict[str, Any]] = {}  # infos since the last fragment: they may hold action masks
        self.clock = 0  # whole steps of all environments
        self.began: list[int] = []  # value of `clock` when each episode began: a fault names its step

    # -- building ---------------------------------------------------------------------------------------------

    def build(self, request: Build) -> Built:
        slots = request.slots
        self.first = slots[0]
        count = len(slots)
        self.envs = [None] * count
        self.steps = [_gone] * count
        self.ended = [False] * count
        self._seeds = [None] * count
        self._incarnations = request.incarnations or [0] * count
        self.began = [0] * count
        if not request.make:
            return Built(request.request)
        spaces: tuple[Any, Any] = (None, None)
        others: list[tuple[int, Any, Any]] = []
        for slot in slots:
            try:
                self._make(slot, [])
                env = self.envs[slot - self.first]
                its = (env.observation_space, env.action_space)
                if slot == self.first:
                    spaces = its
                elif its != spaces:  # may call user code
                    others.append((slot, *its))
            except Caught as error:
                return Built(request.request, faults=[self.fault(slot, INIT, error)])
        env = self.envs[0]
        return Built(request.request, *spaces, dict(env.metadata), env.render_mode, others)

    def _make(self, slot: int, stickies: list[Sticky]) -> None:
        k = slot - self.first
        self.at[0], self.at[1] = slot, INIT
        env = self.makers[slot]()
        refuse_other(env, self.makers[slot])
        self.envs[k] = env
        self.steps[k] = env.step
        apply_stickies(env, stickies)

    def attach(self, buffers: Buffers, observation_space: Any, action_space: Any) -> None:
        self.buffers = buffers
        self.pace = Pace(buffers.pace_s)
        self._write = row_writer(observation_space, buffers)
        self._action_space = action_space
        self._shared_actions = buffers.layout.actions_are_shared
        self._one_action_leaf = len(buffers.layout.actions) == 1 and not buffers.layout.actions[0].path
        first, last = self.first, self.first + len(self.envs)
        self.slots = list(range(first, last))
        self.rows = slice(first, last)
        leaves = buffers.layout.obs
        self._blocks = None if buffers.obs[0] is None else blocks_of(leaves, buffers.obs[0][:, self.rows])
        self._shapes = [leaves[0].shape] * len(self.slots)
        self._finite = finite_checker(buffers, self.rows)
        self._reward: Any = buffers.reward.data  # a memoryview: faster to set than an array element
        self._terminated_rows, self._truncated_rows = buffers.terminated[self.rows], buffers.truncated[self.rows]
        self._side_bytes = buffers.side.data[self.rows]
        # If the last observations of all slots are on one side, the other side is free for all of them.
        self._free_side = {bytes([1 - side]) * len(self.slots): side for side in (0, 1)}
        is_one = self._one_action_leaf and self._shared_actions
        self._action_rows = buffers.actions[0][self.rows] if is_one else None
        self._batch_space = batch_space(self._action_space, len(self.envs)) if self._shared_actions else None

    # -- the hot loop -----------------------------------------------------------------------------------------

    def step_all(self, request: int) -> Reply | None:
        """Step every environment; return None if the answer is rows only."""
        self.pace.steps += 1
        self.moved = None
        side = self._free_side.get(self._side_bytes.tobytes())
        if side is None or self._blocks is None or self.pace.steps % TIMED_EVERY == 0:
            return self._step(request, self.slots, self._actions(self.rows), None)

        at, reward_out, first = self.at, self._reward, self.first
        ended, began, clock = self.ended, self.began, self.clock
        same_step = self._mode is AutoresetMode.SAME_STEP
        self._terminated_rows.fill(False)
        self._truncated_rows.fill(False)
        infos: list[tuple[int, dict[str, Any]]] = []
        faults: list[Fault] = []
        block: list[Any] = []
        add = block.append
        actions = self._action_rows.copy() if self._action_rows is not None else self._actions(self.rows)
        at[1] = STEP
        for slot, over, step, action in zip(self.slots, ended, self.steps, actions, strict=True):
            at[0] = slot
            try:
                if over:
                    at[1] = RESET
                    k = slot - first
                    obs, info = self.envs[k].reset()
                    reward_out[slot] = 0.0
                    ended[k] = False
                    began[k] = clock + 1
                    at[1] = STEP
                else:
                    obs, reward_out[slot], terminated, truncated, info = step(action)
                    if terminated or truncated:
                        self._terminated_rows[slot - first] = terminated
                        self._truncated_rows[slot - first] = truncated
                        if same_step:
                            obs, info = self._restart(slot - first, slot, side, obs, info, clock + 1)
                        else:
                            ended[slot - first] = True
                add(obs)
                if info:
                    infos.append((slot, info))
            except Caught as error:
                faults.append(self.fault(slot, at[1], error, clock + 1 - began[slot - first]))
                at[1] = STEP
        self.clock = clock + 1

        if not write_block(block, self._blocks[side], self._shapes):
            self._write_each(self.slots, side, block, faults)
        if self.check and not self._finite(side):
            self._check_rows(self.slots, [side] * len(ended), faults)
        if infos:
            self.recent.update(infos)
        if not infos and not faults:
            return None
        return rows_reply(request, self.slots, infos, [], faults)

    def step(self, request: Step, flush: Callable[[Reply], None]) -> Reply:
        """Step some environments; `flush` sends rows that are done before a slow one."""
        slots = request.slots
        actions = request.actions if request.actions is not None else self._actions(slots)
        return self._step(request.request, slots, actions, flush) or Reply(request.request, slots)

    def _step(
        self, request: int, slots: list[int], actions: Iterable[Any], flush: Callable[[Reply], None] | None
    ) -> Reply | None:
        """Do what `step_all` does, timed, for any slots, space and sides: the same rows, a little slower."""
        buffers, at, first, clock = self.buffers, self.at, self.first, self.clock
        self.moved = None
        sides = (1 - buffers.side[slots]).tolist()
        buffers.terminated[slots] = False
        buffers.truncated[slots] = False
        infos: list[tuple[int, dict[str, Any]]] = []
        objects: list[tuple[int, list[Any]]] = []
        faults: list[Fault] = []
        flushed, flushed_at = 0, time.perf_counter()
        at[1] = STEP
        for i, (slot, side, action) in enumerate(zip(slots, sides, actions, strict=True)):
            k = slot - first
            at[0] = slot
            try:
                if self.ended[k]:
                    at[1] = RESET
                    obs, info = self.envs[k].reset()
                    buffers.reward[slot] = 0.0
                    self.ended[k] = False
                    self.began[k] = clock
                    at[1] = STEP
                else:
                    self.began[k] -= 1  # one more step since it began
                    start = time.perf_counter()
                    obs, reward, terminated, truncated, info = self.steps[k](action)
                    self.pace.note(slot, time.perf_counter() - start)
                    buffers.reward[slot] = reward
                    if terminated or truncated:
                        buffers.terminated[slot] = terminated
                        buffers.truncated[slot] = truncated
                        if self._mode is AutoresetMode.SAME_STEP:
                            obs, info = self._restart(k, slot, side, obs, info, clock)
                        else:
                            self.ended[k] = True
                extra = self._write(side, slot, obs)
                if extra:
                    objects.append((slot, extra))
                if info:
                    infos.append((slot, info))
            except Caught as error:
                faults.append(self.fault(slot, at[1], error))
                at[1] = STEP
            if flush and i + 1 < len(slots) and time.perf_counter() - flushed_at > _FLUSH_AFTER_S:
                self._check_rows(slots[flushed : i + 1], sides[flushed : i + 1], faults)
                self.recent.update(infos)
                flush(rows_reply(request, slots[flushed : i + 1], infos, objects, faults, last=False))
                infos, objects, faults = [], [], []
                flushed, flushed_at = i + 1, time.perf_counter()
        self._check_rows(slots[flushed:], sides[flushed:], faults)
        if infos:
            self.recent.update(infos)
        if flush is None and not infos and not objects and not faults:
            return None
        return rows_reply(request, slots[flushed:], infos, objects, faults)

    def _write_each(self, slots: list[int], side: int, block: list[Any], faults: list[Fault]) -> None:
        """Write row by row, as the block could not be written at once: an environment failed, or a row does not fit."""
        failed = {fault.slot for fault in faults}
        for slot, obs in zip([slot for slot in slots if slot not in failed], block, strict=True):
            try:
                self._write(side, slot, obs)
            except ValueError as error:
                faults.append(self.fault(slot, STEP, error))

    def _restart(
        self, k: int, slot: int, side: int, obs: Any, info: dict[str, Any], clock: int
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode under SAME_STEP; return its first observation, and its info with the final ones."""
        if self.check:
            self._write(side, slot, obs)
            wrong = bad_rows(self.buffers, side, [slot])
            if wrong:
                raise ValueError(wrong[0][1])
        self.at[1] = RESET
        new_obs, new_info = self.envs[k].reset()
        self.at[1] = STEP
        self.began[k] = clock
        return new_obs, {"final_obs": obs, "final_info": info, **new_info}

    def _actions(self, rows: slice | list[int]) -> Iterable[Any]:
        # Copied: an environment may keep its last action, and the head overwrites the shared one.
        blocks = [array[rows].copy() for array in self.buffers.actions]
        if self._one_action_leaf:
            only: Iterable[Any] = blocks[0]
            return only
        batch = assemble(self._action_space, iter(blocks))
        return iterate(self._batch_space, batch)  # type: ignore[arg-type]

    def _check_rows(self, slots: list[int], sides: list[int], faults: list[Fault]) -> None:
        """Turn rows with unusable values into faults that name the value."""
        if not self.check or not slots:
            return
        failed = {fault.slot for fault in faults}
        for slot, text in wrong_rows(self.buffers, slots, sides):
            if slot not in failed:
                failed.add(slot)
                faults.append(self.fault(slot, STEP, ValueError(text)))

    # -- everything else --------------------------------------------------------------------------------------

    def reset(self, request: Reset | Rebuild) -> Reply:
        rebuild = isinstance(request, Rebuild)
        infos: list[tuple[int, dict[str, Any]]] = []
        objects: list[tuple[int, list[Any]]] = []
        faults: list[Fault] = []
        buffers = self.buffers
        for i, slot in enumerate(request.slots):
            k = slot - self.first
            phase = INIT
            try:
                if isinstance(request, Rebuild):
                    self._drop(k)
                    self._incarnations[k] = request.incarnations[i]
                    self._make(slot, request.stickies[i])
                    if not has_room(buffers.layout.obs, self.envs[k].observation_space):
                        raise ValueError(
                            f"the new environment has a different observation space: {self.envs[k].observation_space}"
                        )
                phase = RESET
                self.at[0], self.at[1] = slot, RESET
                seed = request.seeds[i]
                if seed is not None or rebuild:
                    self._seeds[k] = seed
                obs, info = self.envs[k].reset(seed=seed, options=request.options)
                self.ended[k] = False
                self.began[k] = self.clock
                extra = self._write(1 - int(buffers.side[slot]), slot, obs)
                self.recent[slot] = info
                if self.moved is not None:
                    self.moved.add(slot)
                if info:
                    infos.append((slot, info))
                if extra:
                    objects.append((slot, extra))
            except Caught as error:
                faults.append(self.fault(slot, phase, error))
        buffers.reward[request.slots] = 0.0
        buffers.terminated[request.slots] = False
        buffers.truncated[request.slots] = False
        sides = (1 - buffers.side[request.slots]).tolist()
        self._check_rows(request.slots, sides, faults)
        return rows_reply(request.request, request.slots, infos, objects, faults)

    # -- fragments --------------------------------------------------------------------------------------------

    def lengths(self) -> Any:
        """Return how many steps each running episode has, [K]."""
        return np.array([self.clock - began for began in self.began])

    def has_played(self, lengths: Any) -> None:
        """Note the lengths of the running episodes after a fragment, which leaves none ended."""
        self.began = [self.clock - int(length) for length in lengths]
        self.ended = [False] * len(self.envs)

    def take_recent(self) -> dict[int, dict[str, Any]]:
        """Return the infos of the slots that stepped or were reset since the last call."""
        recent, self.recent = self.recent, {}
        return recent

    def call(self, request: Call | SetAttr) -> Reply:
        results: list[Any] = []
        for i, slot in enumerate(request.slots):
            env = self.envs[slot - self.first]
            self.at[0], self.at[1] = slot, CALL
            try:
                if isinstance(request, SetAttr):
                    if env is None:
                        continue  # it could not be made: its next incarnation gets the attribute
                    env.set_wrapper_attr(request.name, request.values[i])
                else:
                    results.append(call_env(env, request.name, request.args, request.kwargs))
            except Caught as error:
                return Reply(request.request, [], faults=[self._describe(slot, CALL, error)])
        return Reply(request.request, [], result=results)

    def close(self) -> None:
        for k in range(len(self.envs)):
            self._drop(k)

    def _drop(self, k: int) -> None:
        env, self.envs[k], self.steps[k] = self.envs[k], None, _gone
        close_env(env)

    def fault(self, slot: int, phase: int, error: BaseException, step: int | None = None) -> Fault:
        """Describe a failure and drop the environment. `step`: number of the failing call; None: from `clock`."""
        fault = self._describe(slot, phase, error, step)
        self._drop(slot - self.first)
        return fault

    def _describe(self, slot: int, phase: int, error: BaseException, step: int | None = None) -> Fault:
        k = slot - self.first
        if step is None:
            step = self.clock - self.began[k]
        if phase == STEP and step == 0:
            phase = RESET  # the first row of an episode is wrong
        return describe(slot, phase, error, self._seeds[k], self._incarnations[k], step)


def _gone(action: Any) -> Any:
    raise RuntimeError("this environment failed and was not started again")
