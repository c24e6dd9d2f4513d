"""Collect fragments with a policy on the workers: start them, wait for them, and assemble batches for `Collector`.

The engine (`Collecting`) decides what to request from which worker, `Synchronization` which weights the worker acts
with; this module waits, and makes the batches that the learner gets.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np

from clusterenv.driver import Driver
from clusterenv.engine.collecting.assembly import Part, end_episodes, put_together, size_of
from clusterenv.engine.collecting.fragments import Fragment, OnLoss
from clusterenv.engine.collecting.synchronization import Synchronization
from clusterenv.engine.collecting.weights import Machine
from clusterenv.engine.requests import Request
from clusterenv.errors import DeadlineError, EnvError, PolicyError, WorkerLostError
from clusterenv.events import Event, emit_progress
from clusterenv.long_waits import LongWaits
from clusterenv.policy.acting.base import Policy
from clusterenv.rollout import Receipt, Rollout
from clusterenv.system.interrupts import uninterrupted
from clusterenv.wire.requests import PlayedEpisode

__all__ = ["Collection"]

_FIRST_STATES = 64
"""Number of initial states of episodes to measure drift on before there are others."""


class Collection:
    """Collect with one policy."""

    def __init__(self, driver: Driver, policy: Policy, sync: Synchronization) -> None:
        self.fragments = driver.collecting.fragments
        self.sync = sync
        self.counts = sync.counts
        self._driver = driver
        self._policy = policy
        self._sequence = np.zeros(len(driver.slots_of), dtype=np.int64)
        self._leaf_names = [f"observation{leaf.name}" for leaf in driver.layout.obs]
        self._rollout_waits, self._evaluation_waits = LongWaits(), LongWaits()

    # -- weights ----------------------------------------------------------------------------------------------

    def decide_all(self) -> None:
        """Attach this policy, and decide which version the workers of each machine act with."""
        driver, sync = self._driver, self.sync
        if not sync.is_attached:
            some = np.arange(min(driver.num_envs, _FIRST_STATES))
            sync.attach(driver.rows.peek_obs(some) if sync.wants_first_states else None)
        for machine in driver.weights:
            self._decide(machine)

    def hand_over(self) -> None:
        """Send every running worker the policy and weights to act with."""
        self.decide_all()
        self._driver.collecting.prepare_all(time.monotonic())
        self._driver.carry_out()

    def _decide(self, machine: Machine, max_lag: int | None = None) -> None:
        begin = time.perf_counter()
        reason = self.sync.decide(machine, max_lag)
        self.counts.considering_s += time.perf_counter() - begin
        if reason is not None:
            driver = self._driver
            slots = tuple(slot for worker in driver.weights.workers_of(machine) for slot in driver.slots_of[worker])
            driver.events.add(Event("pull", reason, slots), level=logging.DEBUG)

    # -- rollouts ---------------------------------------------------------------------------------------------

    def start_rollout(self, num_steps: int, on_loss: OnLoss, balance: bool) -> None:
        self._prepare(num_steps)
        lengths = self.counts.balanced_lengths(num_steps) if balance else [num_steps] * len(self._driver.slots_of)
        self.fragments.start_rollout(num_steps, on_loss, self.counts, lengths)
        self._begin()

    def _prepare(self, num_steps: int, num_sides: int = 2) -> None:
        driver = self._driver
        try:
            while not all(fragment.is_late for fragment in self.fragments.running):
                driver.advance(None)
        except PolicyError:
            self.fragments.abandon()
            raise
        self.decide_all()
        driver.collecting.samples = self.sync.samples(num_steps, driver.num_envs)
        layout = driver.collecting.memory_for(num_steps, num_sides)
        if layout is not None:
            assert not any(self.fragments), "late fragments are in the present memory"
            driver.collecting.use_memory(layout, driver.executor.allocate_arena(layout))

    def _settle(self) -> None:
        """Wait for the running fragments, wanted or not."""
        while self.fragments.running:
            self._driver.advance(None)

    def _begin(self) -> None:
        """Request every fragment that can begin."""
        driver, nodes = self._driver, self._driver.executor.nodes
        is_leaving = nodes.is_leaving if nodes is not None else lambda worker: False
        driver.collecting.begin(self._policy.knobs(), is_leaving, time.monotonic())
        driver.carry_out()

    def wait_for_rollout(self, timeout_s: float | None, deadline_s: float | None) -> list[Fragment]:
        """Wait until every worker's fragment has arrived; after `deadline_s`, until one has."""
        driver, fragments, waits = self._driver, self.fragments, self._rollout_waits
        begin = time.monotonic()
        waits.begin(begin)
        deadline = None if timeout_s is None else begin + timeout_s
        late_at = None if deadline_s is None else begin + deadline_s
        try:
            while fragments.unfinished:
                self._begin()  # a worker may have come back
                now = time.monotonic()
                is_late = late_at is not None and now >= late_at
                if is_late and fragments.has_data:
                    break
                if deadline is not None and now >= deadline:
                    raise DeadlineError(
                        f"workers {fragments.unfinished} have not finished their fragments within {timeout_s} s. "
                        "Nothing is lost: call again"
                    )
                if waits.is_due(now):
                    self._show_rollout(waits.lasted_s(now))
                ends = (deadline, None if is_late else late_at)
                driver.advance(min((at for at in ends if at is not None), default=None))
        except DeadlineError:
            raise
        except BaseException:
            fragments.abandon()
            raise
        waits.end(time.monotonic())
        return fragments.pop_rollout()

    def _show_rollout(self, lasted_s: float) -> None:
        """Show how many fragments have arrived, and whose have not."""
        awaited, total = self.fragments.unfinished, len(self._driver.slots_of)
        who = ", ".join(map(str, awaited[:5])) + (", ..." if len(awaited) > 5 else "")
        text = f"rollout: {total - len(awaited)} of {total} fragments after {lasted_s:.0f} s"
        emit_progress(f"{text}, waiting for worker{'s' * (len(awaited) > 1)} {who}")

    # -- streams ----------------------------------------------------------------------------------------------

    def start_stream(self, num_steps: int, queue: int) -> None:
        self._prepare(num_steps, max(queue, 2))
        self.fragments.start_stream(num_steps, queue, self.counts)

    @uninterrupted
    def feed(self, max_staleness: int | None) -> None:
        """Request a fragment from every worker that has a free side, after applying the rule to its weights."""
        driver = self._driver
        for machine in dict.fromkeys(driver.weights.of(worker) for worker in self.fragments.with_room()):
            self._decide(machine, max_staleness)
        self._begin()

    def next_batch(self, min_envs: int, max_staleness: int | None, timeout_s: float | None) -> list[Fragment]:
        """Wait for fragments of at least `min_envs` environments, at most one per worker. Return them in slot order."""
        taken: dict[int, Fragment] = {}
        later: list[Fragment] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while sum(len(self._driver.slots_of[worker]) for worker in taken) < min_envs:
            fragment = self._next(deadline, timeout_s, max_staleness)
            if self._is_too_old(fragment, max_staleness):
                self.fragments.release(fragment)
            elif fragment.worker in taken:
                later.append(fragment)
            else:
                taken[fragment.worker] = fragment
        for fragment in reversed(later):
            self.fragments.put_back(fragment)
        return [fragment for _, fragment in sorted(taken.items())]

    def _next(self, deadline: float | None, timeout_s: float | None, max_staleness: int | None) -> Fragment:
        self.feed(max_staleness)
        while (fragment := self.fragments.pop_next()) is None:
            self._begin()  # a worker may have come back
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(f"no fragment from any worker within {timeout_s} s; see events() for what they do")
            self._driver.advance(deadline)
        return fragment

    def _is_too_old(self, fragment: Fragment, max_staleness: int | None) -> bool:
        assert fragment.result is not None
        lag = self.sync.publisher.version - fragment.result.version
        if max_staleness is None or lag <= max_staleness:
            return False
        self.counts.counts["dropped_fragments"] += 1
        reason = f"{lag} versions behind, max_staleness={max_staleness}"
        event = Event("dropped", reason, tuple(self._driver.slots_of[fragment.worker]), fragment.worker)
        self._driver.events.add(event, level=logging.DEBUG)
        return True

    def release(self, fragments: list[Fragment]) -> None:
        """Free the sides of fragments that were copied into a batch."""
        for fragment in fragments:
            self.fragments.release(fragment)

    def stop_stream(self) -> None:
        """Stop collecting: running fragments are finished, dropped and counted."""
        self.fragments.drop()
        while True:
            try:
                self._settle()
                return
            except (EnvError, PolicyError, WorkerLostError):
                continue  # it is in the events; leaving the loop must not fail because of it

    # -- batches ----------------------------------------------------------------------------------------------

    def batch(self, fragments: list[Fragment], num_steps: int, copy: bool) -> Rollout:
        """Assemble fragments into a batch, and record its drift samples, receipts and counts."""
        parts = [self._part(fragment) for fragment in fragments]
        driver = self._driver
        batch = put_together(parts, num_steps, driver.single_observation_space, driver.layout.obs, copy)
        self.sync.note_drift(batch, parts)
        receipts = []
        for part in parts:
            result = part.result
            if result is None:
                continue
            forms = zip(self._leaf_names, result.forms, strict=False)
            stand = self.sync.delivered(part.worker, result.version, size_of(part), result.saved_bytes, forms)
            slots = tuple(part.slots)
            receipts.append(Receipt(part.worker, slots, result.version, stand.lag, stand.drift, stand.drift_se))
            self.counts.fragment(part.worker, result.num_steps, len(slots), result.env_s, result.policy_s)
        batch = replace(batch, receipts=tuple(receipts))
        self.counts.batch(batch, sum(part.num_steps * len(part.slots) for part in parts))
        return batch

    def _part(self, fragment: Fragment) -> Part:
        worker, result, slots = fragment.worker, fragment.result, self._driver.slots_of[fragment.worker]
        if not fragment.num_steps:
            self.counts.counts["late_fragments"] += 1
            arrays, incarnations = self._driver.collecting.waiting(worker)
            return Part(worker, slots, arrays, None, 0, incarnations, int(self._sequence[worker]))
        side = self._driver.collecting.side(fragment.side)
        if fragment.is_last and result is not None:
            result = end_episodes(side, slots[0], len(slots), result)
        self._sequence[worker] += 1
        sequence = int(self._sequence[worker]) - 1
        return Part(worker, slots, side, result, fragment.num_steps, fragment.incarnations, sequence)

    # -- evaluating -------------------------------------------------------------------------------------------

    def evaluate(
        self, episodes: int, seed: int, deterministic: bool, record: int, knobs: dict[str, Any], other: bytes | None
    ) -> list[PlayedEpisode]:
        """Play episodes with the newest weights, or with `other`."""
        driver, collecting = self._driver, self._driver.collecting
        self.decide_all()
        self.sync.evaluate_newest(other)
        try:
            self._settle()  # a prefetched fragment is kept for the next rollout
            while not collecting.are_all_there():
                driver.advance(None)
            requests = collecting.evaluate(episodes, seed, deterministic, record, knobs, time.monotonic())
            driver.carry_out()
            self._await_episodes(requests, episodes)
            played: list[PlayedEpisode] = []
            for request, reply in zip(requests, driver.replies(requests), strict=True):
                played += reply.result
                collecting.report_not_sent(request.worker, *(episode.not_sent for episode in reply.result))
            return sorted(played, key=lambda episode: episode.number)
        finally:
            driver.weights.end_evaluation()

    def _await_episodes(self, requests: list[Request], episodes: int) -> None:
        """Wait until all workers have answered, or one is lost; in a long wait, show how many episodes are done."""
        waits = self._evaluation_waits
        waits.begin(time.monotonic())
        while self._driver.collecting.is_awaiting(requests):
            self._driver.advance(None)
            now = time.monotonic()
            if waits.is_due(now):
                done = sum(len(request.message.episodes) for request in requests if request.reply is not None)
                emit_progress(f"evaluation: {done} of {episodes} episodes after {waits.lasted_s(now):.0f} s")
        waits.end(time.monotonic())
