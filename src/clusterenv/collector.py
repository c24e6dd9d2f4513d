"""`Collector`: a policy attached to environments. The workers act and step; the learner gets `Rollout`s.

Created by `ClusterEnv.collector`. Checks what the user passes, and whether the call is allowed now; `Collection` runs
and assembles the fragments.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clusterenv.arguments import expect, fits, refused
from clusterenv.code.missing import carry, dumps, why
from clusterenv.collection import Collection
from clusterenv.engine.collecting.collecting import Attached
from clusterenv.engine.collecting.counters import Counters
from clusterenv.engine.collecting.fragments import Mode, OnLoss
from clusterenv.engine.collecting.placement import Act, Placement
from clusterenv.engine.collecting.summary import summarize
from clusterenv.engine.collecting.synchronization import Synchronization
from clusterenv.errors import EnvError, PolicyError, UsageError, WorkerLostError
from clusterenv.events import emit
from clusterenv.head_acting import HeadActing
from clusterenv.policy import as_policy
from clusterenv.policy.acting.base import Prepared
from clusterenv.policy.acting.distributions import Uniform
from clusterenv.policy.acting.named import as_plain
from clusterenv.policy.sync.exchange import Exchange
from clusterenv.policy.sync.rules import APS, Always, Rule
from clusterenv.policy.weights.encoding import encode
from clusterenv.policy.weights.packing import Codec
from clusterenv.rollout import Evaluation, Rollout
from clusterenv.system.interrupts import checkpoint, uninterrupted, uninterrupted_generator
from clusterenv.worker.key_watch import KeyWatch

if TYPE_CHECKING:
    from clusterenv.env import ClusterEnv

__all__ = ["Collector"]


class Collector:
    """A policy attached to environments; see `ClusterEnv.collector`."""

    def __init__(
        self,
        envs: ClusterEnv,
        agent: Any,
        *,
        sync: Rule | None = None,
        info_keys: Sequence[str] = (),
        seed: int | None = None,
        on_loss: OnLoss = "rerun",
        prefetch: bool = False,
        codec: Codec | None = None,
        act: Act = "workers",
    ) -> None:
        expect("collector", "act", act, Act)
        expect("collector", "info_keys", info_keys, Sequence[str])
        expect("collector", "seed", seed, int | None, least=0)
        expect("collector", "on_loss", on_loss, OnLoss)
        expect("collector", "prefetch", prefetch, bool)
        seed = None if seed is None else int(seed)
        self._envs = envs
        self._driver = envs._driver
        self.seed = seed
        self._on_loss: OnLoss = on_loss
        self._prefetch = prefetch
        self._policy = as_policy(agent)
        self.agent = agent
        prepared = self._prepare(envs)
        runs_in = f"{prepared.runtime} ({prepared.reason})" if prepared.reason else prepared.runtime
        emit(logging.INFO, f"policy recognised: {prepared.description}; runs in {runs_in}")
        try:
            is_sent = envs._is_remote and envs._allow_pickle
            recipe = carry(prepared.recipe, envs._known_packages) if is_sent else dumps(prepared.recipe)
        except Exception as error:  # pickling runs user code (__reduce__), which may raise anything
            what = f"{type(error).__name__}: {why(error)}"
            raise PolicyError(f"the policy cannot be pickled, so it cannot travel to the workers: {what}") from error
        own_seed = secrets.randbits(128) if seed is None else seed
        travels = recipe if envs._allow_pickle else as_plain(self._policy, prepared)
        attached = Attached(travels, prepared.family, prepared.mask, own_seed, tuple(info_keys))
        rule = Always() if sync is None else sync
        if codec is None:
            codec = "auto" if envs._is_remote and isinstance(rule, APS) else "fp32"
        exchange = Exchange(self._policy, recipe, prepared.family, rule, codec)
        self._counts = Counters(len(self._driver.slots_of))
        self._sync = Synchronization(exchange, self._driver.weights, prepared, attached, self._counts)
        self._collection = Collection(self._driver, self._policy, self._sync)
        if act != "workers" and (prefetch or isinstance(sync, APS) or (act == "auto" and prepared.is_recurrent)):
            given = "prefetch" if prefetch else "APS" if isinstance(sync, APS) else "a recurrent policy"
            raise UsageError(f'collector(act={act!r}) does not go with {given}: use act="workers"')
        self._placement = Placement(act)
        self._head = None if act == "workers" else HeadActing(envs, self._policy, prepared, attached, self._counts)
        in_obs = prepared.mask in getattr(envs.single_observation_space, "spaces", {})
        self._watch = KeyWatch(None if in_obs else prepared.mask, ())  # of `step(agent)`; fragments have their own

    def _prepare(self, envs: ClusterEnv) -> Prepared:
        """Prepare the policy for these environments, and for nodes that may lack ONNX Runtime."""
        spaces = envs.single_observation_space, envs.single_action_space
        prepared = self._policy.prepare(*spaces)
        try:
            self._driver.need_packages(getattr(self._policy, "packages", ()))
        except PolicyError as error:
            stay_in_torch = getattr(self._policy, "stay_in_torch", None)
            if stay_in_torch is None or not stay_in_torch(str(error)):
                raise
            prepared = self._policy.prepare(*spaces)
            self._driver.need_packages(getattr(self._policy, "packages", ()))
        return prepared

    # -- collecting -------------------------------------------------------------------------------------------

    @uninterrupted
    def rollout(
        self,
        num_steps: int,
        timeout_s: float | None = None,
        copy: bool = True,
        *,
        balance: bool = False,
        deadline_s: float | None = None,
    ) -> Rollout:
        """Collect `num_steps` steps of every environment, acted by the agent with its current weights.

        Resets the environments if they have not been reset yet; episodes continue from call to call.

        Args:
            timeout_s: raise `DeadlineError` after this time; the next call waits for the same fragments.
            copy: False returns views of shared memory, valid until the rollout after the next.
            balance: slower workers collect fewer steps, by their speed in earlier rollouts, so that all finish at the
                same time; the other rows of their columns are not valid. How many rows a slot gets then depends on
                timing; what is in them does not.
            deadline_s: do not wait longer for slow workers, once there is a fragment of another one: the columns of
                those that are late are not valid, and the next rollout has their fragments.
        """
        expect("rollout", "num_steps", num_steps, int, least=1)
        expect("rollout", "timeout_s", timeout_s, float | None, least=0)
        expect("rollout", "copy", copy, bool)
        expect("rollout", "balance", balance, bool)
        expect("rollout", "deadline_s", deadline_s, float | None, least=0)
        self._envs._ready_to_collect(self, "rollout")
        begin = time.perf_counter()
        collection, fragments = self._collection, self._collection.fragments
        if fragments.mode is Mode.ROLLOUT and fragments.owner is not self._counts:
            raise UsageError("another collector's fragment is under way: take it with its rollout(), or reset() first")
        if fragments.mode is Mode.ROLLOUT and fragments.num_steps != num_steps:
            raise UsageError(
                f"a fragment of {fragments.num_steps} steps is under way (prefetch, a call that timed out, or a late "
                f"worker): ask for {fragments.num_steps} steps, or reset() first"
            )
        if self._head is not None:
            if timeout_s is not None or deadline_s is not None or balance:
                raise UsageError('timeout_s, deadline_s and balance are for act="workers"')
            if self._placement.next == "head":
                return self._rollout_here(num_steps, copy)
        if not fragments.is_rollout_begun:
            self._start(num_steps, balance)
        elif not self._sync.is_attached:
            collection.decide_all()  # another collector has evaluated: lost fragments run again with this policy
        batch = collection.batch(collection.wait_for_rollout(timeout_s, deadline_s), num_steps, copy)
        if self._prefetch:
            self._start(num_steps, balance)
        self._counts.waiting_s += self._count_time(begin) - begin
        self._placement.measured("workers", int(batch.valid.sum()), time.perf_counter() - begin)
        return batch

    def _rollout_here(self, num_steps: int, copy: bool) -> Rollout:
        """Collect a rollout with the policy in this process."""
        assert self._head is not None
        begin = time.perf_counter()
        batch = self._head.rollout(num_steps, self.publish(), copy)
        self._counts.waiting_s += self._count_time(begin) - begin
        self._placement.measured("head", int(batch.valid.sum()), time.perf_counter() - begin)
        return batch

    def _start(self, num_steps: int, balance: bool) -> None:
        self.publish()
        self._collection.start_rollout(num_steps, self._on_loss, balance)

    def stream(
        self,
        num_steps: int,
        min_envs: int | None = None,
        *,
        max_staleness: int | None = None,
        queue: int = 2,
        timeout_s: float | None = None,
    ) -> Generator[Rollout, None, None]:
        """Yield fragments of `num_steps` steps as they arrive: no worker waits for another, or for the learner.

        Call `publish()` when the agent has learned; workers get new weights, as the rule says, between two fragments.
        Leave the loop at any time: running fragments are then finished and dropped. If the policy acts at the head,
        each batch has all environments, and these wait while the learner works.

        Args:
            min_envs: wait for fragments of at least this many environments; None: one worker's at a time.
            max_staleness: drop fragments acted by a version more than this many behind the newest; see `stats()`.
            queue: how many fragments a worker may run ahead. A higher number evens out waits, and makes data older.
            timeout_s: raise `DeadlineError` if nothing arrives for this long.
        """
        expect("stream", "num_steps", num_steps, int, least=1)
        expect("stream", "queue", queue, int, least=1)
        expect("stream", "min_envs", min_envs, int | None)
        if min_envs is not None and not 1 <= min_envs <= self._driver.num_envs:
            raise refused("stream", "min_envs", min_envs, f"1 to {self._driver.num_envs}, or None")
        expect("stream", "max_staleness", max_staleness, int | None, least=0)
        expect("stream", "timeout_s", timeout_s, float | None, least=0)
        return self._stream(num_steps, min_envs or 1, max_staleness, queue, timeout_s)

    @uninterrupted_generator
    def _stream(
        self, num_steps: int, min_envs: int, max_staleness: int | None, queue: int, timeout_s: float | None
    ) -> Generator[Rollout, None, None]:
        try:
            while self._head is not None and (not self._placement.is_decided or self._placement.next == "head"):
                yield checkpoint(self.rollout(num_steps))
            self._envs._ready_to_collect(self, "stream")
            if self._sync.publisher.version < 0:
                self.publish()
            self._collection.start_stream(num_steps, queue)
            yield from self._batches(num_steps, min_envs, max_staleness, timeout_s)
        finally:
            checkpoint()

    @uninterrupted_generator  # `close` calls it without `_stream`
    def _batches(
        self, num_steps: int, min_envs: int, max_staleness: int | None, timeout_s: float | None
    ) -> Generator[Rollout, None, None]:
        collection = self._collection
        begin = asked = time.perf_counter()
        try:
            while True:
                fragments = collection.next_batch(min_envs, max_staleness, timeout_s)
                batch = collection.batch(fragments, num_steps, copy=True)
                collection.release(fragments)
                collection.feed(max_staleness)  # before the learner works, not after
                begin = self._count_time(begin)  # includes the learner's work: workers collect during it
                self._counts.waiting_s += begin - asked
                yield checkpoint(batch)
                asked = time.perf_counter()
        except (GeneratorExit, EnvError, PolicyError, WorkerLostError):
            collection.stop_stream()
            raise
        except BaseException:  # Ctrl-C, or a timeout: an environment may hang, and the next call waits for the rest
            collection.fragments.drop()
            raise
        finally:
            self._count_time(begin)

    def _count_time(self, begin: float) -> float:
        now = time.perf_counter()
        self._counts.spent(now - begin)
        return now

    def hand_over(self) -> dict[str, Any]:
        """Send the workers the agent with its current weights. Return its knobs."""
        self.publish()
        self._collection.hand_over()
        return self._policy.knobs()

    def look_at(self, infos: Mapping[str, Any], ended: bool) -> None:
        """Check the infos of one `step(agent)`: warn there too about an action mask that never appears."""
        if self._watch:
            names = {*infos, *infos.get("final_info", ())}
            self._watch.stepped({name: None for name in names if not (name[0] == "_" and name[1:] in names)})
            missing = self._watch.episode_ended() if ended else None
            if missing is not None:
                self._driver.collecting.report_missing(missing, list(range(self._driver.num_envs)))

    @uninterrupted
    def publish(self) -> int:
        """Make the agent's weights the newest version, if they have changed. Return the newest version's number.

        Cheap enough to call after each gradient step: the weights of a torch module are read once, not copied. Nothing
        is sent before the rule says so.
        """
        begin = time.perf_counter()
        version = self._sync.publisher.publish()
        self._counts.publishing_s += time.perf_counter() - begin
        return version

    # -- evaluating -------------------------------------------------------------------------------------------

    @uninterrupted
    def evaluate(
        self, agent: Any = None, *, episodes: int = 32, deterministic: bool = True, seed: int = 0, record: int = 0
    ) -> Evaluation:
        """Play whole episodes on separate environments in the same workers; training is not affected.

        Episode j is seeded with `seed + j`: the same agent gets the same returns, whatever the number of workers.
        Attributes that `set_attr` or sticky calls gave to the environments of the same slots are set here too. The
        result has each episode's last info, and from these the `success_rate`.

        Args:
            agent: another agent of the same shape; None: the attached one, with its current weights.
            record: number of episodes whose frames to return; see `Evaluation.save_gif`.
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
        if deterministic and isinstance(self._sync.policy.family, Uniform):
            raise PolicyError("a random policy has no greedy action: evaluate(deterministic=False)")
        other, policy = None, self._policy
        if agent is not None and agent is not self.agent:
            policy = as_policy(agent)
            policy.prepare(self._envs.single_observation_space, self._envs.single_action_space)
            other = encode(policy.weights())
        self.publish()
        played = self._collection.evaluate(episodes, seed, deterministic, record, policy.knobs(), other)
        return Evaluation(
            np.array([episode.total for episode in played]),
            np.array([episode.length for episode in played]),
            np.arange(seed, seed + episodes),
            [episode.frames for episode in played if episode.frames is not None],
            [episode.info for episode in played],
        )

    # -- resuming ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._sync.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue versions and counters; actions come from the random streams of the slots' new incarnations."""
        if self._collection.fragments.owner is self._counts:
            raise UsageError(
                "load_state_dict() while a fragment is under way (prefetch, a call that timed out, or a late worker): "
                "take it with rollout(), or reset() first"
            )
        self._sync.publisher.resume(state["version"])
        self._sync.policy = self._sync.policy._replace(seed=state["seed"])
        if self._sync.is_attached:
            self._sync.detach()  # the workers have other versions under the same numbers
        self._counts.counts |= state["counts"]

    # -- statistics -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters and times: totals, per worker, and under `nodes` what each machine has, pulled and sent.

        `steps_per_s`, `worker_steps_per_s` and `time_shares` cover the recent batches: the first, in which the workers
        started, counts only until there is a second. `worker_step_s`: time that each worker needs for one step of its
        slots. `pushes` and `pushed_bytes`: what `Always` would have sent, with whole weights, at the same requests.
        `mean_lag` and `mean_drift`: of the recent fragments, when they were delivered. `threshold`: drift above which
        the rule pulls, if it has one. `policy`: the kind of distribution, what runs the policy on the workers ("onnx",
        "torch" or "numpy"), and why.
        """
        return {
            **self._counts.stats(),
            **self._sync.stats(),
            "restarts": sum(self._driver.events.counts.get(kind, 0) for kind in ("worker_lost", "env_error")),
            "policy": self._sync.described,
            "acts": {"place": self._placement.next, "reason": self._placement.reason},
        }

    def summary(self) -> dict[str, float]:
        """Return numbers for a logger (see `log_to`); returns and lengths are means of the last 100 episodes.

        `sync/pulls_saved` and `sync/bytes_saved` compare with what `Always` would have sent, with whole weights;
        `sync/lag` and `sync/mean_drift` are means of the recent fragments. What is not known is NaN.
        """
        return summarize(self.stats(), *self._counts.recent())
