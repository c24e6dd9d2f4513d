"""Act and step a vector environment: one fragment of all its slots under one policy version.

A rollout has no row for a reset, so each autoreset mode needs its own way to leave it out:

- SAME_STEP: the first observation of the next episode comes with the step, the last one with its infos.
- DISABLED, and NEXT_STEP if the environment can reset some of its slots: ended ones are reset at once.
- NEXT_STEP where slots can be stepped apart (`send_rows`, `recv_rows`): a slot whose step was a reset steps again.
- NEXT_STEP of other environments: all slots step together, and a column has one row less for each reset. The rows
  that it lacks are at its end, and not valid.

In the last two, columns are at different rows at the same time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.memory.progress import POLICY, RESET, STEP, STOP, TICK
from clusterenv.memory.rows import assemble
from clusterenv.policy.acting.base import pad_rows
from clusterenv.policy.acting.distributions import mask_logits
from clusterenv.worker.fragment import Bad, RunningFragment
from clusterenv.worker.fragment_loop import FragmentLoop, note_policy_error
from clusterenv.worker.policy import WorkerPolicy, not_finite, pad_starts
from clusterenv.worker.single_env import Caught
from clusterenv.worker.vector_env import VectorGroup, row_of
from clusterenv.worker.vector_rows import Places, Stepped, StepsRows, error_of, names, only, read_step, row_at, unplayed

__all__ = ["VectorEnvLoop"]


class VectorEnvLoop(FragmentLoop):
    """Steps the vector environment of a `VectorGroup`."""

    def __init__(self, group: VectorGroup, policy: WorkerPolicy, observation_space: Any) -> None:
        super().__init__(group, policy, observation_space)
        self._group = group
        self._every, self._whole = np.arange(len(group.slots)), slice(None)
        self._action_dtype = np.dtype(group.buffers.layout.actions[0].dtype)
        self._t = self._steps = 0  # of the running fragment: the row that all columns are at
        self._at: Places | None = None  # instead, once they are at different rows

    def _play(self, run: RunningFragment) -> None:
        group, at, clock = self._group, self._group.at, time.perf_counter
        venv: Any = group.venv
        by_rows = isinstance(venv, StepsRows) and not group.resets_some
        num_steps = len(run.columns.valid)
        rows, obs = self._every, [leaf[0] for leaf in run.columns.obs]  # the environments to act for next
        actions: Any = None
        in_flight = 0
        error: BaseException | None = None
        while venv is not None:
            begin = clock()
            acts = bool(len(rows)) and not at[STOP] and run.policy_error is None
            if acts:
                at[1] = POLICY
                actions = self._act_or_fail(run, rows, obs)
                acts = actions is not None
                in_flight += len(rows) * acts
                at[0], at[1] = group.slots[0], STEP
                run.policy_s += (acted := clock()) - begin
                begin = acted
            if not in_flight:  # only now: what was sent before a policy failed, or a node had to leave, is received
                break
            try:
                if by_rows and acts:
                    venv.send_rows(actions, rows)
                result = venv.recv_rows() if by_rows else (self._every, *venv.step(actions))
                in_flight -= len(result[0])
                rows, obs = self._write(run, read_step(group, *result))
            except Caught as caught:
                error = caught
                break
            self._steps += 1
            at[TICK] = self._steps
            if by_rows and (self._steps >= num_steps or run.lost):
                rows, obs = self._unfinished(run, rows, obs)
            elif not by_rows and self._steps == num_steps:
                rows = rows[:0]
            run.env_s += clock() - begin
        self._finish(run, not len(rows), error)

    def _act_or_fail(self, run: RunningFragment, rows: Any, obs: list[Any]) -> Any:
        """Choose the actions of these columns; if the policy fails, note its error and return None."""
        try:
            return self._act(run, rows, assemble(self._space, iter(obs)))
        except Exception as error:  # user code
            note_policy_error(run, error)
            return None

    def _act(self, run: RunningFragment, rows: Any, obs: Any) -> Any:
        policy, columns, count, knobs, at = self._policy, run.columns, len(rows), run.knobs, self._at
        state, starts = policy.state, None
        where = self._whole if rows is self._every else rows
        if at is not None:
            knobs = {name: value[rows] if np.ndim(value) else value for name, value in knobs.items()}
            own = at.own[where]
            noise = at.noise.take(own if self._steps < len(columns.valid) else np.minimum(own, at.last), axis=0)
            if state is not None and at.starts is not None:
                starts, state = at.starts[rows], policy.state_of(rows)
        else:
            noise = run.noise[self._t]
            if state is not None:
                starts = columns.starts[self._t]
        starts = None if starts is None else pad_starts(starts)
        params, state = policy.actor.forward(pad_rows(obs, count), state, starts)  # type: ignore[union-attr]
        params = params[:count]
        mask = policy.allowed(obs, params, rows) if policy.mask is not None else None
        if mask is not None:
            params = mask_logits(params, mask)
        actions, for_env = policy.family.choose(params, noise, knobs)
        total = float(np.add.reduce(params, axis=None))
        if total - total != 0.0:  # NaN or infinite: never let such an action reach an environment
            raise not_finite(params, [self._group.slots[k] for k in rows])
        if at is None:
            policy.state = state
            columns.actions[self._t], run.params[self._t] = actions, params
            if mask is not None:
                columns.masks[self._t] = mask
            return np.asarray(for_env, dtype=self._action_dtype)
        if state is not None:
            policy.put_state(rows, state)
        # An environment whose step is only its reset ignores its action; the row is written again when it is played.
        chosen = self._with_room(run, rows)
        shared = at.shared[where][chosen]
        at.actions[shared], at.params[own[chosen]] = actions[chosen], params[chosen]
        if mask is not None:
            at.masks[shared] = mask[chosen]
        return np.asarray(for_env, dtype=self._action_dtype)

    def _write(self, run: RunningFragment, stepped: Stepped) -> tuple[Any, list[Any]]:
        """Write the results of a step. Return the columns that it stepped, and their observations."""
        rows, lost = stepped.rows, self._lost(stepped)
        is_whole = rows is self._every or (self._at is None and np.array_equal(rows, self._every))
        if self._at is None and (lost is not None or not is_whole):
            self._part(run)
        if self._at is not None:
            self._write_rows(run, stepped, lost)
            return rows, stepped.obs
        t, columns = self._t, run.columns
        columns.rewards[t] = stepped.rewards
        self._returns += columns.rewards[t]
        self._counted += 1
        run.lengths += 1
        run.played += 1
        self._t = t + 1
        for out, values in zip(columns.obs, stepped.obs, strict=True):
            out[t + 1] = values
        self._note_infos(run, stepped, None)
        ended = stepped.ended
        if ended.any():
            columns.terminations[t], columns.truncations[t] = stepped.terminations, stepped.truncations
            self._end_episodes(run, stepped, np.flatnonzero(ended))
        return rows, [leaf[t + 1] for leaf in columns.obs]

    def _write_rows(self, run: RunningFragment, stepped: Stepped, lost: Any) -> None:
        """Write rows of columns that are at different rows; the step of some was only their reset."""
        group, rows, at = self._group, stepped.rows, self._at
        assert at is not None
        where = self._whole if rows is self._every else rows
        begun = group.over[where].copy()  # this step was only their reset
        if lost is not None:
            self._lose_rows(run, rows[lost])
            begun &= ~lost
        live = ~begun if lost is None else ~(begun | lost)
        shared = at.shared[where]
        chosen = self._with_room(run, rows)
        places, steps = shared[chosen], live[chosen]
        rewards = stepped.rewards * live
        # Rows of resets are written too, as if nothing had happened in them, and again when they are played.
        at.rewards[places] = rewards[chosen]
        at.terminations[places] = stepped.terminations[chosen] & steps
        at.truncations[places] = stepped.truncations[chosen] & steps
        self._returns[where] += rewards
        for counter in (self._counted, run.lengths, run.played):
            counter[where] += live
        at.shared[where] = shared = shared + at.num_envs * live
        at.own[where] += len(self._every) * live
        for out, values in zip(at.obs, stepped.obs, strict=True):
            if lost is None:
                out[shared] = values
            else:
                out[shared[~lost]] = values[~lost]
        self._note_infos(run, stepped, live)
        if at.starts is not None:
            at.starts[rows] = begun
        if begun.any():
            self._begin_episodes(run, rows[begun])
        ended = np.flatnonzero(stepped.ended & live)
        if len(ended):
            self._end_episodes(run, stepped, ended)

    def _part(self, run: RunningFragment) -> None:
        """Let the columns be at different rows from now on."""
        if self._at is None:
            self._at = Places(run, self._every, self._policy.state is not None)

    def _with_room(self, run: RunningFragment, rows: Any) -> Any:
        """Return which of these columns are not full: one that is may still have to be reset."""
        if self._steps < len(run.columns.valid):
            return slice(None)
        return np.flatnonzero(run.played[rows] < len(run.columns.valid))

    def _lose_rows(self, run: RunningFragment, columns: Any) -> None:
        run.lost.update(columns.tolist())
        self._returns[columns] = self._counted[columns] = run.lengths[columns] = 0
        self._group.over[columns] = self._group.mode is AutoresetMode.NEXT_STEP

    def _lost(self, stepped: Stepped) -> Any:
        """Return which rows of a step were lost with their environment, [B]; None: none."""

    def _unfinished(self, run: RunningFragment, rows: Any, obs: list[Any]) -> tuple[Any, list[Any]]:
        """Return those of these columns that are not full, or end with a reset that is still to come."""
        unfinished = (run.played[rows] < len(run.columns.valid)) | self._group.over[rows]
        if run.lost:
            unfinished &= ~np.isin(rows, list(run.lost))
        if unfinished.all():
            return rows, obs
        return rows[unfinished], [values[unfinished] for values in obs]

    # -- episodes ---------------------------------------------------------------------------------------------

    def _end_episodes(self, run: RunningFragment, stepped: Stepped, ended: Any) -> None:
        """Keep the last observation of each of these rows of a step, and begin the next episodes where that is ours."""
        group, infos = self._group, stepped.infos
        run.any_ended = True
        last: Any = None
        if group.mode is AutoresetMode.SAME_STEP:
            last, infos = infos.get("final_obs"), infos.get("final_info", {})
            if last is None:
                raise ValueError(
                    "an episode ended, but the infos have no 'final_obs': a SAME_STEP vector environment returns "
                    "there the last observation of each ended episode"
                )
        columns = stepped.rows[ended]
        leaves = [leaf[ended] for leaf in stepped.obs]  # copies: the environment may use its arrays again
        for j, (i, k) in enumerate(zip(ended.tolist(), columns.tolist(), strict=True)):
            t = int(run.played[k]) - 1
            if last is None:
                obs = assemble(self._space, iter([leaf[j] for leaf in leaves]))
            else:
                obs = row_at(last, i)
                run.columns.check_shape(obs)
            run.finals.append((t, k, obs))
            self._end_episode(run, t, k, row_of(infos, i, len(stepped.rows)) if infos else {})
        if group.mode is AutoresetMode.SAME_STEP:
            self._begin_episodes(run, columns)
        elif group.resets_some:
            self._reset(run, columns)
        else:
            group.over[columns] = True
            self._part(run)

    def _begin_episodes(self, run: RunningFragment, columns: Any) -> None:
        """Note that the next row of these columns is the first of an episode."""
        self._group.over[columns] = False
        self._returns[columns] = self._counted[columns] = run.lengths[columns] = 0
        t = run.played[columns]
        inside = t < len(run.columns.valid)
        run.columns.starts[t[inside], columns[inside]] = True

    def _reset(self, run: RunningFragment, columns: Any) -> None:
        """Reset the environments of these columns; the others continue."""
        group, policy = self._group, self._policy
        mask = np.zeros(len(group.slots), dtype=np.bool_)
        mask[columns] = True
        venv: Any = group.venv
        group.at[1] = RESET
        obs, infos = venv.reset(options={"reset_mask": mask})
        group.at[1] = STEP
        for out, values in zip(run.columns.obs, group.read(obs, len(mask)), strict=True):
            out[run.played[columns], columns] = values[columns]
        self._begin_episodes(run, columns)
        if policy.mask is not None:
            for k in columns.tolist():
                policy.masks[k] = row_of(infos, k, len(mask)).get(policy.mask)
        if run.watch is not None:
            run.watch.was_reset(infos)

    def _note_infos(self, run: RunningFragment, stepped: Stepped, live: Any) -> None:
        """Keep the infos that the policy or the collector wants. `live`: rows that were steps; None: all of them."""
        policy, infos = self._policy, stepped.infos
        if run.watch is not None and infos:
            run.watch.stepped(names(infos))
        if policy.mask is not None:
            wanted = only(infos, (policy.mask,))
            for i, k in enumerate(stepped.rows.tolist()):
                policy.masks[k] = row_of(wanted, i, len(stepped.rows)).get(policy.mask)
        if policy.info_keys:
            of_step = only(infos, policy.info_keys)
            of_end = only(infos.get("final_info", {}), policy.info_keys)
            ended = stepped.ended & (self._group.mode is AutoresetMode.SAME_STEP)
            for i, k in enumerate(stepped.rows.tolist()):
                if live is None or live[i]:
                    info = row_of(of_end if ended[i] else of_step, i, len(stepped.rows))
                    run.note_infos(int(run.played[k]) - 1, k, info, policy.info_keys)

    # -- before and after -------------------------------------------------------------------------------------

    def _begin(self, run: RunningFragment) -> None:
        group, policy = self._group, self._policy
        run.played = np.zeros(len(group.slots), dtype=np.int64)
        run.params.fill(0.0)
        self._t, self._at, self._steps = 0, None, 0
        if policy.mask is not None or run.watch is not None:
            for slot, info in group.take_recent().items():
                policy.masks[slot - group.first] = None if policy.mask is None else info.get(policy.mask)
                policy.watch.was_reset(info)
        for k in np.flatnonzero(~group.over).tolist():
            self._continue_episode(run, k)
        run.columns.starts[0] = (run.lengths == 0) & ~group.over
        if group.venv is None or not group.over.any():
            return
        if not group.resets_some:
            self._part(run)
            return
        group.at[0] = group.slots[0]
        try:
            self._reset(run, np.flatnonzero(group.over))
        except Caught as error:
            run.faults += group.fail(RESET, error)

    def _finish(self, run: RunningFragment, is_full: bool, error: BaseException | None) -> None:
        """Flag the rows that were not played, or are lost because the vector environment failed."""
        group, columns, played = self._group, run.columns, run.played
        num_steps, reached = len(columns.valid), int(played.max())
        run.done = num_steps if is_full else reached
        self._blank_unplayed(run)
        bad = columns.find_bad(reached) if run.policy_error is not None and group.check else {}
        if bad:  # the policy failed because of an unusable observation
            run.policy_error, error = None, error_of(bad, group.slots)
            group.has_played(run.lengths)
            run.faults += group.fail(STEP, error)
        elif error is not None:
            group.has_played(run.lengths + 1)  # the number of the failing call
            run.faults += group.fail(group.at[1], error)
        for k in run.lost:
            t = int(played[k])
            if t < num_steps:
                columns.lose(t, k)
                run.finals.append((t, k, columns.row(t, k)))
        if group.venv is None:
            run.done = num_steps
            for k, t in enumerate(played.tolist()):
                if t == num_steps:
                    self._truncate(run, k)
                    continue
                columns.lose(t, k)
                if error is not None and not group.over[k]:
                    run.finals.append((t, k, columns.row(t, k)))

    def _blank_unplayed(self, run: RunningFragment) -> None:
        columns, left = run.columns, unplayed(run)
        if left is None:
            return
        columns.valid[left] = columns.starts[left] = False
        columns.rewards[left] = 0.0
        t, k = np.nonzero(left)
        for leaf in columns.obs:
            leaf[t + 1, k] = leaf[run.played[k], k]

    def _score(self, run: RunningFragment) -> None:
        left = unplayed(run)
        if left is not None:
            run.columns.actions[left] = self._policy.any_action
        super()._score(run)
        if left is not None:
            run.columns.logprobs[left] = 0.0

    def _truncate(self, run: RunningFragment, k: int) -> None:
        """End a column whose environment is not continued, at its last row."""
        columns, t = run.columns, int(run.played[k]) - 1
        if t < 0 or not columns.valid[t, k]:
            return
        if columns.terminations[t, k] or columns.truncations[t, k]:
            # Its next episode has no row: as if its reset had failed, nothing of it is shown.
            columns.write_row(t + 1, k, next(obs for *at, obs in run.finals if at == [t, k]))
            for leaf in columns.obs:
                leaf[t + 2 :, k] = leaf[t + 1, k]
            return
        columns.truncations[t, k] = True
        run.finals.append((t, k, columns.row(t + 1, k)))

    def _lose_bad(self, run: RunningFragment, bad: Bad) -> None:
        # The whole vector environment is made anew: the episodes of the other columns end here too.
        columns, group = run.columns, self._group
        for k, (t, _, _) in bad.items():
            columns.lose(t, k)
            for leaf in columns.obs:  # a learner may multiply by `valid`, and NaN times 0 is NaN
                leaf[t + 1 :, k] = leaf[t, k]
            run.drop_after(t, k)
            run.finals.append((t, k, columns.row(t, k)))
        if group.venv is not None:  # else they have ended because of another failure
            for k in set(range(len(group.slots))) - bad.keys():
                self._truncate(run, k)
            run.faults += group.fail(STEP, error_of(bad, group.slots))
