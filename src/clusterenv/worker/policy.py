"""Hold the policy of one worker: its actor, its random streams, its action masks.

Enters: `SetPolicy`, `LoadWeights`, `Step` with an `Act`. Leaves: answers, and actions in the shared rows. The fragment
loop and the evaluator act with the same object.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.memory.progress import INIT, POLICY
from clusterenv.memory.rows import assemble
from clusterenv.policy.acting.base import PAD, Actor, pad_rows
from clusterenv.policy.acting.distributions import Family, mask_logits, stack_masks
from clusterenv.policy.acting.named import prepare_plain
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.policy.weights.encoding import decode
from clusterenv.rollout import map_arrays, to_numpy
from clusterenv.wire.requests import Act, Acted, Finals, FragmentResult, LoadWeights, Reply, SetPolicy, Step
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.key_watch import KeyWatch
from clusterenv.worker.vector_env import VectorGroup

__all__ = ["WorkerPolicy", "not_finite", "pad_starts", "policy_failed"]


class WorkerPolicy:
    """One per worker, beside its `EnvGroup`. `actor` is None until a policy has been built."""

    def __init__(self, group: EnvGroup | VectorGroup, observation_space: Any, action_space: Any) -> None:
        self._group = group
        self._space, self._action_space = observation_space, action_space
        self.actor: Actor | None = None
        self.family: Family
        self.state: Any = None  # of a recurrent policy, one row per environment
        self.version = -1
        self.streams: Streams
        self.mask: str | None = None  # key of the action masks
        self.masks: list[Any] = [None] * len(group.slots)  # from the last infos
        self.info_keys: tuple[str, ...] = ()
        self.watch: KeyWatch
        self._mask_in_obs = False

    @property
    def any_action(self) -> Any:
        """An action that the space has, for rows that were not played: 0 need not be one."""
        return getattr(self._action_space, "start", 0)

    def set(self, request: SetPolicy) -> Reply:
        self._group.at[1] = INIT  # importing torch may take long
        self.actor = None
        recipe, family = request.recipe, request.family
        try:
            if isinstance(recipe, bytes):
                actor = pickle.loads(recipe).build()
            else:
                prepared = prepare_plain(recipe, self._space, self._action_space)
                actor, family = prepared.recipe.build(), prepared.family
            self.use(actor, family, request.mask, request.seed, request.info_keys)
        except Exception as error:  # user code: reported to the head, which raises it
            return policy_failed(request.request, "the policy could not be built on a worker", error)
        return Reply(request.request, [])

    def use(self, actor: Actor, family: Family, mask: str | None, seed: int, info_keys: tuple[str, ...]) -> None:
        """Act with this actor from now on."""
        self.state = actor.initial_state(-(-len(self._group.slots) // PAD) * PAD)
        self.actor, self.family = actor, family
        self.mask = mask
        self._mask_in_obs = mask is not None and mask in getattr(self._space, "spaces", {})
        self.streams = Streams(seed)
        self.info_keys = info_keys
        self.watch = KeyWatch(None if self._mask_in_obs else mask, info_keys)
        self.version = -1

    def load(self, request: LoadWeights, memory: memoryview) -> Reply:
        if self.actor is None:
            return Reply(request.request, [])  # it could not be built, which was reported
        self._group.at[1] = POLICY
        try:
            self.actor.load(decode(memory[request.offset : request.offset + request.size]))
        except Exception as error:  # as above
            return policy_failed(request.request, "the weights could not be loaded on a worker", error)
        self.version = request.version
        return Reply(request.request, [])

    def step(self, request: Step, flush: Callable[[Reply], None]) -> Reply:
        """Step once under the environments' own autoreset mode, with actions of the policy."""
        assert request.act is not None
        try:
            acted = self._act(request.slots, request.act)
        except Exception as error:  # as above
            return policy_failed(request.request, "the policy failed on a worker", error)
        return self._group.step(request, flush)._replace(result=acted)

    def _act(self, slots: list[int], act: Act) -> Acted:
        group, actor, family = self._group, self.actor, self.family
        assert actor is not None
        count, buffers = len(group.slots), group.buffers
        group.at[1] = POLICY
        sides = buffers.side[group.rows]
        everyone = np.arange(group.first, group.first + count)
        obs = assemble(self._space, iter([shared[sides, everyone] for shared in buffers.obs]))
        starts = group.lengths() == 0
        params, self.state = actor.forward(pad_rows(obs, count), self.state, pad_starts(starts))
        columns = [slot - group.first for slot in slots]
        params = params[:count]
        if self.mask is not None:
            for slot, info in group.take_recent().items():
                self.masks[slot - group.first] = info.get(self.mask)
            params = mask_logits(params, self.allowed(obs, params))
        noise = self.streams.draw(slots, act.incarnations, 1, family.noise, family.noise_size)[0]
        params = params[columns]
        if not np.isfinite(params).all():
            raise not_finite(params, slots)
        actions, for_env = family.choose(params, noise, act.knobs)
        logprobs = family.score(params, noise, actions, act.knobs)
        buffers.actions[0][slots] = for_env
        return Acted(slots, actions, logprobs, self.version)

    def state_of(self, rows: Any) -> Any:
        """Return the recurrent state of these environments, padded, as the actor takes it."""
        assert self.actor is not None
        return self.actor.like_state(map_arrays(lambda v: pad_rows(to_numpy(v)[rows], len(rows)), self.state))

    def put_state(self, rows: Any, state: Any) -> None:
        """Replace the recurrent state of these environments."""
        assert self.actor is not None

        def put(whole: Any, part: Any) -> Any:
            new = np.array(to_numpy(whole))
            new[rows] = to_numpy(part)[: len(rows)]
            return new

        self.state = self.actor.like_state(map_arrays(put, self.state, state))

    def allowed(self, obs: Any, params: Any, rows: Any = None) -> Any:
        """Return the action masks of these environments (None: all), from their observations or the last infos."""
        assert self.mask is not None
        rows = range(len(self.masks)) if rows is None else rows
        if self._mask_in_obs:
            mask = np.asarray(obs[self.mask], dtype=np.bool_).reshape(params.shape)
        else:
            mask = stack_masks([self.masks[k] for k in rows], params.shape[1])
        if not mask.any(axis=1).all():
            k = rows[int(np.argmin(mask.any(axis=1)))]
            raise PolicyError(f"the action mask of slot {self._group.slots[k]} allows no action")
        return mask


def pad_starts(starts: Any) -> Any:
    missing = -len(starts) % PAD
    return np.concatenate([starts, np.ones(missing, dtype=np.bool_)]) if missing else starts


def not_finite(params: Any, slots: list[int]) -> PolicyError:
    k = int(np.argmin(np.isfinite(params).all(axis=1)))
    return PolicyError(f"the policy's output for slot {slots[k]} is not finite: {params[k]!r}")


def policy_failed(request: int, what: str, error: Exception) -> Reply:
    """Return the answer to a request that the user's policy could not carry out."""
    failure = (f"{what}: {type(error).__name__}: {error}", traceback.format_exc())
    nothing = Finals(None, None, [])
    return Reply(request, [], result=FragmentResult(0, -1, nothing, [], {}, None, failure, None, 0.0, 0.0))
