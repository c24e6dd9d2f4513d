"""Requests to what carries them out: the same in a worker process and in the caller's own (`Local(workers=0)`)."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gymnasium.vector import AutoresetMode

from clusterenv.memory.rows import Buffers
from clusterenv.spec import Vector
from clusterenv.wire import requests
from clusterenv.wire.requests import Reply
from clusterenv.worker.act_and_step import FragmentLoop
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.evaluate import Evaluator
from clusterenv.worker.policy import WorkerPolicy
from clusterenv.worker.vector_env import VectorGroup

__all__ = ["Dispatcher", "Memory"]


class Memory(Protocol):
    """What head and worker share, mapped when it is first needed."""

    def rows(self) -> mmap.mmap | bytearray: ...
    def fragments(self) -> mmap.mmap: ...
    def weights(self) -> memoryview: ...


class _Acting(NamedTuple):
    """What acts on this worker's own environments; a `VectorGroup` has none of it."""

    policy: WorkerPolicy
    loop: FragmentLoop
    evaluator: Evaluator


class Dispatcher:
    def __init__(
        self, makers: Any, mode: AutoresetMode | None, check: bool, progress: memoryview, memory: Memory
    ) -> None:
        self._memory = memory
        self._acting: _Acting | None = None
        self.group: EnvGroup | VectorGroup = (
            VectorGroup(makers, mode, check, progress)
            if isinstance(makers, Vector)
            else EnvGroup(makers, mode or AutoresetMode.NEXT_STEP, check, progress)
        )

    def handle(self, message: Any, flush: Callable[[Reply], None]) -> Any:
        """The reply, or None where there is none."""
        group = self.group
        if isinstance(message, int):
            return group.step_all(message) or message
        if isinstance(message, requests.RunFragment):
            return self._with_policy.loop.run(message)
        if isinstance(message, requests.Step):
            return group.step(message, flush) if message.act is None else self._with_policy.policy.step(message, flush)
        if isinstance(message, (requests.Reset, requests.Rebuild)):
            return group.reset(message)
        if isinstance(message, (requests.Call, requests.SetAttr)):
            return group.call(message)
        if isinstance(message, requests.LoadWeights):
            return self._with_policy.policy.load(message, self._memory.weights())
        if isinstance(message, requests.SetPolicy):
            return self._with_policy.policy.set(message)
        if isinstance(message, requests.Evaluate):
            return self._with_policy.evaluator.run(message)
        if isinstance(message, requests.MapArena):
            return self._with_policy.loop.map_arena(message.layout, self._memory.fragments())
        if isinstance(message, requests.Build):
            return group.build(message)
        if isinstance(message, requests.Attach):
            return self._attach(message)
        assert isinstance(message, requests.Close), message
        self.close()
        return Reply(message.request, [])

    def _attach(self, message: requests.Attach) -> None:
        group, space = self.group, message.observation_space
        group.attach(Buffers(message.layout, self._memory.rows()), space, message.action_space)
        if isinstance(group, EnvGroup):
            policy = WorkerPolicy(group, space, message.action_space)
            self._acting = _Acting(policy, FragmentLoop(group, policy, space), Evaluator(group, policy, space))

    @property
    def _with_policy(self) -> _Acting:
        assert self._acting is not None, "a policy came before the environments"
        return self._acting

    def close(self) -> None:
        self.group.close()
        if self._acting is not None:
            self._acting.evaluator.close()
