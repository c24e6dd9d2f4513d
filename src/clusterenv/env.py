"""`ClusterEnv`: environments in worker processes as one `gymnasium.vector.VectorEnv`, equal to `SyncVectorEnv`.

This module implements the public calls; `vector/` checks when they are possible, reads arguments and shapes results.
The backend decides where the environments run, the engine what happens when one fails.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from clusterenv.arguments import expect
from clusterenv.backends import Local, starting
from clusterenv.backends.contract import Backend, check_backend
from clusterenv.collector import Collector
from clusterenv.engine.collecting.fragments import OnLoss
from clusterenv.engine.collecting.placement import Act
from clusterenv.errors import PendingCallError, PolicyError
from clusterenv.events import Event, EventLog
from clusterenv.monitor import start as monitor
from clusterenv.policy import is_agent
from clusterenv.policy.sync.rules import Rule
from clusterenv.policy.weights.packing import Codec
from clusterenv.recovery import Recovery
from clusterenv.simulators.native import Simulator, native
from clusterenv.spec import blueprint
from clusterenv.system.interrupts import uninterrupted
from clusterenv.system.teardown import Teardown
from clusterenv.vector import parameters
from clusterenv.vector.actions import ActionReader
from clusterenv.vector.async_calls import AsyncCalls
from clusterenv.vector.guard import CallGuard
from clusterenv.vector.results import StepResult, acted_infos, step_result

__all__ = ["ClusterEnv"]

_CLOSE_WAIT_S = 10.0  # the longest that `close` waits


class ClusterEnv(AsyncCalls):
    """Gymnasium environments in worker processes, as one vector environment.

    Args:
        env: an id, an `EnvSpec`, a function that makes an environment, a list of such functions, or `Vector(fn)`.
        num_envs: number of environments; not needed with a list.
        backend: where they run; default: `Local()`, the cores of this machine.
        autoreset_mode: as in Gymnasium; default: NEXT_STEP, or the mode of a `Vector`.
        recovery: what to do when an environment or a worker fails.
        env_kwargs: keyword arguments for `gymnasium.make`, with an id.
        copy: False returns views of shared memory, valid until the step after the next.
        observation_mode: as in Gymnasium: "same", one observation space for all; "different", spaces with the same
            shape and dtype but different bounds; or the pair of spaces (batched, single) to use for such environments.
        resume: a file from which a restarted script can continue after this one was killed (docs/recovery.md).
        simulator: with an id: step all environments of a worker at once, in EnvPool ("envpool"), in the vector
            environment that the id is registered with ("vector_entry_point"), or in the first of these that there is
            ("native"; the log says which). Default: one by one.
        name: of this run for `clusterenv status` and the like; default: that of the script.
        dashboard: show a page about this run; its address is logged (docs/monitoring.md).

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
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        resume: str | os.PathLike[str] | None = None,
        simulator: Simulator | None = None,
        name: str | None = None,
        dashboard: bool = False,
    ) -> None:
        backend = Local() if backend is None else backend
        check_backend(backend)
        expect("ClusterEnv", "recovery", recovery, Recovery | None)
        expect("ClusterEnv", "copy", copy, bool)
        expect("ClusterEnv", "simulator", simulator, Simulator | None)
        monitor.check(name, dashboard)
        if simulator is not None:
            env, env_kwargs = native(env, simulator, env_kwargs), None
        plan = blueprint(env, num_envs, env_kwargs, is_remote=backend.is_remote, allow_pickle=backend.allow_pickle)
        self.observation_mode = parameters.read_observation_mode(observation_mode, plan.is_vector)
        plan = replace(plan, observation_mode=self.observation_mode)
        mode = parameters.read_autoreset_mode(autoreset_mode, plan.is_vector)
        recovery = Recovery() if recovery is None else recovery
        self.num_envs = plan.num_envs
        self.copy = copy
        self.spec: EnvSpec | None = plan.spec
        self._is_vector = plan.is_vector
        self._is_remote, self._allow_pickle = backend.is_remote, backend.allow_pickle
        self._known_packages = frozenset(package.wanted.name for package in plan.packages)
        self._events = EventLog()
        driver, close = starting.start(backend, plan, mode, recovery, self._events, resume)
        self._driver = driver
        # Also runs at garbage collection and at interpreter exit; must not hold `self`.
        self._teardown = Teardown(
            monitor.watch(driver, close, plan.spec or env, backend, name, dashboard), _CLOSE_WAIT_S
        )
        weakref.finalize(self, self._teardown.begin).atexit = False
        self._guard = CallGuard(driver, self._teardown)
        self.autoreset_mode = driver.mode
        self.metadata = {**driver.metadata, "autoreset_mode": driver.mode}
        self.render_mode = driver.render_mode
        self.single_observation_space = driver.single_observation_space
        self.single_action_space = driver.single_action_space
        self.observation_space = driver.observation_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._reader = ActionReader(self.single_action_space, self.num_envs, recovery.check)
        self._resumed: dict[str, Any] | None = None  # loaded collector state, for the next collector
        self._stepper: Collector | None = None  # of `step(agent)`

    # -- Gymnasium's interface --------------------------------------------------------------------------------

    @uninterrupted
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`, a bool array [num_envs].

        An int seeds slot i with `seed + i`; a list gives each slot its own seed. Rows in flight are discarded.
        """
        self._guard.check("reset")
        arguments = parameters.read_reset("reset", seed, options, self.num_envs)
        self._driver.collecting.fragments.drop()
        self._send_reset(arguments)
        return self._finish_reset(arguments, None)

    @uninterrupted
    def step(self, actions: Any) -> StepResult:
        """Step every environment with its action; row i is slot i.

        If `actions` is an agent (anything that `collector` accepts), the workers choose the actions, and report them
        in `infos["action"]`, `infos["logprob"]` and `infos["policy_version"]`.
        """
        self._guard.check("step")
        driver = self._driver
        if actions.__class__ is not np.ndarray and is_agent(actions):
            return self._step_with(actions)
        guard = self._guard
        if guard.may_end:
            guard.check_not_ended(None)
        objects = self._reader.place(actions, None, driver.rows.buffers.actions)
        guard.is_interrupted = True
        if objects is None:
            result = driver.step_all(self.copy)
            if result is not None:
                guard.is_interrupted = False
                return result
        else:
            driver.send_step(None, objects)
        return self._finish_step()

    def _step_with(self, agent: Any) -> StepResult:
        collector = self._stepper
        if collector is None or collector.agent is not agent:
            collector = self._stepper = self.collector(agent)
        self._guard.check_not_ended(None)
        knobs = collector.hand_over()
        driver = self._driver
        self._guard.is_interrupted = True
        try:
            driver.send_step(None, None, knobs)
            obs, rewards, terminations, truncations, infos = self._finish_step()
        except PolicyError:
            self._guard.is_interrupted = driver.give_up_step()  # if no environment stepped, the step can be retried
            raise
        ended = (terminations | truncations) & infos.get("transition_valid", True)
        collector.look_at(infos, bool(ended.any()))
        return obs, rewards, terminations, truncations, {**infos, **acted_infos(driver.acted, self.num_envs)}

    def render(self) -> tuple[Any, ...]:
        """Return one frame per environment."""
        return self.call("render")

    def call(
        self, name: str, *args: Any, sticky: bool = False, slots: Sequence[int] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call a method (or read an attribute) of every environment, or of those of `slots`, in that order.

        With `sticky=True` the call is repeated on every later incarnation of these slots. `sticky` and `slots` are not
        passed on: if the method has a parameter of that name, pass it by position.
        """
        return self._call("call", name, args, kwargs, slots, sticky)

    def get_attr(self, name: str, slots: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Read an attribute of every environment, or of those of `slots`, in that order."""
        return self._call("get_attr", name, (), {}, slots)

    @uninterrupted
    def _call(
        self, what: str, name: str, args: Any, kwargs: Any, slots: Sequence[int] | None, sticky: bool = False
    ) -> tuple[Any, ...]:
        self._guard.check(what)
        self._guard.check_not_loaded(what, name)
        driver = self._driver
        chosen = None if slots is None else parameters.read_slots(what, slots, self.num_envs, self._is_vector)
        ascending = None if chosen is None else sorted(chosen)
        values = driver.results(driver.send_call(name, args, kwargs, ascending))
        if sticky:
            driver.repeat_call(name, args, kwargs, ascending)
        if chosen is None or ascending is None:
            return tuple(values)
        value_of = dict(zip(ascending, values, strict=True))
        return tuple(value_of[slot] for slot in chosen)

    @uninterrupted
    def set_attr(
        self, name: str, values: list[Any] | tuple[Any, ...] | Any, slots: Sequence[int] | None = None
    ) -> None:
        """Set an attribute: one value for all, or a list with one value each. Later incarnations get it too.

        With `slots`, set it only in those environments.
        """
        self._guard.check("set_attr")
        expect("set_attr", "name", name, str)
        chosen = parameters.read_slots("set_attr", slots, self.num_envs, self._is_vector)
        self._driver.set_attr(name, dict(zip(chosen, parameters.read_values(name, values, len(chosen)), strict=True)))

    @uninterrupted
    def scale(self, nodes: int) -> None:
        """Run on this number of nodes from now on, up to the backend's `max_nodes`. `num_envs` does not change.

        Slots move at the end of the current fragment, whose last row truncates their episodes (bootstrap from
        `final_obs`), or at once if there is none. New nodes take over their slots when they have joined; a node to be
        removed leaves when its last slot has moved.
        """
        self._guard.check_open("scale")
        expect("scale", "nodes", nodes, int, least=1)
        self._driver.scale(nodes)

    def close_extras(self, **kwargs: Any) -> None:
        """End all workers within 10 s, whatever state they are in."""
        teardown = getattr(self, "_teardown", None)
        if teardown is not None:
            teardown()
            self._guard.warn_of_pending()

    def __enter__(self) -> ClusterEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Tuples with one entry per environment, which Gymnasium's vector environments return too, unlike their base class.
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
        self._guard.check("send")
        chosen = None
        if slots is not None:
            chosen = parameters.read_send_slots(slots, self.num_envs)
            self._guard.check_whole_vectors(chosen)
        awaited = self._driver.rows.awaited
        if (awaited if chosen is None else awaited[chosen]).any():
            late = np.flatnonzero(awaited).tolist()
            raise PendingCallError(f"send(): slots {late} are in flight already; recv() them first", "step")
        self._guard.check_not_ended(chosen)
        self._driver.send_step(chosen, self._reader.place(actions, chosen, self._driver.rows.buffers.actions))

    @uninterrupted
    def recv(self, min_envs: int | None = None, timeout_s: float | None = None) -> StepResult:
        """Return rows of at least `min_envs` slots (None: all in flight), sorted; `infos["slot"]` names the slots."""
        self._guard.check("recv")
        in_flight = int(self._driver.rows.awaited.sum())
        parameters.check_recv(min_envs, timeout_s, in_flight)
        self._driver.collect(in_flight if min_envs is None else min_envs, timeout_s)
        rows = self._driver.deliver(self.copy)
        obs, rewards, terminations, truncations, infos = step_result(rows)
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
        on_loss: OnLoss = "rerun",
        prefetch: bool = False,
        codec: Codec | None = None,
        act: Act = "workers",
    ) -> Collector:
        """Attach a policy: the workers act with it, and `rollout` returns what they collected.

        Args:
            agent: a torch module of a known shape, `TorchPolicy`, `NumpyPolicy`, `RandomPolicy`, or an SB3 algorithm.
            sync: the rule for sending changed weights; default: `Always()`.
            info_keys: keys of the environments' infos to return, as `batch.infos`.
            seed: of the random streams that sample actions, and of the first reset.
            on_loss: what to do with a lost worker's fragment: run it again ("rerun"), or flag its rows ("mask").
            prefetch: begin the next rollout at once, with the current weights, while the learner works.
            codec: how weights are encoded: "fp32"; "fp16"; "int8", "int4" or "int2", steps from what the node has;
                "auto", the smallest of these that adds at most a quarter of the drift that `sync` tolerates. None:
                "auto" on a cluster with `APS`, else "fp32".
            act: where the policy acts: on the "workers", at the "head" (in batches, on its device), or "auto".

        Example:
            >>> import torch, clusterenv as ce
            >>> policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical")
            >>> with ce.ClusterEnv("CartPole-v1", num_envs=8) as envs:
            ...     batch = envs.collector(policy, seed=1).rollout(32)
            >>> batch.obs.shape, batch.logprobs.shape
            ((32, 8, 4), (32, 8))
        """
        self._guard.check_open("collector")
        collector = Collector(
            self,
            agent,
            sync=sync,
            info_keys=info_keys,
            seed=seed,
            on_loss=on_loss,
            prefetch=prefetch,
            codec=codec,
            act=act,
        )
        if self._resumed is not None:
            collector.load_state_dict(self._resumed)
            self._resumed = None
        return collector

    def _ready_to_collect(self, collector: Collector, call: str) -> None:
        """Refuse a call of the collector that is not possible now; reset the environments if they never were."""
        self._guard.check(call)
        if not self._guard.was_reset:
            self.reset(seed=None if self._guard.is_resumed else collector.seed)

    # -- resuming ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to resume: seeds, incarnations, sticky attributes, the collector's counters.

        Episodes in flight cannot be resumed: a later run begins a new episode in every slot, with unused seeds.
        """
        self._guard.check_open("state_dict")
        attached = self._driver.weights.attached
        collector = None if attached is None else attached.state_dict()
        return {"format": 1, "num_envs": self.num_envs, "pool": self._driver.state_dict(), "collector": collector}

    @uninterrupted
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state_dict()` of an earlier run; the next `reset()` or `rollout()` begins new episodes."""
        self._guard.check("load_state_dict")
        parameters.check_state(state, self.num_envs)
        self._driver.drain()
        self._driver.load_state_dict(state["pool"])
        self._resumed = state["collector"]
        self._guard.is_resumed = True
        self._guard.was_reset = self._guard.is_interrupted = False
        reason = "resumed; episodes that were in flight begin anew"
        self._events.add(Event("resumed", reason, tuple(range(self.num_envs))), level=logging.INFO)

    # -- monitoring -------------------------------------------------------------------------------------------

    def events(self) -> tuple[Event, ...]:
        """Return the last 1000 events of environments, workers and nodes, newest last."""
        return self._events()

    def stats(self) -> dict[str, Any]:
        """Return counters: workers, their process ids, events by kind, slow slots, time per step, incarnations."""
        self._guard.check_open("stats")
        return self._driver.stats()
