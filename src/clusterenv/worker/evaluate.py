"""Play whole episodes in a worker, on separate environments: what `Collector.evaluate` runs.

Training environments are not touched. Episode j is seeded with `seed + j` and acts from its own random stream, so its
outcome does not depend on which worker runs it, or which other episodes run beside it.
"""

from __future__ import annotations

import copy
import traceback
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from clusterenv.memory.progress import INIT, POLICY, RESET, STEP, TICK
from clusterenv.memory.rows import assemble, coerce, flatten
from clusterenv.policy.acting.base import PAD, pad_rows
from clusterenv.policy.acting.distributions import mask_logits, stack_masks
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.spec import MakeFromSpec
from clusterenv.wire.channel import join_reasons
from clusterenv.wire.requests import Evaluate, Fault, PlayedEpisode, Reply, Sticky
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.policy import WorkerPolicy
from clusterenv.worker.single_env import Caught, apply_stickies, close_env
from clusterenv.worker.vector_env import VectorGroup

__all__ = ["Evaluator", "Player", "SingleEnvEvaluator"]

_NOISE_STEPS = 64


class Evaluator(ABC):
    """Play episodes. Environments are made when they are first needed, and kept.

    Args:
        by_repr: what is not plain data is sent as its repr, so infos that cannot be copied need not be left out.
    """

    def __init__(
        self, group: EnvGroup | VectorGroup, policy: WorkerPolicy, observation_space: Any, by_repr: bool = False
    ) -> None:
        self._slots = group.slots
        self._at = group.at
        self._policy = policy
        self._space = observation_space
        self._by_repr = by_repr
        self._leaves = group.buffers.layout.obs
        self._now = (0, 0)  # episode, number of its `step` call
        self._stickies_epoch = 0  # of these environments

    def run(self, request: Evaluate) -> Reply:
        """Play the episodes, at most as many at once as this worker has slots."""
        try:
            if request.stickies_epoch != self._stickies_epoch:
                self.close()
                self._stickies_epoch = request.stickies_epoch
            return Reply(request.request, [], result=self._play_all(request))
        except Caught as error:
            text = traceback.format_exc()
            what = f"{type(error).__name__}: {error}"
            phase = "policy" if self._at[1] == POLICY else "evaluate"
            episode, call = self._now
            fault = Fault(self._at[0], phase, what, text, request.seed + episode, 0, call)
            return Reply(request.request, [], faults=[fault])

    def _end(self, info: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Copy the last info of an episode; return also what of it was left out, and why.

        The environment may use the same objects in its next episodes, which are played before this one is sent.
        """
        copied: dict[str, Any] = {}
        reasons: list[str] = []
        for key, value in info.items():
            try:
                copied[key] = copy.deepcopy(value)
            except Exception as error:  # copying runs the code of users' classes
                if self._by_repr:
                    copied[key] = value
                else:
                    reasons.append(f"info[{key!r}] cannot be copied: {error}")
        return copied, join_reasons(reasons)

    @abstractmethod
    def _play_all(self, request: Evaluate) -> list[PlayedEpisode]: ...

    @abstractmethod
    def close(self) -> None: ...


class Player:
    """Choose the actions of episodes that are played at once, one per row, each from its own random stream."""

    def __init__(self, policy: WorkerPolicy, request: Evaluate, episodes: list[int]) -> None:
        actor = policy.actor
        assert actor is not None
        padded = -(-len(episodes) // PAD) * PAD
        self._actor, self._policy, self._request, self._episodes = actor, policy, request, episodes
        self._streams = Streams(request.seed)
        self._state = actor.initial_state(padded)
        self._starts = np.ones(padded, dtype=np.bool_)
        self._noise: Any = None
        self._t = 0

    def act(self, obs: Any, masks: list[Any]) -> Any:
        """Return the actions for these observations. `masks`: action masks from the infos."""
        family, mask, request, count = self._policy.family, self._policy.mask, self._request, len(self._episodes)
        params, self._state = self._actor.forward(pad_rows(obs, count), self._state, self._starts)
        params = params[:count]
        self._starts[:] = False
        if mask is not None:
            in_obs = isinstance(obs, dict) and mask in obs
            params = mask_logits(params, obs[mask] if in_obs else stack_masks(masks, params.shape[1]))
        if request.deterministic:
            return family.mode(params)
        if self._t % _NOISE_STEPS == 0:
            incarnations = [0] * count
            size = family.noise_size
            self._noise = self._streams.draw(self._episodes, incarnations, _NOISE_STEPS, family.noise, size)
        _, actions = family.choose(params, self._noise[self._t % _NOISE_STEPS], request.knobs)
        self._t += 1
        return actions


class SingleEnvEvaluator(Evaluator):
    """Play episodes on environments that are stepped one by one."""

    def __init__(self, group: EnvGroup, policy: WorkerPolicy, observation_space: Any, by_repr: bool = False) -> None:
        super().__init__(group, policy, observation_space, by_repr)
        self._makers = group.makers
        self._envs: list[Any] = []
        self._recorder: Any = None

    def _play_all(self, request: Evaluate) -> list[PlayedEpisode]:
        slots = self._slots
        done: list[PlayedEpisode] = []
        for j in (j for j in request.episodes if j < request.record):
            recorder = self._recording_env(slots[0], request.stickies[0])
            done += self._play(request, [j], [recorder], True)
        plain = [j for j in request.episodes if j >= request.record]
        while len(self._envs) < min(len(plain), len(slots)):
            k = len(self._envs)
            self._at[0], self._at[1] = slots[k], INIT
            self._envs.append(self._makers[slots[k]]())
            apply_stickies(self._envs[k], request.stickies[k])
        # Each environment plays a fixed share: a quick one does not play more.
        shares = [plain[i :: len(self._envs)] for i in range(len(self._envs))] if plain else []
        for i in range(max(map(len, shares), default=0)):
            pairs = [(share[i], env) for share, env in zip(shares, self._envs, strict=True) if i < len(share)]
            done += self._play(request, [j for j, _ in pairs], [env for _, env in pairs], False)
        return done

    def _recording_env(self, slot: int, stickies: list[Sticky]) -> Any:
        if self._recorder is None:
            self._at[0], self._at[1] = slot, INIT
            maker = self._makers[slot]
            env = maker.with_frames() if isinstance(maker, MakeFromSpec) else maker()
            if env.render_mode not in ("rgb_array", "rgb_array_list"):
                env.close()
                raise ValueError(
                    f"record: the environment's render_mode is {env.render_mode!r}; make it with "
                    'render_mode="rgb_array" in its thunk'
                )
            self._recorder = env
            apply_stickies(env, stickies)
        return self._recorder

    def _play(self, request: Evaluate, episodes: list[int], envs: list[Any], record: bool) -> list[PlayedEpisode]:
        """Play one episode per environment, all at once; those that have ended wait for the last."""
        mask, count = self._policy.mask, len(envs)
        player = Player(self._policy, request, episodes)
        obs: list[Any] = []
        masks: list[Any] = []
        self._at[1] = RESET
        for slot, j, env in zip(self._slots, episodes, envs, strict=False):
            self._at[0], self._now = slot, (j, 0)
            first, info = env.reset(seed=request.seed + j)
            obs.append(first)
            masks.append(info.get(mask) if mask is not None else None)
        returns, lengths, running = np.zeros(count), np.zeros(count, dtype=np.int64), [True] * count
        frames: list[list[Any]] = [[env.render()] if record else [] for env in envs]
        ends: list[tuple[dict[str, Any], str]] = [({}, "")] * count
        t = 0
        while any(running):
            self._at[1] = POLICY
            actions = player.act(self._batch(obs), masks)
            t += 1
            self._at[1] = STEP
            for k, (env, action) in enumerate(zip(envs, actions, strict=True)):
                if running[k]:
                    self._at[0], self._now = self._slots[k], (episodes[k], t)
                    obs[k], reward, terminated, truncated, info = env.step(action)
                    returns[k] += reward
                    lengths[k] += 1
                    running[k] = not (terminated or truncated)
                    if not running[k]:
                        ends[k] = self._end(info)
                    masks[k] = info.get(mask) if mask is not None else None
                    self._at[TICK] = t
                    if record:
                        frames[k].append(env.render())
        return [
            PlayedEpisode(j, float(returns[k]), int(lengths[k]), frames[k] if record else None, *ends[k])
            for k, j in enumerate(episodes)
        ]

    def _batch(self, observations: list[Any]) -> Any:
        rows = [list(flatten(self._space, obs)) for obs in observations]
        leaves = [
            np.stack([coerce(row[i], leaf, "observation") for row in rows]).astype(leaf.dtype, copy=False)
            for i, leaf in enumerate(self._leaves)
        ]
        return assemble(self._space, iter(leaves))

    def close(self) -> None:
        for env in (*self._envs, self._recorder):
            close_env(env)
        self._envs, self._recorder = [], None
