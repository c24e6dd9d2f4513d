"""`Collector`: a policy attached to environments. The workers act and step; the learner gets `Rollout`s.

Made by `ClusterEnv.collector`. Decides when weights become a version and puts fragments together; how fragments are run
is the pool's business.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, Protocol

import cloudpickle
import numpy as np
from gymnasium import Space

from clusterenv.assembly import Part, put_together, size_of
from clusterenv.batch import Evaluation, Receipt, Rollout, map_arrays
from clusterenv.errors import PolicyError, UsageError
from clusterenv.events import Event, emit
from clusterenv.policy import as_policy, codec
from clusterenv.policy.families import Uniform
from clusterenv.policy.publisher import REPLAY, Publisher
from clusterenv.policy.sync import Always, Rule, Standing, decide, fit, wants_drift
from clusterenv.pool import Pool
from clusterenv.pool.arena import Side
from clusterenv.pool.collecting import Attached
from clusterenv.pool.messages import FragmentResult
from clusterenv.pool.streaming import Item

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
    "dropped_fragments",
)

_SAMPLE_EVERY = 64
"""One state in so many is sampled for drift: well under 1 % of a fragment's bytes."""


class Home(Protocol):
    """What a collector needs of the environments that it is attached to (`ClusterEnv`)."""

    attached: Collector | None
    single_observation_space: Space[Any]
    single_action_space: Space[Any]

    @property
    def pool(self) -> Pool: ...
    def ready_to_collect(self, collector: Collector) -> None: ...


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
        except Exception as error:  # pickling runs user code (__reduce__), which may raise anything
            raise PolicyError(f"the policy cannot be pickled, so it cannot travel to the workers: {error!r}") from error
        own_seed = secrets.randbits(128) if seed is None else seed
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
        self._sequence = np.zeros(workers, dtype=np.int64)
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
        if desk.is_under_way and self._envs.attached is not self:
            raise UsageError("another collector's fragment is under way: take it with its rollout(), or reset() first")
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
        parts = [
            self._part(worker, side, results.get(worker), self._pool.incarnations(slots))
            for worker, slots in enumerate(self._pool.slots_of)
        ]
        batch = self._batch(parts, num_steps, copy)
        if self._prefetch:
            self.publish()
            self._start(num_steps)
        self._collecting_s += time.perf_counter() - begin
        return batch

    def stream(
        self,
        num_steps: int,
        min_envs: int | None = None,
        *,
        max_staleness: int | None = None,
        queue: int = 2,
        timeout_s: float | None = None,
    ) -> Generator[Rollout, None, None]:
        """Fragments of `num_steps` steps as they arrive: no worker waits for another, or for the learner.

        Call `publish()` when the agent has learned; workers get new weights, as the rule says, between two fragments.
        Leave the loop when you like: what runs then is finished and dropped.

        Args:
            min_envs: wait for fragments of at least so many environments; None: one worker's at a time.
            max_staleness: drop what was acted by a version more than so many behind the newest; see `stats()`.
            queue: how many fragments a worker runs ahead. More smooths, and makes the data older.
            timeout_s: raise `DeadlineError` when nothing arrives for so long.
        """
        if num_steps < 1 or queue < 1:
            raise UsageError(f"stream(num_steps={num_steps}, queue={queue}): expected 1 or more")
        if min_envs is not None and not 1 <= min_envs <= self._pool.num_envs:
            raise UsageError(f"stream(min_envs={min_envs}): expected 1 to {self._pool.num_envs}")
        if max_staleness is not None and max_staleness < 0:
            raise UsageError(f"stream(max_staleness={max_staleness}): expected 0 or more")
        return self._stream(num_steps, min_envs or 1, max_staleness, queue, timeout_s)

    def _stream(
        self, num_steps: int, min_envs: int, max_staleness: int | None, queue: int, timeout_s: float | None
    ) -> Generator[Rollout, None, None]:
        self._envs.ready_to_collect(self)
        desk = self._pool.desk
        if desk.is_under_way:
            raise UsageError("stream() while a prefetched fragment is under way: take it with rollout() first")
        if self._publisher.version < 0:
            self.publish()
        self._offer()
        self._set_up_samples()
        stream = desk.open_stream(num_steps, queue)
        begin = time.perf_counter()
        try:
            while True:
                items: list[Item] = []
                later: list[Item] = []
                while sum(len(self._pool.slots_of[item.worker]) for item in items) < min_envs:
                    self._offer()
                    deadline = None if timeout_s is None else time.monotonic() + timeout_s
                    item = stream.wait(deadline, timeout_s, self._policy.knobs())
                    if self._is_too_old(item, max_staleness):
                        stream.release(item)
                        continue
                    if any(other.worker == item.worker for other in items):
                        later.append(item)  # one fragment per slot in a batch
                    else:
                        items.append(item)
                for item in reversed(later):
                    stream.put_back(item)
                items.sort(key=lambda item: item.worker)
                parts = [
                    self._part(item.worker, desk.side(item.side), item.result, item.incarnations) for item in items
                ]
                batch = self._batch(parts, num_steps, True)
                for item in items:
                    stream.release(item)
                self._offer()
                stream.feed(self._policy.knobs())  # before the learner works, not after
                self._collecting_s += time.perf_counter() - begin
                yield batch
                begin = time.perf_counter()
        finally:
            self._counts["dropped_fragments"] += desk.close_stream()

    def _is_too_old(self, item: Item, max_staleness: int | None) -> bool:
        lag = self._publisher.version - item.result.version
        if max_staleness is None or lag <= max_staleness:
            return False
        self._counts["dropped_fragments"] += 1
        reason = f"{lag} versions behind, max_staleness={max_staleness}"
        event = Event("dropped", reason, tuple(self._pool.slots_of[item.worker]), item.worker)
        self._pool.events.add(event, level=logging.DEBUG)
        return True

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
        self._set_up_samples()
        desk.start(num_steps, self._policy.knobs())

    def _set_up_samples(self) -> None:
        desk = self._pool.desk
        desk.sample_every = _SAMPLE_EVERY if wants_drift(self._sync) else 0
        desk.sample_within = REPLAY if self._is_recurrent else None

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
            everyone = tuple(range(self._pool.num_envs))
            event = Event("pull", f"version {self._held}: {verdict.reason}", everyone)
            self._pool.events.add(event, level=logging.DEBUG)
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

    def _batch(self, parts: list[Part], num_steps: int, copy: bool) -> Rollout:
        """Put fragments together, and take note of what they tell."""
        counts, receipts = self._counts, []
        for part in parts:
            result = part.result
            if result is None:
                continue
            known = self._standing.version == result.version
            stand = self._standing if known else Standing(result.version, -1, None, None)
            lag = self._publisher.version - result.version
            slots = tuple(part.slots)
            receipts.append(Receipt(part.worker, slots, result.version, lag, stand.drift, stand.drift_se))
            self._worker_s["environment"][part.worker] += result.env_s
            self._worker_s["policy"][part.worker] += result.policy_s
            self._worker_steps[part.worker] += num_steps * len(slots)
        space, leaves = self._envs.single_observation_space, self._pool.layout.obs
        batch = put_together(parts, num_steps, space, leaves, tuple(receipts), copy)
        first = 0
        for part in parts:
            if part.result is not None and part.result.samples is not None:
                self._note_drift(batch, first, part.result)
            first += len(part.slots)
        counts["rollouts"] += 1
        counts["fragment_bytes"] += size_of(batch)
        counts["steps"] += int(np.count_nonzero(batch.valid))
        counts["episodes"] += len(batch.episodes)
        counts["invalid_rows"] += int(batch.valid.size - np.count_nonzero(batch.valid))
        pairs = zip(batch.episodes.returns.tolist(), batch.episodes.lengths.tolist(), strict=True)
        self._recent = [*self._recent, *pairs][-100:]
        return batch

    def _part(self, worker: int, side: Side, result: FragmentResult | None, incarnations: list[int]) -> Part:
        self._sequence[worker] += 1
        slots = self._pool.slots_of[worker]
        return Part(worker, slots, side, result, incarnations, int(self._sequence[worker]) - 1)

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
        if deterministic and isinstance(self._attached.family, Uniform):
            raise PolicyError("a random policy has no greedy action: evaluate(deterministic=False)")
        other, policy = None, self._policy
        if agent is not None and agent is not self.agent:
            policy = as_policy(agent)
            policy.prepare(self._envs.single_observation_space, self._envs.single_action_space)
            other = codec.encode(policy.weights())
        self.publish()
        self._offer()
        if other is None and self._publisher.snapshot() != self._held:  # the rule puts up with older weights: not here
            other = self._publisher.data
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
            "restarts": sum(self._pool.events.counts.get(kind, 0) for kind in ("worker_lost", "env_error")),
            "policy": self._attached.family.name,
        }

    def summary(self) -> dict[str, float]:
        """A dozen numbers for TensorBoard or W&B; returns and lengths are means of the last 100 episodes."""
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


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
