"""Dispatch each request to the object that carries it out.

Used by the loop of a worker process and, with `Local(workers=0)`, in the caller's process.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gymnasium.vector import AutoresetMode

from clusterenv.memory.rows import Buffers
from clusterenv.spec import Vector
from clusterenv.wire import requests
from clusterenv.wire.requests import Reply
from clusterenv.worker.act_and_step import SingleEnvLoop
from clusterenv.worker.envs import EnvGroup
from clusterenv.worker.evaluate import Evaluator, SingleEnvEvaluator
from clusterenv.worker.fragment_loop import FragmentLoop
from clusterenv.worker.policy import WorkerPolicy
from clusterenv.worker.vector_env import VectorGroup
from clusterenv.worker.vector_evaluate import VectorEvaluator
from clusterenv.worker.vector_fragment import VectorEnvLoop

__all__ = ["Dispatcher", "Memory"]


class Memory(Protocol):
    """The memory that head and worker share, mapped when it is first needed."""

    def rows(self) -> mmap.mmap | bytearray: ...
    def fragments(self) -> mmap.mmap: ...
    def weights(self) -> memoryview: ...


class _Acting(NamedTuple):
    """The policy of this worker and what runs it."""

    policy: WorkerPolicy
    loop: FragmentLoop
    evaluator: Evaluator


class Dispatcher:
    def __init__(
        self,
        makers: Any,
        mode: AutoresetMode | None,
        check: bool,
        progress: memoryview,
        memory: Memory,
        by_repr: bool = False,
    ) -> None:
        self._memory = memory
        self._by_repr = by_repr  # what is not plain data is sent as its repr
        self._acting: _Acting | None = None
        self.group: EnvGroup | VectorGroup = (
            VectorGroup(makers, mode, check, progress)
            if isinstance(makers, Vector)
            else EnvGroup(makers, mode or AutoresetMode.NEXT_STEP, check, progress)
        )

    def handle(self, message: Any, flush: Callable[[Reply], None]) -> Any:
        """Carry out a request; return its reply, or None if it has none."""
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
        group, space, by_repr = self.group, message.observation_space, self._by_repr
        group.attach(Buffers(message.layout, self._memory.rows()), space, message.action_space)
        policy = WorkerPolicy(group, space, message.action_space)
        loop: FragmentLoop
        evaluator: Evaluator
        if isinstance(group, EnvGroup):
            loop, evaluator = SingleEnvLoop(group, policy, space), SingleEnvEvaluator(group, policy, space, by_repr)
        else:
            loop, evaluator = VectorEnvLoop(group, policy, space), VectorEvaluator(group, policy, space, by_repr)
        self._acting = _Acting(policy, loop, evaluator)

    @property
    def _with_policy(self) -> _Acting:
        assert self._acting is not None, "a policy request arrived before the environments were attached"
        return self._acting

    def close(self) -> None:
        self.group.close()
        if self._acting is not None:
            self._acting.evaluator.close()
