"""`Collector`: a policy attached to environments. The workers act and step; the learner gets `Rollout`s.

Made by `ClusterEnv.collector`. Decides when weights become a version and puts fragments together; how fragments are run
is the pool's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import cloudpickle
import numpy as np
from gymnasium import Space

from clusterenv.batch import Episodes, Evaluation, Receipt, Rollout, map_arrays
from clusterenv.errors import PolicyError, UsageError
from clusterenv.events import emit
from clusterenv.policy import as_policy, codec
from clusterenv.policy.publisher import REPLAY, Publisher
from clusterenv.policy.sync import Always, Rule, Standing, decide, fit, wants_drift
from clusterenv.pool import Pool
from clusterenv.pool.arena import Side
from clusterenv.pool.collecting import Attached
from clusterenv.pool.layout import assemble
from clusterenv.pool.messages import FragmentResult

__all__ = ["Collector", "Home"]

_COUNTED = (
    "rollouts",
    "steps",
    "episodes",
    "invalid_rows",
    "pulls",
    "weight_bytes",
    "fragment_bytes",
    "drift_bytes",
)

_SAMPLE_EVERY = 64
"""One state in so many is sampled for drift: well under 1 % of a fragment's bytes."""

Results = dict[int, FragmentResult | None]


class Home(Protocol):
    """What a collector needs of the environments that it is attached to (`ClusterEnv`)."""

    attached: Collector | None
    single_observation_space: Space[Any]
    single_action_space: Space[Any]

    @property
    def pool(self) -> Pool: ...
    def ready_to_collect(self, collector: Collector) -> None: ...
    def event_counts(self) -> Mapping[str, int]: ...
    def note_pull(self, version: int, reason: str) -> None: ...


class Collector:
    """A policy attached to environments; see `ClusterEnv.collector`."""

    def __init__(
        self,
        envs: Home,
        agent: Any,
        *,
        sync: Rule | None = None,
        info_keys: Sequence[str] = (),
        seed: int | None = None,
        on_loss: Literal["rerun", "mask"] = "rerun",
        prefetch: bool = False,
    ) -> None:
        if on_loss not in ("rerun", "mask"):
            raise UsageError(f'collector(on_loss={on_loss!r}): choose "rerun" or "mask"')
        self._envs = envs
        self._pool = envs.pool
        self.seed = seed
        self._on_loss: Literal["rerun", "mask"] = on_loss
        self._prefetch = prefetch
        self._policy = as_policy(agent)
        self.agent = agent
        prepared = self._policy.prepare(envs.single_observation_space, envs.single_action_space)
        emit(logging.INFO, f"policy recognised: {prepared.description}")
        try:
            recipe = cloudpickle.dumps(prepared.recipe)
        except Exception as error:
            raise PolicyError(f"the policy cannot be pickled, so it cannot travel to the workers: {error!r}") from error
        own_seed = int(np.random.SeedSequence().entropy) if seed is None else seed  # type: ignore[arg-type]
        self._attached = Attached(recipe, prepared.family, prepared.mask, own_seed, tuple(info_keys))
        self._sync: Rule = fit(Always() if sync is None else sync, prepared.family)
        self._publisher = Publisher(self._policy, recipe, prepared.family)
        self._is_recurrent = prepared.is_recurrent
        self._held = -1  # the version that the workers have
        self._standing = Standing(-1, -1, None, None)
        self._drift_at_pull: float | None = None
        self._counts = dict.fromkeys(_COUNTED, 0)
        workers = len(self._pool.slots_of)
        self._worker_s = {"environment": np.zeros(workers), "policy": np.zeros(workers)}
        self._worker_steps = np.zeros(workers, dtype=np.int64)
        self._collecting_s = 0.0
        self._recent: list[tuple[float, int]] = []  # returns and lengths of the last episodes

    # -- collecting -------------------------------------------------------------------------------------------

    def rollout(self, num_steps: int, timeout_s: float | None = None, copy: bool = True) -> Rollout:
        """`num_steps` steps of every environment, acted by the agent as it is now.

        Resets the environments if nobody has yet; episodes run on from call to call.

        Args:
            timeout_s: raise `DeadlineError` after this time; the next call goes on waiting for the same fragment.
            copy: False returns views of shared memory, valid until the rollout after the next.
        """
        if num_steps < 1:
            raise UsageError(f"rollout(num_steps={num_steps}): expected 1 or more")
        self._envs.ready_to_collect(self)
        begin = time.perf_counter()
        desk = self._pool.desk
        if desk.is_under_way and desk.num_steps != num_steps:
            raise UsageError(
                f"a fragment of {desk.num_steps} steps is under way (prefetch, or a call that timed out): "
                f"ask for {desk.num_steps} steps, or reset() first"
            )
        if not desk.is_under_way:
            self.publish()
            self._start(num_steps)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        side, results = desk.take(deadline, timeout_s)
        batch = self._assemble(side, results, num_steps, copy)
        if self._prefetch:
            self.publish()
            self._start(num_steps)
        self._collecting_s += time.perf_counter() - begin
        return batch

    def hand_over(self) -> dict[str, Any]:
        """The agent as it is now is what the workers have; returns its knobs."""
        self.publish()
        self._offer()
        return self._policy.knobs()

    def publish(self) -> int:
        """The agent's weights, if they changed, are the newest version from now on; returns its number.

        Cheap: call it after each gradient step if you like. Nothing travels before the rule says so.
        """
        return self._publisher.publish()

    def _start(self, num_steps: int) -> None:
        self._offer()
        desk = self._pool.desk
        desk.on_loss = self._on_loss
        desk.sample_every = _SAMPLE_EVERY if wants_drift(self._sync) else 0
        desk.sample_within = REPLAY if self._is_recurrent else None
        desk.start(num_steps, self._policy.knobs())

    def _offer(self) -> None:
        """The pool's workers are to have this policy, in the newest version or in one that the rule puts up with."""
        desk, publisher = self._pool.desk, self._publisher
        if self._envs.attached is not self:
            self._envs.attached = self
            desk.attach(self._attached)
            self._held = -1
        self._standing = self._stand()
        verdict = decide(self._sync, self._standing)
        if verdict.pull:
            publisher.snapshot()
            self._held = publisher.version
            desk.offer(self._held, publisher.data)
            self._counts["pulls"] += 1
            self._drift_at_pull = self._standing.drift
            self._counts["weight_bytes"] += len(publisher.data)
            self._envs.note_pull(self._held, verdict.reason)
            self._standing = Standing(self._held, self._held, 0.0, 0.0)
        publisher.keep({self._held})

    def _stand(self) -> Standing:
        """How the version that the workers have stands to the newest."""
        publisher = self._publisher
        drift = None
        if self._held >= 0 and wants_drift(self._sync) and publisher.snapshot() != self._held:
            drift = publisher.drift(self._held, self._policy.knobs())
        if drift is None:
            return Standing(self._held, publisher.snapshot() if self._held >= 0 else publisher.version, None, None)
        return Standing(self._held, publisher.version, drift.mean, drift.se)

    def _assemble(self, side: Side, results: Results, num_steps: int, copy: bool) -> Rollout:
        slots_of, n = self._pool.slots_of, self._pool.num_envs
        steps = slice(0, num_steps)
        space = self._envs.single_observation_space
        versions = np.full((num_steps, n), -1, dtype=np.int64)
        finals: list[tuple[int, int, Any]] = []
        episodes: list[tuple[int, int, float, int, dict[str, Any]]] = []
        infos: dict[str, list[tuple[int, int, Any]]] = {}
        states: list[Any] = []
        receipts = []
        for worker, slots in enumerate(slots_of):
            result, first = results.get(worker), slots[0]
            if result is None:  # lost, and not to be run again
                rows = slice(first, slots[-1] + 1)
                side.valid[steps, rows] = False
                for flags in (side.terminations, side.truncations, side.starts):
                    flags[steps, rows] = False
                side.truncations[0, rows] = True
                side.rewards[steps, rows] = 0.0
                side.logprobs[steps, rows] = 0.0
                continue
            versions[:, first : slots[-1] + 1] = result.version
            finals += [(t, first + k, obs) for t, k, obs in result.finals]
            episodes += [(t, first + k, total, length, info) for t, k, total, length, info in result.episodes]
            for key, values in result.infos.items():
                infos.setdefault(key, []).extend((t, first + k, value) for t, k, value in values)
            states.append(result.initial_state)
            known = self._standing.version == result.version
            stand = self._standing if known else Standing(result.version, -1, None, None)
            lag = self._publisher.version - result.version
            receipts.append(Receipt(worker, tuple(slots), result.version, lag, stand.drift, stand.drift_se))
            self._worker_s["environment"][worker] += result.env_s
            self._worker_s["policy"][worker] += result.policy_s
            self._worker_steps[worker] += num_steps * len(slots)
        finals.sort(key=lambda item: item[:2])
        episodes.sort(key=lambda item: item[:2])
        take = np.array if copy else np.asarray
        leaves = [take(leaf[steps]) for leaf in side.obs]
        last = [take(leaf[num_steps]) for leaf in side.obs]
        valid = take(side.valid[steps])
        batch = Rollout(
            obs=assemble(space, iter(leaves)),
            actions=take(side.actions[steps]),
            rewards=take(side.rewards[steps]),
            terminations=take(side.terminations[steps]),
            truncations=take(side.truncations[steps]),
            logprobs=take(side.logprobs[steps]),
            versions=versions,
            valid=valid,
            episode_starts=take(side.starts[steps]),
            last_obs=assemble(space, iter(last)),
            final_obs=_stack(space, self._pool.layout.obs, [obs for _, _, obs in finals]),
            final_at=np.array([(t, slot) for t, slot, _ in finals], dtype=np.int64).reshape(-1, 2),
            slots=np.arange(n),
            infos=_info_arrays(infos, num_steps, n),
            episodes=_episode_table(episodes),
            action_masks=take(side.masks[steps]) if side.masks.shape[2] else None,
            initial_state=_join_states(states),
            receipts=tuple(receipts),
        )
        for worker, result in results.items():
            if result is not None and result.samples is not None:
                self._note_drift(batch, slots_of[worker][0], result)
        counts = self._counts
        counts["rollouts"] += 1
        counts["fragment_bytes"] += _bytes_of(batch)
        counts["steps"] += num_steps * n
        counts["episodes"] += len(episodes)
        counts["invalid_rows"] += int(valid.size - np.count_nonzero(valid))
        self._recent = [*self._recent, *((total, length) for _, _, total, length, _ in episodes)][-100:]
        return batch

    def _note_drift(self, batch: Rollout, first: int, result: FragmentResult) -> None:
        samples = result.samples
        assert samples is not None
        when, who = samples.t, samples.columns + first
        there = batch.valid[when, who]
        when, who, params = when[there], who[there], samples.params[there]
        rows: dict[str, Any] = {}
        if self._is_recurrent:
            steps = np.minimum(np.arange(REPLAY), batch.num_steps - 1)
            rows["obs"] = map_arrays(lambda values: values[steps][:, who].swapaxes(0, 1), batch.obs)
            rows["starts"] = batch.episode_starts[steps][:, who].T
            rows["state"] = map_arrays(lambda values: values[who], batch.initial_state)
            rows["t"] = when
        else:
            rows["obs"] = map_arrays(lambda values: values[when, who], batch.obs)
        if batch.action_masks is not None:
            rows["mask"] = batch.action_masks[when, who]
        self._publisher.note(result.version, rows, params)
        self._counts["drift_bytes"] += params.nbytes + samples.t.size * 4

    # -- evaluating -------------------------------------------------------------------------------------------

    def evaluate(
        self, agent: Any = None, *, episodes: int = 32, deterministic: bool = True, seed: int = 0, record: int = 0
    ) -> Evaluation:
        """Play whole episodes on environments of their own, in the same workers; training is not touched.

        Episode j is seeded with `seed + j`: the same agent has the same returns, whatever the number of workers.

        Args:
            agent: another agent of the same shape; None: the attached one, as it is now.
            record: bring the frames of so many episodes back; see `Evaluation.save_gif`.
        """
        if episodes < 1 or not 0 <= record <= episodes:
            raise UsageError(f"evaluate(episodes={episodes}, record={record}): expected episodes >= record >= 0")
        self._envs.ready_to_collect(self)
        desk = self._pool.desk
        if desk.is_under_way:
            raise UsageError("evaluate() while a fragment is under way (prefetch): take it with rollout() first")
        other, policy = None, self._policy
        if agent is not None and agent is not self.agent:
            policy = as_policy(agent)
            policy.prepare(self._envs.single_observation_space, self._envs.single_action_space)
            other = codec.encode(policy.weights())
        self.publish()
        self._offer()
        played = desk.evaluate(episodes, seed, deterministic, record, policy.knobs(), other)
        return Evaluation(
            np.array([episode.total for episode in played]),
            np.array([episode.length for episode in played]),
            np.arange(seed, seed + episodes),
            [episode.frames for episode in played if episode.frames is not None],
        )

    # -- resuming ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._publisher.version, "seed": self._attached.seed, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Versions and counters go on; actions come from the random streams of the slots' new incarnations."""
        self._publisher.resume(state["version"])
        self._attached = self._attached._replace(seed=state["seed"])
        self._counts = dict(state["counts"])

    # -- looking ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and times, in all and per worker."""
        workers = len(self._pool.slots_of)
        total = self._collecting_s
        busy = {name: seconds.copy() for name, seconds in self._worker_s.items()}
        waiting = np.maximum(0.0, total - sum(busy.values()))
        shares = {name: _share(seconds.sum(), total * workers) for name, seconds in busy.items()}
        return {
            **self._counts,
            "version": self._publisher.version,
            "held_version": self._held,
            "drift": self._standing.drift,
            "drift_se": self._standing.drift_se,
            "drift_at_pull": self._drift_at_pull,
            "collecting_s": total,
            "steps_per_s": self._counts["steps"] / total if total else 0.0,
            "worker_steps_per_s": self._worker_steps / total if total else np.zeros(workers),
            "time_shares": {**shares, "waiting": _share(waiting.sum(), total * workers)},
            "restarts": sum(self._envs.event_counts().get(kind, 0) for kind in ("worker_lost", "env_error")),
            "policy": self._attached.family.name,
        }

    def summary(self) -> dict[str, float]:
        """A dozen numbers for TensorBoard or W&B."""
        stats = self.stats()
        returns = [r for r, _ in self._recent]
        lengths = [length for _, length in self._recent]
        return {
            "charts/episodic_return": float(np.mean(returns)) if returns else float("nan"),
            "charts/episodic_length": float(np.mean(lengths)) if lengths else float("nan"),
            "collect/steps": float(stats["steps"]),
            "collect/episodes": float(stats["episodes"]),
            "collect/steps_per_s": float(stats["steps_per_s"]),
            "collect/share_environment": stats["time_shares"]["environment"],
            "collect/share_policy": stats["time_shares"]["policy"],
            "collect/share_waiting": stats["time_shares"]["waiting"],
            "collect/invalid_rows": float(stats["invalid_rows"]),
            "collect/restarts": float(stats["restarts"]),
            "sync/version": float(stats["version"]),
            "sync/pulls": float(stats["pulls"]),
            "sync/drift": float("nan") if stats["drift"] is None else stats["drift"],
            "sync/weight_bytes": float(stats["weight_bytes"]),
        }


def _bytes_of(batch: Rollout) -> int:
    sizes: list[int] = []
    for part in (batch.obs, batch.actions, batch.rewards, batch.logprobs, batch.final_obs, batch.last_obs):
        map_arrays(lambda values: sizes.append(int(values.nbytes)), part)
    return sum(sizes) + 4 * int(batch.valid.nbytes)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _stack(space: Any, leaves: Any, observations: list[Any]) -> Any:
    """[K, ...] in the structure of the space, from K single observations."""
    from clusterenv.pool.layout import flatten

    rows = [list(flatten(space, obs)) for obs in observations]
    columns = [
        np.array([row[i] for row in rows], dtype=leaf.dtype).reshape(-1, *leaf.shape) for i, leaf in enumerate(leaves)
    ]
    return assemble(space, iter(columns))


def _info_arrays(infos: dict[str, list[tuple[int, int, Any]]], num_steps: int, n: int) -> dict[str, Any]:
    """Each key as [T, N, ...] with its "_key" mask, as Gymnasium has them; zeros (or None) where there was no value."""
    arrays: dict[str, Any] = {}
    for key, items in infos.items():
        values = [np.asarray(value) for *_, value in items]
        alike = len({(v.shape, v.dtype.kind) for v in values}) == 1 and values[0].dtype.kind in "biufc"
        if alike:
            array = np.zeros((num_steps, n, *values[0].shape), dtype=np.result_type(*{v.dtype for v in values}))
        else:
            array = np.full((num_steps, n), None, dtype=object)
        there = np.zeros((num_steps, n), dtype=np.bool_)
        for (t, slot, value), plain in zip(items, values, strict=True):
            array[t, slot] = plain if alike else value
            there[t, slot] = True
        arrays[key], arrays[f"_{key}"] = array, there
    return arrays


def _episode_table(rows: list[tuple[int, int, float, int, dict[str, Any]]]) -> Episodes:
    return Episodes(
        np.array([row[1] for row in rows], dtype=np.int64),
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[2] for row in rows], dtype=np.float64),
        np.array([row[3] for row in rows], dtype=np.int64),
        [row[4] for row in rows],
    )


def _join_states(states: list[Any]) -> Any:
    if not states or states[0] is None:
        return None
    return map_arrays(lambda *parts: np.concatenate(parts), *states)
