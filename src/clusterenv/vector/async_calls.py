"""Implement the calls of `AsyncVectorEnv`: send a request to every environment, and wait for the results later.

`ClusterEnv` inherits them. Errors and their texts are Gymnasium's. Unlike in `AsyncVectorEnv`, a call that timed out is
still pending: it can be waited for again, and its late results are never mistaken for those of the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from clusterenv.driver import Driver
from clusterenv.errors import UsageError, WorkerLostError
from clusterenv.system.interrupts import uninterrupted
from clusterenv.vector.actions import ActionReader
from clusterenv.vector.guard import CallGuard, Pending
from clusterenv.vector.parameters import ResetArguments, read_reset, read_timeout
from clusterenv.vector.phases import Phase
from clusterenv.vector.results import StepResult, spread, step_result

__all__ = ["AsyncCalls"]


class AsyncCalls(VectorEnv[Any, Any, Any]):
    """The `_async` and `_wait` halves of `reset`, `step` and `call`."""

    copy: bool
    _driver: Driver
    _guard: CallGuard
    _reader: ActionReader

    @uninterrupted
    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Reset the environments, without waiting; `reset_wait` returns the results."""
        self._guard.check("reset_async")
        arguments = read_reset("reset_async", seed, options, self.num_envs)
        self._send_reset(arguments)
        self._guard.pending = Pending(Phase.RESETTING, reset=arguments)

    @uninterrupted
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the results of `reset_async`, at most `timeout` seconds.

        Raises:
            DeadlineError: a `multiprocessing.TimeoutError`; the reset is still pending.
        """
        self._guard.check("reset_wait")
        timeout = read_timeout("reset_wait", timeout)
        with self._guard.waiting() as pending:
            assert pending.reset is not None
            return self._finish_reset(pending.reset, timeout)

    @uninterrupted
    def step_async(self, actions: Any) -> None:
        """Step every environment with its action, without waiting; `step_wait` returns the results."""
        guard, driver = self._guard, self._driver
        guard.check("step_async")
        guard.check_not_ended(None)
        objects = self._reader.place(actions, None, driver.rows.buffers.actions)
        guard.is_interrupted = True
        driver.send_step(None, objects)
        guard.pending = Pending(Phase.STEPPING)

    @uninterrupted
    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for the results of `step_async`, at most `timeout` seconds.

        Raises:
            DeadlineError: a `multiprocessing.TimeoutError`; the step is still pending.
        """
        self._guard.check("step_wait")
        timeout = read_timeout("step_wait", timeout)
        with self._guard.waiting():
            return self._finish_step(timeout)

    @uninterrupted
    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a method (or read an attribute) of every environment, without waiting."""
        self._guard.check("call_async")
        self._guard.check_not_loaded("call_async", name)
        self._guard.pending = Pending(Phase.CALLING, requests=self._driver.send_call(name, args, kwargs))

    @uninterrupted
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the results of `call_async`, at most `timeout` seconds.

        Raises:
            DeadlineError: a `multiprocessing.TimeoutError`; the call is still pending.
        """
        self._guard.check("call_wait")
        timeout = read_timeout("call_wait", timeout)
        with self._guard.waiting() as pending:
            return tuple(self._driver.results(pending.requests, timeout))

    def _send_reset(self, arguments: ResetArguments) -> None:
        guard, driver, mask = self._guard, self._driver, arguments.mask
        if mask is not None and not mask.all():
            if not guard.was_reset:
                raise UsageError("the first reset() must reset all environments: leave reset_mask out")
            if guard.was_interrupted:
                raise UsageError(
                    "the last step or reset was interrupted by an error or Ctrl-C, and the rows of the other "
                    "environments are unknown: leave reset_mask out, to reset all of them"
                )
        guard.pending, guard.is_interrupted = None, True
        driver.drain()
        driver.set_seed_base(arguments.bases)
        # A resumed script passes the same seed as at the first start: its episodes were already played.
        seeds = driver.unused_seeds() if driver.is_resumed and not guard.was_reset else arguments.seeds
        driver.send_reset(arguments.slots, [seeds[slot] for slot in arguments.slots], arguments.options)

    def _finish_reset(self, arguments: ResetArguments, timeout_s: float | None) -> tuple[Any, dict[str, Any]]:
        guard, driver = self._guard, self._driver
        driver.collect(len(arguments.slots), timeout_s, "reset_wait")
        rows = driver.deliver(self.copy)
        guard.was_reset, guard.is_interrupted = True, False
        if arguments.mask is None:
            return rows.obs, rows.infos
        return driver.rows.peek_obs(np.arange(self.num_envs)), spread(rows.infos, rows.slots, self.num_envs)

    def _finish_step(self, timeout_s: float | None = None) -> StepResult:
        guard, driver = self._guard, self._driver
        try:
            driver.collect(self.num_envs, timeout_s, "step_wait")
        except WorkerLostError as error:
            error.rows = step_result(driver.deliver(True))
            guard.is_interrupted = False
            raise
        rows = driver.deliver(self.copy)
        guard.is_interrupted = False
        return step_result(rows)
