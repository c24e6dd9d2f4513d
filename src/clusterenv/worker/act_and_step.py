"""Act and step on a worker: T steps of its environments, one by one, under one policy version.

When an episode ends, the next one begins in the same step; when an environment fails, its own column is flagged
invalid from there on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.memory.progress import POLICY, RESET, STEP, STOP, TICK
from clusterenv.memory.rows import write_block
from clusterenv.policy.acting.base import PAD, pad_rows
from clusterenv.policy.acting.distributions import mask_logits
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.fragment import Bad, RunningFragment
from clusterenv.worker.fragment_loop import FragmentLoop, note_policy_error
from clusterenv.worker.pace import TIMED_EVERY
from clusterenv.worker.policy import WorkerPolicy, not_finite, pad_starts
from clusterenv.worker.single_env import Caught

__all__ = ["SingleEnvLoop"]

Ended = list[tuple[int, dict[str, Any]]]
"""(column, info) of the episodes that a step ended."""


class SingleEnvLoop(FragmentLoop):
    """Steps the environments of an `EnvGroup` one after the other."""

    def __init__(self, group: EnvGroup, policy: WorkerPolicy, observation_space: Any) -> None:
        super().__init__(group, policy, observation_space)
        self._group = group
        self._steps: list[Callable[[Any], Any]] = []  # of the running fragment: stand-ins for those that are gone
        self._timed_at = 0  # the next step whose environments are timed
        self._is_timed = False

    # -- the hot loop -----------------------------------------------------------------------------------------

    def _play(self, run: RunningFragment) -> None:
        """Act and step until the fragment is full, the node has to leave, or the policy fails."""
        columns, at, clock = run.columns, self._group.at, time.perf_counter
        started, rewards, lengths = columns.starts, columns.rewards, run.lengths
        num_steps = len(started)
        for t in range(num_steps):
            if at[STOP]:
                break
            at[TICK] = t
            at[1] = POLICY
            begin = clock()
            try:
                actions = self._act_or_lose(run, t)
            except Exception as error:  # user code
                note_policy_error(run, error)
                break
            at[1] = STEP
            acted = clock()
            run.policy_s += acted - begin
            over = self._step(run, t, actions)
            self._returns += rewards[t]
            self._counted += 1
            lengths += 1
            if over:
                self._end_episodes(run, t, over)
                if t + 1 < num_steps:
                    started[t + 1] = lengths == 0
            run.done = t + 1
            run.env_s += clock() - acted

    def _act_or_lose(self, run: RunningFragment, t: int) -> Any:
        """Choose the actions of row t.

        If the policy fails because of an unusable observation, that environment's column is lost and the policy acts
        again for the others.
        """
        try:
            return self._act(run, t)
        except Exception:  # user code: raised again unless an environment is to blame
            bad = run.columns.find_bad(run.done) if self._group.check else {}
            if not bad:
                raise
            self._lose_bad(run, bad)
            for k in bad:
                self._steps[k] = run.columns.frozen(t, k)
        return self._act(run, t)

    def _act(self, run: RunningFragment, t: int) -> Any:
        """Choose the actions of all environments in row t; return them as the environments expect them."""
        policy, columns = self._policy, run.columns
        obs = columns.obs_at(t)
        starts = columns.starts[t]
        count = len(starts)
        if count % PAD:
            obs = pad_rows(obs, count)
        if policy.state is not None:
            starts = pad_starts(starts)
        params, state = policy.actor.forward(obs, policy.state, starts)  # type: ignore[union-attr]
        params = params[:count]
        if policy.mask is not None:
            columns.masks[t] = mask = policy.allowed(columns.obs_at(t), params)
            params = mask_logits(params, mask)
        actions, for_env = policy.family.choose(params, run.noise[t], run.knobs)
        total = float(np.add.reduce(params, axis=None))
        if total - total != 0.0:  # NaN or infinite: never let such an action reach an environment
            raise not_finite(params, self._group.slots)
        policy.state = state
        columns.actions[t] = actions
        run.params[t] = params
        return for_env

    def _step(self, run: RunningFragment, t: int, actions: Any) -> Ended:
        """Step every environment once and write the rows. User code is the only call made for each environment."""
        group, policy, columns, watch = self._group, self._policy, run.columns, run.watch
        at, first, mask, masks, keys = group.at, group.first, policy.mask, policy.masks, policy.info_keys
        rewards: list[Any] = []
        block: list[Any] = []
        over: Ended = []
        steps = self._steps
        if t == self._timed_at:
            steps = group.pace.timed(group.slots, steps, group.envs)
            self._timed_at += TIMED_EVERY
        for slot, step, action in zip(group.slots, steps, actions, strict=True):
            at[0] = slot
            try:
                obs, reward, terminated, truncated, info = step(action)
                reward = float(reward)
                if terminated or truncated:
                    k = slot - first
                    columns.check_shape(obs)
                    columns.terminations[t, k] = terminated
                    columns.truncations[t, k] = truncated
                    over.append((k, info))
                    run.finals.append((t, k, obs))
                    obs = self._restart(run, k)
                elif mask is not None:
                    masks[slot - first] = info.get(mask)
                if info:
                    if keys:
                        run.note_infos(t, slot - first, info, keys)
                    if watch is not None:
                        watch.stepped(info)
            except Caught as error:
                if not self._fail(run, t, slot, error):
                    obs, reward = columns.row(t, slot - first), 0.0
            rewards.append(reward)
            block.append(obs)
        columns.rewards[t] = rewards
        if columns.blocks is None or not write_block(block, columns.blocks[t + 1], columns.shapes):
            self._write_each(run, t, block)
        return over

    # -- outside the hot loop ---------------------------------------------------------------------------------

    def _restart(self, run: RunningFragment, k: int) -> Any:
        """Begin the next episode of an environment; return its first observation."""
        group, policy = self._group, self._policy
        group.at[1] = RESET
        obs, info = group.envs[k].reset()
        group.at[1] = STEP
        if policy.mask is not None:
            policy.masks[k] = info.get(policy.mask)
        if run.watch is not None:
            run.watch.was_reset(info)
        return obs

    def _fail(self, run: RunningFragment, t: int, slot: int, error: BaseException) -> bool:
        """Invalidate the column of an environment that raised; return whether its row t is complete."""
        group, columns, k = self._group, run.columns, slot - self._group.first
        is_whole = group.at[1] == RESET  # the step succeeded; the reset after it failed
        run.faults.append(group.fault(slot, group.at[1], error, int(run.lengths[k]) + 1))
        if is_whole:
            columns.lose(t + 1, k)
        else:
            columns.lose(t, k)
            run.finals.append((t, k, columns.row(t, k)))
        run.failed.add(k)
        self._steps[k] = columns.frozen(t, k)
        group.at[1] = STEP
        return is_whole

    def _end_episodes(self, run: RunningFragment, t: int, over: Ended) -> None:
        run.any_ended = True
        for k, info in over:
            self._end_episode(run, t, k, info)

    def _write_each(self, run: RunningFragment, t: int, block: list[Any]) -> None:
        """Write row by row, as the block could not be written at once; what does not fit its space is a fault."""
        for k, obs in enumerate(block):
            try:
                run.columns.write_row(t + 1, k, obs)
            except (ValueError, TypeError, KeyError) as error:
                if k not in run.failed:
                    run.faults.append(self._group.fault(self._group.slots[k], STEP, error, run.call(t, k, True)))
                    run.failed.add(k)
                run.columns.lose(t, k)
                run.finals.append((t, k, run.columns.row(t, k)))
                self._steps[k] = run.columns.frozen(t, k)
                run.columns.write_row(t + 1, k, run.columns.row(t, k))

    # -- before and after -------------------------------------------------------------------------------------

    def _begin(self, run: RunningFragment) -> None:
        group, policy, columns = self._group, self._policy, run.columns
        recent = group.take_recent()
        self._steps = list(group.steps)
        self._timed_at = group.pace.next_timed(len(columns.valid))
        self._is_timed = self._timed_at < len(columns.valid)
        for k, slot in enumerate(group.slots):
            if group.envs[k] is None:
                run.failed.add(k)
                columns.lose(0, k)
            elif group.ended[k]:
                self._begin_episode(run, k, slot)
            else:
                self._continue_episode(run, k)
                if policy.mask is not None and slot in recent:
                    policy.masks[k] = recent[slot].get(policy.mask)
        for info in recent.values():
            policy.watch.was_reset(info)
        columns.starts[0] = run.lengths == 0
        for k in run.failed:
            self._steps[k] = columns.frozen(0, k)

    def _pace_s(self) -> Any:
        group = self._group
        return group.buffers.pace_s[group.rows].astype(np.float32) if self._is_timed else None

    def _begin_episode(self, run: RunningFragment, k: int, slot: int) -> None:
        """Reset an environment whose episode had ended: row 0 is the first of the next one."""
        group, policy, columns = self._group, self._policy, run.columns
        last = [leaf[0, k].copy() for leaf in columns.obs]
        group.at[0], group.at[1] = slot, RESET
        try:
            obs, info = group.envs[k].reset()
            columns.write_row(0, k, obs)
            if group.check:
                columns.check_row(0, k)
            policy.masks[k] = info.get(policy.mask) if policy.mask is not None else None
            policy.watch.was_reset(info)
            run.begin_again(k)
            self._returns[k] = self._counted[k] = 0
        except Caught as error:
            run.faults.append(group.fault(slot, RESET, error))
            run.failed.add(k)
            columns.lose(0, k)
            for leaf, value in zip(columns.obs, last, strict=True):
                leaf[0, k] = value

    def _lose_bad(self, run: RunningFragment, bad: Bad) -> None:
        columns = run.columns
        for k, (t, text, in_next) in sorted(bad.items()):
            if k not in run.failed:
                call = run.call(t, k, in_next)
                run.faults.append(self._group.fault(self._group.slots[k], STEP, ValueError(text), call))
            run.failed.add(k)
            columns.lose(t, k)
            for leaf in columns.obs:  # a learner may multiply by `valid`, and NaN times 0 is NaN
                leaf[t + 1 :, k] = leaf[t, k]
            run.drop_after(t, k)
            run.finals.append((t, k, columns.row(t, k)))
