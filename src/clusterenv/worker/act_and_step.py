"""The loop that acts and steps on a worker: T steps of its environments under one policy version.

Enters: `RunFragment`. Leaves: rows in the arena and a `FragmentResult`. An episode that ends is followed by the next in
the same step; an environment that fails costs its own column from there on, which is flagged invalid.
"""

from __future__ import annotations

import mmap
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.memory.rows import assemble
from clusterenv.policy.acting.base import PAD, Actor, pad_rows
from clusterenv.policy.acting.distributions import Family, mask_logits, stack_masks
from clusterenv.policy.acting.named import Named, prepare_named
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.policy.weights.codec import decode
from clusterenv.rollout import map_arrays
from clusterenv.wire.requests import (
    Act,
    Acted,
    Evaluate,
    Finals,
    FragmentResult,
    LoadWeights,
    Reply,
    RunFragment,
    SetPolicy,
    Step,
)
from clusterenv.worker.columns import Columns, Gathered, Picked, pack_finals
from clusterenv.worker.envs import INIT, POLICY, RESET, STEP, TIMED_EVERY, Caught, EnvGroup
from clusterenv.worker.evaluate import Evaluator
from clusterenv.worker.key_watch import KeyWatch

__all__ = ["STOP", "TICK", "FragmentLoop"]

TICK, STOP = 3, 4
"""Which progress word counts steps: one environment alone would otherwise look as if it stood still; and which
asks a fragment to end early, because the machine is about to go."""


class FragmentLoop:
    """One per worker, beside its `EnvGroup`."""

    def __init__(self, group: EnvGroup, observation_space: Any, action_space: Any) -> None:
        self._group = group
        self._space, self._action_space = observation_space, action_space
        count = len(group.slots)
        self._returns = np.zeros(count)
        self._counted = np.zeros(count, dtype=np.int64)  # steps that are in `_returns`
        self._tail: list[Any] | None = None  # the observations after the last fragment
        self._masks: list[Any] = [None] * count  # of the infos last seen
        self._evaluator = Evaluator(group.makers, group.at, observation_space, group.buffers.layout.obs)
        self._actor: Actor | None = None
        self._family: Family
        self._version = -1

    # -- policy -----------------------------------------------------------------------------------------------

    def set_policy(self, request: SetPolicy) -> Reply:
        self._group.at[1] = INIT  # importing torch may take long
        self._actor = None
        recipe, family = request.recipe, request.family
        try:
            if isinstance(recipe, Named):
                prepared = prepare_named(recipe, self._space, self._action_space)
                actor, family = prepared.recipe.build(), prepared.family
            else:
                actor = pickle.loads(recipe).build()
            self._state = actor.initial_state(-(-len(self._group.slots) // PAD) * PAD)
        except Exception as error:  # the user's policy: told to the head, which raises it by name
            return _policy_failed(request.request, "the policy could not be built on a worker", error)
        self._actor, self._family = actor, family
        self._mask = request.mask
        self._mask_in_obs = request.mask is not None and request.mask in getattr(self._space, "spaces", {})
        self._streams = Streams(request.seed)
        self._keys = request.info_keys
        self._watch = KeyWatch(None if self._mask_in_obs else request.mask, request.info_keys)
        self._version = -1
        return Reply(request.request, [])

    def load(self, request: LoadWeights, memory: memoryview) -> Reply:
        if self._actor is None:
            return Reply(request.request, [])  # it could not be built, which was told
        try:
            self._actor.load(decode(memory[request.offset : request.offset + request.size]))
        except Exception as error:  # as above
            return _policy_failed(request.request, "the weights could not be loaded on a worker", error)
        self._version = request.version
        return Reply(request.request, [])

    def step(self, request: Step, flush: Callable[[Reply], None]) -> Reply:
        """One step under the environments' own autoreset mode, with actions of the policy."""
        assert request.act is not None
        try:
            acted = self._act(request.slots, request.act)
        except Exception as error:  # as above
            return _policy_failed(request.request, "the policy failed on a worker", error)
        return self._group.step(request, flush)._replace(result=acted)

    def _act(self, slots: list[int], act: Act) -> Acted:
        group, actor, family = self._group, self._actor, self._family
        assert actor is not None
        count, buffers = len(group.slots), group.buffers
        group.at[1] = POLICY
        sides = buffers.side[group.rows]
        everyone = np.arange(group.first, group.first + count)
        obs = assemble(self._space, iter([shared[sides, everyone] for shared in buffers.obs]))
        starts = np.array([group.clock == began for began in group.began])
        params, self._state = actor.forward(pad_rows(obs, count), self._state, _padded(starts))
        columns = [slot - group.first for slot in slots]
        params = params[:count]
        if self._mask is not None:
            for slot, info in group.recent.items():
                self._masks[slot - group.first] = info.get(self._mask)
            group.recent.clear()
            params = mask_logits(params, self._masks_of(obs, params))
        noise = self._streams.draw(slots, act.incarnations, 1, family.noise, family.noise_size)[0]
        params = params[columns]
        if not np.isfinite(params).all():
            raise _not_finite(params, slots)
        actions, for_env = family.choose(params, noise, act.knobs)
        logprobs = family.score(params, noise, actions, act.knobs)
        buffers.actions[0][slots] = for_env
        return Acted(slots, actions, logprobs, self._version)

    def evaluate(self, request: Evaluate) -> Reply:
        assert self._actor is not None
        return self._evaluator.run(request, self._group.slots, self._actor, self._family, self._mask)

    def close(self) -> None:
        self._evaluator.close()

    def map_arena(self, layout: ArenaLayout, memory: mmap.mmap) -> None:
        self._arena = Arena(layout, memory)

    # -- the loop ---------------------------------------------------------------------------------------------

    def run(self, request: RunFragment) -> Reply:
        if self._actor is None:  # asked for before the head heard that the policy could not be built
            return _policy_failed(request.request, "there is no policy on a worker", PolicyError("it was not built"))
        group, actor, family = self._group, self._actor, self._family
        first, slots, at, keys, knobs = group.first, group.slots, group.at, self._keys, request.knobs
        side = self._arena.sides[request.side]
        steps = list(group.steps)
        columns = Columns(side, group.rows, request.num_steps, self._space, group.buffers.layout.obs)
        lengths = np.array([group.clock - began for began in group.began])
        run = Gathered(columns, lengths)
        self._begin(run)
        run.first_lengths = lengths.copy()
        started = columns.starts
        started[0] = lengths == 0
        initial_state = _to_numpy(self._state, len(slots))
        noise = self._streams.draw(slots, request.incarnations, request.num_steps, family.noise, family.noise_size)
        for k in run.failed:
            steps[k] = columns.frozen(0, k)
        picked = Picked(self._streams, slots, request)
        all_params = np.empty((request.num_steps, len(slots), family.num_params), dtype=np.float32)
        timed_at = group.next_timed(request.num_steps)
        is_timed = timed_at < request.num_steps
        env_s = policy_s = 0.0
        done, policy_error = 0, None
        count = len(slots)
        watch = self._watch or None
        any_ended = False
        clock = time.perf_counter

        for t in range(request.num_steps):
            if at[STOP]:
                for k in range(count):
                    columns.lose(t, k)
                break
            at[TICK] = t
            at[1] = POLICY
            begin = clock()
            try:
                obs_rows = columns.obs_at(t)
                if count % PAD:
                    obs_rows = pad_rows(obs_rows, count)
                starts = started[t] if self._state is None else _padded(started[t])
                params, self._state = actor.forward(obs_rows, self._state, starts)
                params = params[:count]
                if self._mask is not None:
                    params = self._apply_masks(columns, t, params)
                actions, for_env = family.choose(params, noise[t], knobs)
                total = float(np.add.reduce(params, axis=None))
                if total - total != 0.0:  # NaN or infinite: never let such an action reach an environment
                    raise _not_finite(params, slots)
            except Exception as error:  # as above
                policy_error = (f"{type(error).__name__}: {error}", traceback.format_exc())
                break
            if t == picked.next_t:
                picked.take(t, params)
            columns.actions[t] = actions
            all_params[t] = params
            at[1] = STEP
            acted = clock()
            policy_s += acted - begin
            rewards: list[Any] = []
            block: list[Any] = []
            over: list[tuple[int, dict[str, Any]]] = []
            calls = steps
            if t == timed_at:
                calls = group.timed(steps)
                timed_at += TIMED_EVERY
            for slot, step, action in zip(slots, calls, for_env, strict=True):
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
                        at[1] = RESET
                        obs, first_info = group.envs[k].reset()
                        at[1] = STEP
                        if self._mask is not None:
                            self._masks[k] = first_info.get(self._mask)
                        if watch is not None:
                            watch.was_reset(first_info)
                    elif self._mask is not None:
                        self._masks[slot - first] = info.get(self._mask)
                    if keys and info:
                        run.note_infos(t, slot - first, info, keys)
                    if watch is not None and info:
                        watch.stepped(info)
                except Caught as error:
                    k = slot - first
                    run.faults.append(group.fault(slot, at[1], error, int(lengths[k]) + 1))
                    if at[1] == RESET:  # the row itself is whole; what follows it is lost
                        columns.lose(t + 1, k)
                    else:
                        columns.lose(t, k)
                        run.finals.append((t, k, columns.row(t, k)))
                        obs, reward = columns.row(t, k), 0.0
                    run.failed.add(k)
                    steps[k] = columns.frozen(t, k)
                    at[1] = STEP
                rewards.append(reward)
                block.append(obs)
            columns.rewards[t] = rewards
            if not columns.write(t + 1, block):
                self._write_each(run, t, block, steps)
            self._returns += columns.rewards[t]
            self._counted += 1
            lengths += 1
            if over:
                any_ended = True
                self._end_episodes(run, t, over)
                if t + 1 < request.num_steps:
                    started[t + 1] = lengths == 0
            done = t + 1
            env_s += clock() - acted

        scoring = clock()
        columns.logprobs[:done] = self._score(all_params[:done], noise[:done], columns.actions[:done], knobs)
        policy_s += clock() - scoring
        self._tail = [leaf[done].copy() for leaf in columns.obs]
        group.began = [group.clock - int(length) for length in lengths]
        group.ended = [False] * count
        leaves = group.buffers.layout.obs
        finals = pack_finals(run.finals, self._space, leaves)
        if group.check and self._check(run, done, finals):
            finals = pack_finals(run.finals, self._space, leaves)
        result = FragmentResult(
            done,
            self._version,
            finals,
            run.episodes,
            run.infos,
            initial_state,
            policy_error,
            picked.samples(),
            env_s,
            policy_s,
            group.buffers.pace_s[group.rows].astype(np.float32) if is_timed else None,
        )
        missing = watch.episode_ended() if watch is not None and any_ended else None
        return Reply(request.request, slots, missing, faults=run.faults, result=result)

    def _score(self, params: Any, noise: Any, actions: Any, knobs: dict[str, Any]) -> Any:
        """Log-probabilities [T, K] of a whole fragment: one call of each numpy function instead of one per step."""
        steps, count = noise.shape[:2]
        rows = [values.reshape(steps * count, *values.shape[2:]) for values in (params, noise, actions)]
        return self._family.score(rows[0], rows[1], rows[2], knobs).reshape(steps, count)

    def _begin(self, run: Gathered) -> None:
        """Row 0: the observation that the user saw last; a new episode where that one had ended."""
        group, columns = self._group, run.columns
        buffers = group.buffers
        sides = buffers.side[group.rows]
        columns.clear()
        for i, (out, shared) in enumerate(zip(columns.obs, buffers.obs, strict=True)):
            if group.moved is None or self._tail is None:
                out[0] = shared[sides, np.arange(group.first, group.first + len(group.slots))]
            else:  # a stream's next fragment begins before the head has seen the last one
                out[0] = self._tail[i]
                for slot in group.moved:
                    out[0, slot - group.first] = shared[sides[slot - group.first], slot]
        group.moved = set()
        for k, slot in enumerate(group.slots):
            if group.envs[k] is None:
                run.failed.add(k)
                columns.lose(0, k)
            elif group.ended[k]:
                group.at[0], group.at[1] = slot, RESET
                try:
                    obs, info = group.envs[k].reset()
                    columns.write_row(0, k, obs)
                    if group.check:
                        columns.check_row(0, k)
                    self._masks[k] = info.get(self._mask) if self._mask is not None else None
                    self._watch.was_reset(info)
                    run.lengths[k] = 0
                    self._returns[k] = self._counted[k] = 0
                except Caught as error:
                    run.faults.append(group.fault(slot, RESET, error))
                    run.failed.add(k)
                    columns.lose(0, k)
                    for leaf, shared in zip(columns.obs, buffers.obs, strict=True):
                        leaf[0, k] = shared[sides[k], slot]
            else:
                if run.lengths[k] == 0:
                    self._returns[k] = self._counted[k] = 0
                if self._mask is not None and slot in group.recent:
                    self._masks[k] = group.recent[slot].get(self._mask)
        for info in group.recent.values():
            self._watch.was_reset(info)
        group.recent.clear()

    def _apply_masks(self, columns: Columns, t: int, params: Any) -> Any:
        mask = self._masks_of(columns.obs_at(t), params)
        columns.masks[t] = mask
        return mask_logits(params, mask)

    def _masks_of(self, obs: Any, params: Any) -> Any:
        assert self._mask is not None
        if self._mask_in_obs:
            mask = np.asarray(obs[self._mask], dtype=np.bool_).reshape(params.shape)
        else:
            mask = stack_masks(self._masks, params.shape[1])
        if not mask.any(axis=1).all():
            k = int(np.argmin(mask.any(axis=1)))
            raise PolicyError(f"the action mask of slot {self._group.slots[k]} allows no action")
        return mask

    def _end_episodes(self, run: Gathered, t: int, over: list[tuple[int, dict[str, Any]]]) -> None:
        for k, info in over:
            own = info.get("episode")
            if isinstance(own, dict) and "r" in own and "l" in own:
                run.episodes.append((t, k, float(np.ravel(own["r"])[0]), int(np.ravel(own["l"])[0]), info))
            elif self._counted[k] == run.lengths[k]:  # else its beginning was stepped by the user, and is not known
                run.episodes.append((t, k, float(self._returns[k]), int(run.lengths[k]), info))
            self._returns[k] = self._counted[k] = run.lengths[k] = 0

    def _write_each(self, run: Gathered, t: int, block: list[Any], steps: list[Callable[[Any], Any]]) -> None:
        """Row by row, where the block could not be written at once; what does not fit its space is a fault."""
        for k, obs in enumerate(block):
            try:
                run.columns.write_row(t + 1, k, obs)
            except (ValueError, TypeError, KeyError) as error:
                if k not in run.failed:
                    run.faults.append(self._group.fault(self._group.slots[k], STEP, error, run.call(t, k, True)))
                    run.failed.add(k)
                run.columns.lose(t, k)
                run.finals.append((t, k, run.columns.row(t, k)))
                steps[k] = run.columns.frozen(t, k)
                run.columns.write_row(t + 1, k, run.columns.row(t, k))

    def _check(self, run: Gathered, done: int, finals: Finals) -> bool:
        """A column with a value that nobody should learn from is lost from there on; True where there was one."""
        columns = run.columns
        bad = columns.find_bad(done)
        for values in finals.leaves:
            if values.dtype.kind in "fc" and not np.isfinite(values).all():
                wrong = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
                for t, k in zip(finals.t[wrong].tolist(), finals.columns[wrong].tolist(), strict=True):
                    if k not in run.failed and (k not in bad or bad[k][0] > t):
                        bad[k] = (t, "the episode's last observation is not finite", False)
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
        return bool(bad)


def _padded(starts: Any) -> Any:
    missing = -len(starts) % PAD
    return np.concatenate([starts, np.ones(missing, dtype=np.bool_)]) if missing else starts


def _to_numpy(state: Any, rows: int) -> Any:
    return map_arrays(lambda value: np.array(value[:rows].numpy() if hasattr(value, "numpy") else value[:rows]), state)


def _not_finite(params: Any, slots: list[int]) -> PolicyError:
    k = int(np.argmin(np.isfinite(params).all(axis=1)))
    return PolicyError(f"the policy's output for slot {slots[k]} is not finite: {params[k]!r}")


def _policy_failed(request: int, what: str, error: Exception) -> Reply:
    failure = (f"{what}: {type(error).__name__}: {error}", traceback.format_exc())
    nothing = Finals(None, None, [])
    return Reply(request, [], result=FragmentResult(0, -1, nothing, [], {}, None, failure, None, 0.0, 0.0))
