"""`Collector`: a policy attached to environments. The workers act and step; the learner gets `Rollout`s.

Made by `ClusterEnv.collector`. Decides when weights become a version and puts fragments together; how fragments are run
is the pool's business.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
from gymnasium import Space

from clusterenv.arguments import expect, fits, refused
from clusterenv.code.missing import carry, dumps, why
from clusterenv.driver import Pool
from clusterenv.engine.assembly import Part, put_together, size_of
from clusterenv.engine.fragments import Attached
from clusterenv.engine.stats import Tally
from clusterenv.engine.streaming import FragmentStream, Item
from clusterenv.errors import PolicyError, UsageError
from clusterenv.events import Event, emit
from clusterenv.memory.fragments import Side
from clusterenv.policy import as_policy
from clusterenv.policy.acting.distributions import Uniform
from clusterenv.policy.acting.named import named
from clusterenv.policy.sync.drift import sample_every
from clusterenv.policy.sync.exchange import Exchange
from clusterenv.policy.sync.publisher import REPLAY
from clusterenv.policy.sync.rules import APS, Always, Rule
from clusterenv.policy.weights.codec import encode
from clusterenv.policy.weights.packing import Codec
from clusterenv.rollout import Evaluation, Receipt, Rollout, map_arrays
from clusterenv.wire.requests import FragmentResult
from clusterenv.worker.key_watch import KeyWatch

__all__ = ["Collector", "Home"]

_FIRST_STATES = 64
"""So many states that episodes begin with are looked at before there are others."""


class Home(Protocol):
    """What a collector needs of the environments that it is attached to (`ClusterEnv`)."""

    _attached: Collector | None
    _is_remote: bool
    _allow_pickle: bool
    _known_packages: frozenset[str]
    """The user's own packages that the nodes were asked about when they joined."""
    single_observation_space: Space[Any]
    single_action_space: Space[Any]

    _pool: Pool

    def _ready_to_collect(self, collector: Collector, call: str) -> None: ...


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
        codec: Codec | None = None,
    ) -> None:
        expect("collector", "info_keys", info_keys, Sequence[str])
        expect("collector", "seed", seed, int | None, least=0)
        expect("collector", "on_loss", on_loss, Literal["rerun", "mask"])
        expect("collector", "prefetch", prefetch, bool)
        seed = None if seed is None else int(seed)
        self._envs = envs
        self._pool = envs._pool
        self.seed = seed
        self._on_loss: Literal["rerun", "mask"] = on_loss
        self._prefetch = prefetch
        self._policy = as_policy(agent)
        self.agent = agent
        prepared = self._policy.prepare(envs.single_observation_space, envs.single_action_space)
        emit(logging.INFO, f"policy recognised: {prepared.description}")
        try:
            is_sent = envs._is_remote and envs._allow_pickle
            recipe = carry(prepared.recipe, envs._known_packages) if is_sent else dumps(prepared.recipe)
        except Exception as error:  # pickling runs user code (__reduce__), which may raise anything
            what = f"{type(error).__name__}: {why(error)}"
            raise PolicyError(f"the policy cannot be pickled, so it cannot travel to the workers: {what}") from error
        self._pool.need_packages(getattr(self._policy, "packages", ()))
        own_seed = secrets.randbits(128) if seed is None else seed
        travels = recipe if envs._allow_pickle else named(self._policy)
        self._attached = Attached(travels, prepared.family, prepared.mask, own_seed, tuple(info_keys))
        rule = Always() if sync is None else sync
        if codec is None:
            codec = "auto" if envs._is_remote and isinstance(rule, APS) else "fp32"
        self._exchange = Exchange(self._policy, recipe, prepared.family, rule, max(self._pool.node_of) + 1, codec)
        self._is_recurrent = prepared.is_recurrent
        in_obs = prepared.mask in getattr(envs.single_observation_space, "spaces", {})
        self._watch = KeyWatch(None if in_obs else prepared.mask, ())  # of `step(agent)`; fragments have their own
        self._sample_every: int | None = None  # of its own; for experiments
        self._was_overdue = False
        workers = len(self._pool.slots_of)
        self._tally = Tally(workers)
        self._sequence = np.zeros(workers, dtype=np.int64)

    # -- collecting -------------------------------------------------------------------------------------------

    def rollout(self, num_steps: int, timeout_s: float | None = None, copy: bool = True) -> Rollout:
        """`num_steps` steps of every environment, acted by the agent as it is now.

        Resets the environments if nobody has yet; episodes run on from call to call.

        Args:
            timeout_s: raise `DeadlineError` after this time; the next call goes on waiting for the same fragment.
            copy: False returns views of shared memory, valid until the rollout after the next.
        """
        expect("rollout", "num_steps", num_steps, int, least=1)
        expect("rollout", "timeout_s", timeout_s, float | None, least=0)
        expect("rollout", "copy", copy, bool)
        self._envs._ready_to_collect(self, "rollout")
        begin = time.perf_counter()
        desk = self._pool.desk
        if desk.is_under_way and self._envs._attached is not self:
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
        side, taken = desk.take(deadline, timeout_s)
        parts = [self._part(worker, side, *fragment) for worker, fragment in enumerate(taken)]
        batch = self._batch(parts, num_steps, copy)
        if self._prefetch:
            self.publish()
            self._start(num_steps)
        self._tally.waiting_s += self._count_time(begin) - begin
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
        expect("stream", "num_steps", num_steps, int, least=1)
        expect("stream", "queue", queue, int, least=1)
        expect("stream", "min_envs", min_envs, int | None)
        if min_envs is not None and not 1 <= min_envs <= self._pool.num_envs:
            raise refused("stream", "min_envs", min_envs, f"1 to {self._pool.num_envs}, or None")
        expect("stream", "max_staleness", max_staleness, int | None, least=0)
        expect("stream", "timeout_s", timeout_s, float | None, least=0)
        return self._stream(num_steps, min_envs or 1, max_staleness, queue, timeout_s)

    def _stream(
        self, num_steps: int, min_envs: int, max_staleness: int | None, queue: int, timeout_s: float | None
    ) -> Generator[Rollout, None, None]:
        self._envs._ready_to_collect(self, "stream")
        desk = self._pool.desk
        if self._exchange.publisher.version < 0:
            self.publish()
        self._set_up_samples(num_steps)
        self._offer_all()
        stream = desk.open_stream(num_steps, queue)
        begin = asked = time.perf_counter()
        try:
            while True:
                items: dict[int, Item] = {}  # worker → its fragment: one per slot in a batch
                later: list[Item] = []
                deadline = None if timeout_s is None else time.monotonic() + timeout_s
                while sum(len(self._pool.slots_of[worker]) for worker in items) < min_envs:
                    self._feed(stream, max_staleness)
                    item = stream.wait(deadline, timeout_s, self._policy.knobs())
                    if self._is_too_old(item, max_staleness):
                        stream.release(item)
                    elif item.worker in items:
                        later.append(item)
                    else:
                        items[item.worker] = item
                for item in reversed(later):
                    stream.put_back(item)
                parts = [
                    self._part(worker, desk.side(item.side), stream.result(item), item.incarnations)
                    for worker, item in sorted(items.items())
                ]
                batch = self._batch(parts, num_steps, True)
                for item in items.values():
                    stream.release(item)
                self._feed(stream, max_staleness)  # before the learner works, not after
                begin = self._count_time(begin)  # goes on while the learner works: so do the workers
                self._tally.waiting_s += begin - asked
                yield batch
                asked = time.perf_counter()
        finally:
            self._count_time(begin)
            self._tally.counts["dropped_fragments"] += desk.close_stream()

    def _count_time(self, begin: float) -> float:
        now = time.perf_counter()
        self._tally.spent(now - begin)
        return now

    def _feed(self, stream: FragmentStream, max_staleness: int | None) -> None:
        """Whoever has a free place gets something to do, and before that the weights that its rule asks for."""
        for node in sorted({self._pool.node_of[worker] for worker in stream.with_room}):
            self._offer(node, max_staleness)
        stream.feed(self._policy.knobs())

    def _is_too_old(self, item: Item, max_staleness: int | None) -> bool:
        lag = self._exchange.publisher.version - item.result.version
        if max_staleness is None or lag <= max_staleness:
            return False
        self._tally.counts["dropped_fragments"] += 1
        reason = f"{lag} versions behind, max_staleness={max_staleness}"
        event = Event("dropped", reason, tuple(self._pool.slots_of[item.worker]), item.worker)
        self._pool.events.add(event, level=logging.DEBUG)
        return True

    def count_dropped(self, fragments: int) -> None:
        """These were given up before anybody took them."""
        self._tally.counts["dropped_fragments"] += fragments

    def hand_over(self) -> dict[str, Any]:
        """The agent as it is now is what the workers have; returns its knobs."""
        self.publish()
        self._offer_all()
        return self._policy.knobs()

    def look_at(self, infos: Mapping[str, Any], ended: bool) -> None:
        """Take note of the infos of one `step(agent)`: a mask that never comes is worth a warning there too."""
        if self._watch:
            names = {*infos, *infos.get("final_info", ())}
            self._watch.stepped({name: None for name in names if not (name[0] == "_" and name[1:] in names)})
            missing = self._watch.episode_ended() if ended else None
            if missing is not None:
                self._pool.desk.tell_missing(missing, list(range(self._pool.num_envs)))

    def publish(self) -> int:
        """The agent's weights, if they changed, are the newest version from now on; returns its number.

        Cheap: call it after each gradient step if you like. Nothing travels before the rule says so.
        """
        begin = time.perf_counter()
        version = self._exchange.publisher.publish()
        self._tally.publishing_s += time.perf_counter() - begin
        return version

    def _start(self, num_steps: int) -> None:
        self._set_up_samples(num_steps)
        self._offer_all()
        self._pool.desk.on_loss = self._on_loss
        self._pool.desk.start(num_steps, self._policy.knobs())

    def _set_up_samples(self, num_steps: int) -> None:
        desk = self._pool.desk
        desk.sample_within = REPLAY if self._is_recurrent else None
        steps = min(num_steps, desk.sample_within or num_steps)
        every = self._sample_every or sample_every(steps * self._pool.num_envs)
        desk.sample_every = every if self._exchange.measures_drift else 0

    def _offer_all(self) -> None:
        for node in range(len(self._exchange.holdings)):
            self._offer(node)

    def _offer(self, node: int, max_lag: int | None = None) -> None:
        """The node's workers are to have this policy, in the newest version or in one that the rule puts up with.

        `max_lag`: what is older would be dropped, and nothing ever learned from it: pull, whatever the rule says.
        """
        desk = self._pool.desk
        if self._envs._attached is not self:
            self._envs._attached = self
            self._exchange.forget()
            if self._exchange.codec == "auto" and not self._is_recurrent and self._attached.mask is None:
                some = np.arange(min(self._pool.num_envs, _FIRST_STATES))
                self._exchange.publisher.note_begin(self._pool.peek_obs(some))
            desk.attach(self._attached)
        begin = time.perf_counter()
        verdict = self._exchange.consider(node, max_lag)
        self._tally.considering_s += time.perf_counter() - begin
        if verdict.is_overdue and not self._was_overdue:
            self._was_overdue = True
            emit(
                logging.WARNING,
                f"node {node} acted {verdict.reason}: it pulls now. Unless learning is over, a loss that clips around "
                "what acted may hold the policy there: lower the threshold, or see docs/aps.md",
            )
        if verdict.pull:
            pulled = self._exchange.pull(node)
            desk.offer(node, pulled.version, pulled.weights, pulled.packed, self._exchange.keeps)
            its = [slots for slots, at in zip(self._pool.slots_of, self._pool.node_of, strict=True) if at == node]
            event = Event(
                "pull", f"version {pulled.version}: {verdict.reason}", tuple(slot for slots in its for slot in slots)
            )
            self._pool.events.add(event, level=logging.DEBUG)

    def _batch(self, parts: list[Part], num_steps: int, copy: bool) -> Rollout:
        """Put fragments together, and take note of what they tell."""
        space, leaves = self._envs.single_observation_space, self._pool.layout.obs
        batch = put_together(parts, num_steps, space, leaves, copy)
        self._note_drift(batch, parts)
        receipts = []
        for part in parts:
            result = part.result
            if result is None:
                continue
            node = self._pool.node_of[part.worker]
            stand = self._exchange.delivered(node, part.worker, result.version)
            slots = tuple(part.slots)
            receipts.append(Receipt(part.worker, slots, result.version, stand.lag, stand.drift, stand.drift_se))
            self._tally.fragment(part.worker, num_steps * len(slots), result.env_s, result.policy_s)
            self._exchange.holdings[node].fragment_bytes += size_of(part, num_steps)
        batch = replace(batch, receipts=tuple(receipts))
        self._tally.batch(batch)
        return batch

    def _part(self, worker: int, side: Side, result: FragmentResult | None, incarnations: list[int]) -> Part:
        self._sequence[worker] += 1
        slots = self._pool.slots_of[worker]
        return Part(worker, slots, side, result, incarnations, int(self._sequence[worker]) - 1)

    def _note_drift(self, batch: Rollout, parts: list[Part]) -> None:
        """The batch's samples to the drift table, in an order that does not depend on who sent them."""
        sampled: dict[int, list[tuple[Any, Any, Any]]] = {}  # version → t, column, parameters
        first = 0
        for part in parts:
            if part.result is not None and part.result.samples is not None:
                samples = part.result.samples
                entry = (samples.t, samples.columns.astype(np.int64) + first, samples.params)
                sampled.setdefault(part.result.version, []).append(entry)
                sent = sum(values.nbytes for values in samples)
                self._exchange.holdings[self._pool.node_of[part.worker]].drift_bytes += sent
            first += len(part.slots)
        for version, entries in sampled.items():
            when, who, params = (np.concatenate(pieces) for pieces in zip(*entries, strict=True))
            order = np.lexsort((who, when))
            order = order[batch.valid[when[order], who[order]]]
            self._note_states(batch, version, when[order], who[order], params[order])

    def _note_states(self, batch: Rollout, version: int, when: Any, who: Any, params: Any) -> None:
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
        self._exchange.publisher.note(version, rows, params)

    # -- evaluating -------------------------------------------------------------------------------------------

    def evaluate(
        self, agent: Any = None, *, episodes: int = 32, deterministic: bool = True, seed: int = 0, record: int = 0
    ) -> Evaluation:
        """Play whole episodes on environments of their own, in the same workers; training is not touched.

        Episode j is seeded with `seed + j`: the same agent has the same returns, whatever the number of workers.
        Attributes that `set_attr` or sticky calls gave to the environments of the same slots are set here too.

        Args:
            agent: another agent of the same shape; None: the attached one, as it is now.
            record: bring the frames of so many episodes back; see `Evaluation.save_gif`.
        """
        if fits(agent, int):
            raise refused("evaluate", "agent", agent, "an agent or None", f"write evaluate(episodes={agent})")
        expect("evaluate", "episodes", episodes, int, least=1)
        expect("evaluate", "deterministic", deterministic, bool)
        expect("evaluate", "seed", seed, int, least=0)
        expect("evaluate", "record", record, int, least=0)
        if record > episodes:
            raise refused("evaluate", "record", record, f"at most episodes={episodes}")
        self._envs._ready_to_collect(self, "evaluate")
        if deterministic and isinstance(self._attached.family, Uniform):
            raise PolicyError("a random policy has no greedy action: evaluate(deterministic=False)")
        other, policy = None, self._policy
        if agent is not None and agent is not self.agent:
            policy = as_policy(agent)
            policy.prepare(self._envs.single_observation_space, self._envs.single_action_space)
            other = encode(policy.weights())
        self.publish()
        self._offer_all()
        self._exchange.publisher.snapshot()
        others: dict[int, bytes] = {}
        for node, holding in enumerate(self._exchange.holdings):
            if other is not None:
                others[node] = other
            elif holding.weights != self._exchange.publisher.data:  # good enough to act with, but not here
                others[node] = self._exchange.publisher.data
            holding.evaluation_bytes += len(others.get(node, b""))
        played = self._pool.desk.evaluate(episodes, seed, deterministic, record, policy.knobs(), others)
        return Evaluation(
            np.array([episode.total for episode in played]),
            np.array([episode.length for episode in played]),
            np.arange(seed, seed + episodes),
            [episode.frames for episode in played if episode.frames is not None],
        )

    # -- resuming ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        version = self._exchange.publisher.version
        return {"version": version, "seed": self._attached.seed, "counts": dict(self._tally.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Versions and counters go on; actions come from the random streams of the slots' new incarnations."""
        if self._envs._attached is self and self._pool.desk.is_under_way:
            raise UsageError(
                "load_state_dict() while a fragment is under way (prefetch, or a call that timed out): "
                "take it with rollout(), or reset() first"
            )
        self._exchange.publisher.resume(state["version"])
        self._attached = self._attached._replace(seed=state["seed"])
        if self._envs._attached is self:
            self._envs._attached = None  # what the workers have is of other versions, under the same numbers
        self._tally.counts = dict(state["counts"])

    # -- looking ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and times: in all, per worker, and under `nodes` what each machine has, pulled and sent.

        `steps_per_s`, `worker_steps_per_s` and `time_shares` are of the recent batches: the first, in which the workers
        started, counts only until there is a second.
        """
        nodes = [holding.as_dict() for holding in self._exchange.holdings]
        sums = ("pulls", "weight_bytes", "evaluation_bytes", "drift_bytes", "fragment_bytes")
        stalest = max(nodes, key=lambda node: -1.0 if node["drift"] is None else node["drift"])
        return {
            **self._tally.stats(),
            **{name: sum(node[name] for node in nodes) for name in sums},
            "version": self._exchange.publisher.version,
            "held_version": min(node["version"] for node in nodes),
            "drift": stalest["drift"],
            "drift_se": stalest["drift_se"],
            "drift_at_pull": stalest["drift_at_pull"],
            "nodes": nodes,
            "restarts": sum(self._pool.events.counts.get(kind, 0) for kind in ("worker_lost", "env_error")),
            "policy": self._attached.family.name,
        }

    def summary(self) -> dict[str, float]:
        """A dozen numbers for TensorBoard or W&B; returns and lengths are means of the last 100 episodes."""
        stats = self.stats()
        mean_return, mean_length = self._tally.recent()
        return {
            "charts/episodic_return": mean_return,
            "charts/episodic_length": mean_length,
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
