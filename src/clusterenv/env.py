"""`ClusterEnv`: members composed into one `gymnasium.vector.VectorEnv`, equal to `SyncVectorEnv`.

This module checks what the user passes, keeps the rules of when a call makes sense, and shapes results. Where the
environments run is the backend's business, what happens when one fails the pool's.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clusterenv.actions import ActionReader
from clusterenv.arguments import closest, expect, refused
from clusterenv.backends import Local
from clusterenv.backends.contract import Backend, check_backend
from clusterenv.collector import Collector
from clusterenv.driver import Pool, Rows
from clusterenv.errors import ClosedError, PolicyError, SpecError, UsageError, WorkerLostError
from clusterenv.events import Event, EventLog
from clusterenv.phases import Phase, refusal
from clusterenv.policy import is_agent
from clusterenv.policy.sync.rules import Rule
from clusterenv.policy.weights.packing import Codec
from clusterenv.recovery import Recovery
from clusterenv.spec import blueprint
from clusterenv.system.interrupts import uninterrupted
from clusterenv.wire.requests import Acted

__all__ = ["ClusterEnv"]

StepResult = tuple[Any, Any, Any, Any, dict[str, Any]]

_CLOSE_TIMEOUT_S = 5.0


class ClusterEnv(VectorEnv[Any, Any, Any]):
    """Gymnasium environments in worker processes, as one vector environment.

    Args:
        env: an id, an `EnvSpec`, a function that makes an environment, a list of such functions, or `Vector(fn)`.
        num_envs: how many; not needed with a list.
        backend: where they run; `Local()` uses the cores of this machine.
        autoreset_mode: as in Gymnasium; NEXT_STEP unless told, or what a `Vector` says of itself.
        recovery: what happens when an environment or a worker fails.
        env_kwargs: for `gymnasium.make`, with an id.
        copy: False returns views of shared memory, valid until the step after the next.

    Example:
        >>> import clusterenv as ce
        >>> envs = ce.ClusterEnv("CartPole-v1", num_envs=8)
        >>> obs, infos = envs.reset(seed=1)
        >>> obs, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        >>> obs.shape, rewards.shape
        ((8, 4), (8,))
        >>> envs.close()
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        backend: Backend | None = None,
        autoreset_mode: AutoresetMode | str | None = None,
        recovery: Recovery | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        copy: bool = True,
    ) -> None:
        backend = Local() if backend is None else backend
        check_backend(backend)
        expect("ClusterEnv", "recovery", recovery, Recovery | None)
        expect("ClusterEnv", "copy", copy, bool)
        plan = blueprint(env, num_envs, env_kwargs, is_remote=backend.is_remote, allow_pickle=backend.allow_pickle)
        mode = _autoreset_mode(autoreset_mode)
        if mode is None and not plan.is_vector:
            mode = AutoresetMode.NEXT_STEP
        recovery = Recovery() if recovery is None else recovery
        self.num_envs = plan.num_envs
        self.copy = copy
        self.spec: EnvSpec | None = plan.spec
        self.is_remote, self.allow_pickle = backend.is_remote, backend.allow_pickle
        self.known_packages = frozenset(package.wanted.name for package in plan.packages)
        self._events = EventLog()
        pool = backend.start(plan, mode, recovery, self._events)
        self._pool = pool
        # Runs at garbage collection and at interpreter exit too; must not hold `self`.
        self._finalizer = weakref.finalize(self, pool.close, _CLOSE_TIMEOUT_S)
        self.autoreset_mode = pool.mode
        self.metadata = {**pool.metadata, "autoreset_mode": pool.mode}
        self.render_mode = pool.render_mode
        self.single_observation_space = pool.single_observation_space
        self.single_action_space = pool.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._reader = ActionReader(self.single_action_space, self.num_envs, recovery.check)
        self._goes_on = False  # from another run's state: slots have seeds of their own
        self._resumed: dict[str, Any] | None = None  # of the run that goes on, for the next collector
        self._stepper: Collector | None = None  # of `step(agent)`
        self.attached: Collector | None = None  # whose policy the workers have
        self._was_reset = False
        self._interrupted = False  # a step or reset is under way, or ended by an exception: its rows are unknown

    # -- Gymnasium's face -------------------------------------------------------------------------------------

    @uninterrupted
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`, a bool array [num_envs].

        An int seeds slot i with `seed + i`; a list gives each slot its own. Rows still under way are given up.
        """
        self._refuse("reset")
        expect("reset", "options", options, Mapping[Any, Any] | None)
        seeds, bases = self._seeds(seed)
        mask = None
        if options is not None and "reset_mask" in options:
            mask = self._mask(options["reset_mask"])
            # The caller's dict stays as it is: wrappers above read the mask after this call.
            options = {key: value for key, value in options.items() if key != "reset_mask"}
            if not self._was_reset and not mask.all():
                raise UsageError("the first reset() must be of all environments: leave reset_mask out")
        pool = self._pool
        dropped = pool.desk.abandon()
        if dropped and self.attached is not None:
            self.attached.count_dropped(dropped)
        self._interrupted = True
        pool.drain()
        pool.set_seed_base(bases)
        slots = list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        pool.send_reset(slots, [seeds[slot] for slot in slots], options)
        pool.collect(len(slots), None)
        rows = pool.deliver(self.copy)
        self._was_reset, self._interrupted = True, False
        if mask is None:
            return rows.obs, rows.infos
        infos = _spread(rows.infos, rows.slots, self.num_envs)
        return pool.peek_obs(np.arange(self.num_envs)), infos

    @uninterrupted
    def step(self, actions: Any) -> StepResult:
        """Step every environment with its action; row i is slot i.

        Given an agent instead (whatever `collector` takes), the workers choose the actions: `infos["action"]`,
        `infos["logprob"]` and `infos["policy_version"]` say what they did.
        """
        self._refuse("step")
        pool = self._pool
        if actions.__class__ is not np.ndarray and is_agent(actions):
            return self._step_with(actions)
        objects = self._place(actions, None)
        self._interrupted = True
        if objects is None and pool.step_all():
            result = pool.deliver_all(self.copy)
            self._interrupted = False
            return result
        if objects is not None:
            pool.send_step(None, objects)
        return self._collect_step()

    def _step_with(self, agent: Any) -> StepResult:
        collector = self._stepper
        if collector is None or collector.agent is not agent:
            collector = self._stepper = self.collector(agent)
        self._refuse_ended(None)
        knobs = collector.hand_over()
        pool = self._pool
        pool.acted = []
        self._interrupted = True
        try:
            pool.desk.tell_all()
            pool.send_step(None, None, knobs)
            obs, rewards, terminations, truncations, infos = self._collect_step()
        except PolicyError:
            self._interrupted = pool.give_up_step()  # where nobody stepped, the same step can be tried again
            raise
        ended = (terminations | truncations) & infos.get("transition_valid", True)
        collector.look_at(infos, bool(ended.any()))
        return obs, rewards, terminations, truncations, {**infos, **_acted_infos(pool.acted, self.num_envs)}

    def _collect_step(self) -> StepResult:
        pool = self._pool
        try:
            pool.collect(self.num_envs, None)
        except WorkerLostError as error:
            error.rows = self._result(pool.deliver(True))
            self._interrupted = False
            raise
        rows = pool.deliver(self.copy)
        self._interrupted = False
        return self._result(rows)

    def render(self) -> tuple[Any, ...]:
        """One frame per environment."""
        return self.call("render")

    @uninterrupted
    def call(self, name: str, *args: Any, sticky: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method (or read an attribute) of every environment.

        With `sticky=True` the call is repeated on every later incarnation of a slot.
        """
        self._refuse("call")
        self._refuse_loaded("call", name)
        return tuple(self._pool.call(name, args, kwargs, sticky=sticky))

    @uninterrupted
    def get_attr(self, name: str, slots: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Read an attribute of every environment, or of those of `slots`, in that order."""
        self._refuse("get_attr")
        self._refuse_loaded("get_attr", name)
        if slots is None:
            return tuple(self._pool.call(name, (), {}))
        chosen = self._some(slots, "get_attr")
        values = dict(zip(sorted(chosen), self._pool.call(name, (), {}, slots=sorted(chosen)), strict=True))
        return tuple(values[slot] for slot in chosen)

    @uninterrupted
    def set_attr(
        self, name: str, values: list[Any] | tuple[Any, ...] | Any, slots: Sequence[int] | None = None
    ) -> None:
        """Set an attribute: one value for all, or a list with one each. Later incarnations get it too.

        With `slots`, only those environments are touched.
        """
        self._refuse("set_attr")
        expect("set_attr", "name", name, str)
        chosen = list(range(self.num_envs)) if slots is None else self._some(slots, "set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * len(chosen)
        if len(values) != len(chosen):
            raise SpecError(
                f"set_attr({name!r}): {len(values)} values for {len(chosen)} environments; pass one, or one for each"
            )
        self._pool.set_attr(name, dict(zip(chosen, values, strict=True)))

    @uninterrupted
    def scale(self, nodes: int) -> None:
        """Run on so many nodes from now on, up to the backend's `max_nodes`. `num_envs` stays.

        Slots move when the fragment under way is done, whose last row truncates their episodes (`final_obs` has what to
        bootstrap from), or at once where none is. New nodes take over theirs when they have come; a node that is to go
        goes when its last slot has moved.
        """
        self._refuse_closed("scale")
        expect("scale", "nodes", nodes, int, least=1)
        self._pool.scale(nodes)

    def close_extras(self, **kwargs: Any) -> None:
        """End all workers, within 10 s whatever state they are in."""
        finalizer = getattr(self, "_finalizer", None)
        if finalizer is not None:
            finalizer()

    def __enter__(self) -> ClusterEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Tuples, one entry per environment, as Gymnasium's own vector environments return them against their base class.
    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator of every environment."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's generator."""
        return self.get_attr("np_random_seed")

    # -- partial batches --------------------------------------------------------------------------------------

    @uninterrupted
    def send(self, actions: Any, slots: Sequence[int] | np.ndarray[Any, Any] | None = None) -> None:
        """Step some slots (None: all) without waiting: row i of `actions` is for `slots[i]`."""
        self._refuse("send")
        if slots is None:
            chosen = None
            busy = bool(self._pool.awaited.any())
        else:
            chosen = _indices("send", "slots", slots)
            if not chosen:
                raise UsageError("send(): slots is empty")
            if len(set(chosen)) != len(chosen) or min(chosen) < 0 or max(chosen) >= self.num_envs:
                raise UsageError(f"send(): slots must be different and within 0..{self.num_envs - 1}: {chosen}")
            busy = bool(self._pool.awaited[chosen].any())
            self._pool.refuse_partial_vector(chosen)
        if busy:
            late = np.flatnonzero(self._pool.awaited)
            raise UsageError(f"send(): slots {late.tolist()} are in flight already; recv() them first")
        self._pool.send_step(chosen, self._place(actions, chosen))

    @uninterrupted
    def recv(self, min_envs: int | None = None, timeout_s: float | None = None) -> StepResult:
        """Rows of at least `min_envs` slots (None: all in flight), ascending by slot; `infos["slot"]` names them."""
        self._refuse("recv")
        if min_envs is not None:
            expect("recv", "min_envs", min_envs, int)
        if timeout_s is not None:
            expect("recv", "timeout_s", timeout_s, float, least=0)
        in_flight = int(self._pool.awaited.sum())
        if min_envs is not None and not 1 <= min_envs <= in_flight:
            raise UsageError(f"recv(min_envs={min_envs}): {in_flight} slots are in flight")
        self._pool.collect(in_flight if min_envs is None else min_envs, timeout_s)
        rows = self._pool.deliver(self.copy)
        obs, rewards, terminations, truncations, infos = self._result(rows)
        infos["slot"] = rows.slots
        return obs, rewards, terminations, truncations, infos

    # -- collecting -------------------------------------------------------------------------------------------

    def collector(
        self,
        agent: Any,
        *,
        sync: Rule | None = None,
        info_keys: Sequence[str] = (),
        seed: int | None = None,
        on_loss: Literal["rerun", "mask"] = "rerun",
        prefetch: bool = False,
        codec: Codec | None = None,
    ) -> Collector:
        """Attach a policy: the workers act with it, and `rollout` brings back what happened.

        Args:
            agent: a torch module of a known shape, `TorchPolicy`, `NumpyPolicy`, `RandomPolicy`, or an SB3 algorithm.
            sync: when changed weights travel; `Always()` unless told.
            info_keys: keys of the environments' infos to bring back, as `batch.infos`.
            seed: of the random streams with which actions are sampled, and of the first reset.
            on_loss: what becomes of a dead worker's unfinished fragment: run again, or its columns flagged invalid.
            prefetch: begin the next rollout at once, under the weights at hand, while the learner works.
            codec: how weights travel: "fp32"; "fp16"; "int8", "int4" or "int2", steps from those that the node has;
                "auto", the smallest of these that changes the policy by at most a quarter of what `sync` puts up with.
                None: "auto" on a cluster under `APS`, else "fp32".

        Example:
            >>> import torch, clusterenv as ce
            >>> policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical")
            >>> with ce.ClusterEnv("CartPole-v1", num_envs=8) as envs:
            ...     batch = envs.collector(policy, seed=1).rollout(32)
            >>> batch.obs.shape, batch.logprobs.shape
            ((32, 8, 4), (32, 8))
        """
        self._refuse_closed("collector")
        collector = Collector(
            self, agent, sync=sync, info_keys=info_keys, seed=seed, on_loss=on_loss, prefetch=prefetch, codec=codec
        )
        if self._resumed is not None:
            collector.load_state_dict(self._resumed)
            self._resumed = None
        return collector

    @property
    def pool(self) -> Pool:
        """Where the environments are; for collectors."""
        return self._pool

    def ready_to_collect(self, collector: Collector, call: str) -> None:
        """Refuse a call of the collector that makes no sense now; reset if nobody has yet."""
        self._refuse(call)
        if self._pool.is_vector:
            raise UsageError("a collector steps environments one by one: Vector(fn) has step(), send() and recv() only")
        if not self._was_reset:
            self.reset(seed=None if self._goes_on else collector.seed)

    # -- resuming ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on: seeds, incarnations, sticky attributes, the collector's counters.

        Episodes in flight cannot be resumed: a later run begins every slot anew, with seeds not used before.
        """
        self._refuse_closed("state_dict")
        collector = self.attached.state_dict() if self.attached is not None else None
        return {"format": 1, "num_envs": self.num_envs, "pool": self._pool.state_dict(), "collector": collector}

    @uninterrupted
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of an earlier run; the next `reset()` or `rollout()` begins new episodes."""
        self._refuse("load_state_dict")
        expect("load_state_dict", "state", state, Mapping[str, Any], hint="pass what state_dict() returned")
        if state.get("format") != 1:
            raise SpecError(f"load_state_dict: format {state.get('format')!r} is not known to this version")
        if state["num_envs"] != self.num_envs:
            raise SpecError(f"load_state_dict: saved with {state['num_envs']} environments, these are {self.num_envs}")
        self._pool.drain()
        self._pool.load_state_dict(state["pool"])
        self._resumed = state["collector"]
        self._goes_on = True
        self._was_reset = self._interrupted = False
        reason = "resumed; episodes that were in flight begin anew"
        self._events.add(Event("resumed", reason, tuple(range(self.num_envs))), level=logging.INFO)

    # -- looking ----------------------------------------------------------------------------------------------

    def events(self) -> tuple[Event, ...]:
        """What happened to environments and workers, newest last (the last 1000)."""
        return self._events()

    def stats(self) -> dict[str, Any]:
        """Counters: workers, their process ids, events by kind, slow slots, time per step, incarnations."""
        self._refuse_closed("stats")
        return self._pool.stats()

    # -- inside -----------------------------------------------------------------------------------------------

    def _place(self, actions: Any, slots: list[int] | None) -> list[Any] | None:
        """Check actions and put them into shared memory; those that do not fit there are returned."""
        pool = self._pool
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._refuse_ended(slots)
        if pool.layout.actions_are_shared:
            arrays = self._reader.arrays(actions, slots)
            for shared, array in zip(pool.buffers.actions, arrays, strict=True):
                if slots is None:
                    shared[...] = array
                else:
                    shared[slots] = array
            return None
        return self._reader.objects(actions, list(range(self.num_envs)) if slots is None else slots)

    def _refuse_ended(self, slots: list[int] | None) -> None:
        pool = self._pool
        if self.autoreset_mode is not AutoresetMode.DISABLED:
            return
        ended = pool.ended if slots is None else pool.ended[slots]
        if ended.any():
            over = np.flatnonzero(pool.ended).tolist()
            raise UsageError(
                f"the episodes of slots {over} ended, and autoreset is DISABLED: "
                "reset(options={'reset_mask': terminations | truncations}) first"
            )

    def _result(self, rows: Rows) -> StepResult:
        infos = rows.infos
        if rows.lost:
            n = len(rows.slots)
            everyone = np.ones(n, dtype=np.bool_)
            valid, with_worker = everyone.copy(), np.zeros(n, dtype=np.bool_)
            reasons = np.full(n, None, dtype=object)
            for row, loss in rows.lost.items():
                valid[row], with_worker[row], reasons[row] = False, loss.with_worker, loss.reason
            infos = {
                **infos,
                "transition_valid": valid,
                "_transition_valid": everyone,
                "worker_lost": with_worker,
                "_worker_lost": everyone.copy(),
                "loss_reason": reasons,
                "_loss_reason": ~valid,
            }
        return rows.obs, rows.rewards, rows.terminations, rows.truncations, infos

    def _seeds(self, seed: Any) -> tuple[list[int | None], list[int | None]]:
        """Per slot: the seed of this reset, and what later incarnations derive theirs from."""
        n = self.num_envs
        if seed is None:
            return [None] * n, [None] * n
        if isinstance(seed, (list, tuple, np.ndarray)):
            if len(seed) != n:
                raise SpecError(f"reset(seed=...): {len(seed)} seeds for {n} environments")
            try:
                seeds = [None if value is None else operator.index(value) for value in seed]
            except TypeError:
                raise refused("reset", "seed", seed, "whole numbers, or None for a slot") from None
            return seeds, list(seeds)
        expect("reset", "seed", seed, int | Sequence[int] | None)
        base = operator.index(seed)
        return [base + i for i in range(n)], [base] * n

    def _mask(self, mask: Any) -> Any:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise SpecError("options['reset_mask'] must be a numpy array of dtype bool")
        if mask.shape != (self.num_envs,):
            raise SpecError(f"options['reset_mask'] must have shape ({self.num_envs},), got {mask.shape}")
        if not mask.any():
            raise SpecError("options['reset_mask'] selects no environment")
        return mask

    def _some(self, slots: Any, what: str) -> list[int]:
        """Check slots whose attributes are read or set."""
        chosen = _indices(what, "slots", slots)
        if len(set(chosen)) != len(chosen) or not all(0 <= slot < self.num_envs for slot in chosen):
            raise refused(what, "slots", slots, f"different slots within 0..{self.num_envs - 1}")
        if self._pool.is_vector:
            raise UsageError(f"{what}(slots=...): a Vector(fn) has attributes for all its slots; leave slots out")
        return chosen

    def _refuse_closed(self, what: str) -> None:
        if self.closed or not self._finalizer.alive:
            raise ClosedError(f"{what}(): these environments were closed; make a new ClusterEnv")

    @property
    def _phase(self) -> Phase:
        pool = self._pool
        if self._interrupted:
            return Phase.INTERRUPTED
        if not self._was_reset:
            return Phase.NEW
        if pool.desk.is_streaming:
            return Phase.STREAMING
        if pool.desk.is_under_way:
            return Phase.COLLECTING
        return Phase.PARTIAL if pool.in_flight else Phase.IDLE

    def _refuse(self, call: str) -> None:
        """Raise where this call makes no sense now."""
        self._refuse_closed(call)
        text = refusal(call, self._phase)
        if text is not None:
            slots, num_steps = np.flatnonzero(self._pool.awaited).tolist(), self._pool.desk.num_steps
            raise UsageError(text.format(slots=slots, num_steps=num_steps))

    def _refuse_loaded(self, what: str, name: str) -> None:
        if self._goes_on and not self._was_reset:
            raise UsageError(
                f"{what}({name!r}) after load_state_dict(): the environments begin anew with the next reset(), "
                "with the attributes of the loaded state; call reset() first"
            )


def _acted_infos(parts: list[Acted], num_envs: int) -> dict[str, Any]:
    """Who acted how, as Gymnasium lays infos out; rows without an action (a lost worker's) are masked out."""
    there = np.zeros(num_envs, dtype=np.bool_)
    infos: dict[str, Any] = {}
    for part in parts:
        columns = {"action": part.actions, "logprob": part.logprobs, "policy_version": np.int64(part.version)}
        for name, values in columns.items():
            shape = (num_envs, *np.shape(values)[1:])
            array = infos.setdefault(name, np.zeros(shape, dtype=np.asarray(values).dtype))
            array[part.slots] = values
        there[part.slots] = True
    return {**infos, **{f"_{name}": there.copy() for name in infos}}


def _indices(call: str, name: str, values: Any) -> list[int]:
    """Return slots as ints; quick where they are some."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        hint = "write np.flatnonzero(mask)" if getattr(values, "dtype", None) == np.bool_ else ""
        raise refused(call, name, values, "a list of whole numbers", hint) from None


def _autoreset_mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    if mode is None or isinstance(mode, AutoresetMode):
        return mode
    try:
        return AutoresetMode(mode)
    except ValueError:
        names = [known.value for known in AutoresetMode]
        near = closest(mode, names) if isinstance(mode, str) else None
        wanted = f"an AutoresetMode, or one of {', '.join(names)}"
        hint = f'did you mean "{near}"?' if near else ""
        raise refused("ClusterEnv", "autoreset_mode", mode, wanted, hint) from None


def _spread(infos: dict[str, Any], slots: Any, n: int) -> dict[str, Any]:
    """Infos of some rows as infos of all slots, as Gymnasium returns them from a masked reset."""
    if len(slots) == n:
        return infos
    spread: dict[str, Any] = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            spread[key] = _spread(value, slots, n)
        else:
            fill = np.full((n, *value.shape[1:]), None, dtype=object)
            spread[key] = fill if value.dtype == object else np.zeros((n, *value.shape[1:]), dtype=value.dtype)
            spread[key][slots] = value
    return spread
