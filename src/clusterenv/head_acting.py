"""Act at the head: observations come to this process, the policy acts here in batches, the workers only step.

The loop is the one that a worker runs over a vector environment (`worker/vector_fragment.py`); here that environment
is the `ClusterEnv` itself. Slots are sent and received in parts, so that half of them step while the policy acts for
the other half. Weights do not travel.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from clusterenv.engine.collecting.assembly import Part, put_together
from clusterenv.engine.collecting.collecting import Attached
from clusterenv.engine.collecting.counters import Counters
from clusterenv.errors import PolicyError, UsageError
from clusterenv.memory.fragments import Arena, ArenaLayout
from clusterenv.memory.progress import PROGRESS_BYTES
from clusterenv.memory.rows import leaves_of
from clusterenv.policy.acting.base import Actor, Policy, Prepared
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.rollout import Receipt, Rollout
from clusterenv.spec import Vector
from clusterenv.wire.requests import Build, RunFragment
from clusterenv.worker.fragment import RunningFragment
from clusterenv.worker.policy import WorkerPolicy
from clusterenv.worker.vector_env import VectorGroup
from clusterenv.worker.vector_fragment import VectorEnvLoop
from clusterenv.worker.vector_rows import Stepped

if TYPE_CHECKING:
    from clusterenv.env import ClusterEnv

__all__ = ["HeadActing"]


class HeadActing:
    """Collect rollouts of one policy that acts in this process.

    Args:
        envs: stepped by `send` and `recv`.
        attached: the policy as workers would get it; its random streams are used here too.
    """

    def __init__(
        self,
        envs: ClusterEnv,
        policy: Policy,
        prepared: Prepared,
        attached: Attached,
        counts: Counters,
    ) -> None:
        if envs.autoreset_mode is AutoresetMode.DISABLED:
            raise UsageError(
                'act="head" needs environments that reset by themselves: autoreset_mode NEXT_STEP or SAME_STEP'
            )
        self._envs, self._driver = envs, envs._driver
        self._policy, self._prepared, self._attached = policy, prepared, attached
        self._counts = counts
        self._actor: Actor | None = None
        self._acts_on_device = False  # then weights need not leave it
        self._loop: _HeadLoop | None = None
        self._arena: Arena | None = None
        self._streams: Streams | None = None
        self._seen = -1  # value of `rows.deliveries` after the last rollout
        self._sequence = 0

    def rollout(self, num_steps: int, version: int, copy: bool) -> Rollout:
        """Collect `num_steps` steps of every environment with the agent's current weights, which are `version`."""
        loop = self._prepare(num_steps)
        driver, slots = self._driver, list(range(self._driver.num_envs))
        loop.worker_policy.version = version
        incarnations = driver.collecting.incarnations_of(slots)
        side = self._sequence % 2
        request = RunFragment(0, num_steps, side, self._policy.knobs(), incarnations)
        try:
            reply = loop.run(request)
        except BaseException:  # Ctrl-C: slots are in flight
            self._give_up()
            raise
        result = reply.result
        if loop.env.error is not None or result.policy_error is not None:
            error, loop.env.error = loop.env.error, None
            if error is None:
                what, text = result.policy_error
                error = PolicyError(f"the policy failed: {what}\n{text}", remote_traceback=text)
            self._give_up()
            raise error
        self._seen = driver.rows.deliveries
        assert self._arena is not None
        # Slots that were lost before are made again while the first rows are awaited.
        later = driver.collecting.incarnations_of(slots)
        lost = ~self._arena.sides[side].valid[num_steps - 1]
        incarnations = [old if is_lost else new for old, new, is_lost in zip(incarnations, later, lost, strict=True)]
        part = Part(0, slots, self._arena.sides[side], result, num_steps, incarnations, self._sequence)
        self._sequence += 1
        space, leaves = driver.single_observation_space, driver.layout.obs
        batch = put_together([part], num_steps, space, leaves, copy)
        self._count(batch, result.env_s, result.policy_s)
        receipts = (Receipt(worker, tuple(its), version, 0, None, None) for worker, its in enumerate(driver.slots_of))
        return replace(batch, receipts=tuple(receipts))

    def _count(self, batch: Rollout, env_s: float, policy_s: float) -> None:
        for worker, slots in enumerate(self._driver.slots_of):
            self._counts.fragment(worker, batch.num_steps, len(slots), env_s, policy_s)
        self._counts.batch(batch, batch.valid.size)

    def _prepare(self, num_steps: int) -> _HeadLoop:
        """Load the agent's weights, and take up the episodes where they are now."""
        if self._actor is None:
            own = getattr(self._policy, "head_actor", lambda: None)()
            self._acts_on_device = own is not None
            self._actor = self._prepared.recipe.build() if own is None else own
        self._actor.load({} if self._acts_on_device else self._policy.weights())
        if self._loop is None:
            self._loop = _HeadLoop(self._envs, self._actor, self._attached, self._streams)
            self._streams = self._loop.worker_policy.streams  # a later loop goes on with them
            self._arena = None
        layout = self._layout(num_steps)
        if self._arena is None or self._arena.layout != layout:
            self._arena = Arena(layout, memory := mmap.mmap(-1, layout.size))
            self._loop.map_arena(layout, memory)
        self._loop.take_up(was_stepped=self._driver.rows.deliveries != self._seen)
        return self._loop

    def _layout(self, num_steps: int) -> ArenaLayout:
        driver, prepared = self._driver, self._prepared
        action = leaves_of(driver.single_action_space)[0]
        masks = 0 if prepared.mask is None else prepared.family.num_params
        return ArenaLayout(num_steps, driver.num_envs, driver.layout.obs, action, masks)

    def _give_up(self) -> None:
        self._envs._guard.is_interrupted = True
        self._loop = None


class _HeadLoop(VectorEnvLoop):
    """The loop of a worker, over all slots of a `ClusterEnv`."""

    def __init__(self, envs: ClusterEnv, actor: Actor, attached: Attached, streams: Streams | None) -> None:
        driver = envs._driver
        is_lockstep = driver.is_vector and envs.autoreset_mode is AutoresetMode.NEXT_STEP
        self.env: _Together = _Together(envs) if is_lockstep else _InParts(envs)
        self._rows = driver.rows
        progress = memoryview(bytearray(PROGRESS_BYTES)).cast("i")
        # The workers have checked the values.
        group = VectorGroup(Vector(lambda num_envs, seeds: self.env), None, False, progress)
        group.build(Build(0, list(range(driver.num_envs)), [0] * driver.num_envs))
        group.attach(driver.rows.buffers, driver.single_observation_space, driver.single_action_space)
        self.worker_policy = WorkerPolicy(group, driver.single_observation_space, driver.single_action_space)
        self.worker_policy.use(actor, *attached[1:])
        if streams is not None:
            self.worker_policy.streams = streams
        super().__init__(group, self.worker_policy, driver.single_observation_space)

    def take_up(self, was_stepped: bool) -> None:
        """Continue from the rows that were last delivered. `was_stepped`: others than this loop have changed them."""
        group, rows = self._group, self._rows
        if was_stepped:
            group.moved = None
            group.calls[:] = 1  # unknown
        is_same_step = group.mode is AutoresetMode.SAME_STEP
        group.over[:] = rows.ended & (not is_same_step)
        group.calls[:] = np.where(rows.at_start(is_same_step), 0, np.maximum(group.calls, 1))

    def _write_rows(self, run: RunningFragment, stepped: Stepped, lost: Any) -> None:
        if run.lost:  # where all slots step together, they step too: nothing of their next episodes is shown
            gone = np.isin(stepped.rows, list(run.lost))
            lost = gone if lost is None else gone | lost
        super()._write_rows(run, stepped, lost)

    def _lose_rows(self, run: RunningFragment, columns: Any) -> None:
        super()._lose_rows(run, columns)
        if self._group.moved is not None:  # the next rollout begins with their last delivered observations
            self._group.moved.update(columns.tolist())

    def _lost(self, stepped: Any) -> Any:
        valid = stepped.infos.get("transition_valid")
        return None if valid is None else ~valid


class _Together(VectorEnv[Any, Any, Any]):
    """A `ClusterEnv` as the vector environment of the loop. Its exceptions are for the user, not for the loop."""

    def __init__(self, envs: ClusterEnv) -> None:
        self._envs = envs
        self.num_envs = envs.num_envs
        self.single_observation_space, self.single_action_space = (
            envs.single_observation_space,
            envs.single_action_space,
        )
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.metadata, self.render_mode = envs.metadata, envs.render_mode
        self.error: Exception | None = None

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        try:
            return self._envs.step(actions)
        except Exception as error:
            self.error = error
            raise


class _InParts(_Together):
    """The same, which can be stepped in parts."""

    def send_rows(self, actions: Any, rows: Any) -> None:
        try:
            self._envs.send(actions, rows)
        except Exception as error:
            self.error = error
            raise

    def recv_rows(self) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        try:
            # Half of those that step, so that the others step meanwhile; the rest at the end is not worth parting.
            in_flight = int(self._envs._driver.rows.awaited.sum())
            least = max(in_flight // 2, min(in_flight, self.num_envs // 4), 1)
            obs, rewards, terminations, truncations, infos = self._envs.recv(min_envs=least)
        except Exception as error:
            self.error = error
            raise
        return infos.pop("slot"), obs, rewards, terminations, truncations, infos
