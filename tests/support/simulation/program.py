"""Run the user's program of a simulated run: drawn calls of `ClusterEnv` and `Collector`, whose results are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import clusterenv as ce
from clusterenv.errors import CrashLoopError, DeadlineError
from clusterenv.vector.phases import Phase
from simulation.async_calls import AsyncUser
from simulation.calls import LOSSES, Ended
from simulation.ledger import logits, logprob
from simulation.profiles import CALLS, Profile

__all__ = ["Program"]


class Program(AsyncUser):
    profile = Profile()
    _scripted = 0

    # -- running ----------------------------------------------------------------------------------------------

    def run(self, num_events: int) -> None:
        world = self.world
        while world.num_events < num_events:
            name, function = self._next()
            self._do(name, function)
        world.calm = True
        self._finish()

    def _next(self) -> tuple[str, Callable[[], None]]:
        """Draw the next call, of those that are possible in this phase."""
        names, draw = CALLS[self.phase], self.world.choices.draw
        if self.phase is Phase.NEW:
            self.ledger.give_up(list(range(self.n)))  # a collector resets all slots, and keeps their first rows
        script = self.profile.script
        if script and self.phase is Phase.IDLE and draw(8) < 7:
            name = script[self._scripted % len(script)]
            self._scripted += 1
        else:
            name = names[draw(len(names))]
        return name, getattr(self, name.replace(" a ", " ").replace(" ", "_"))

    def _finish(self) -> None:
        """Check that without further faults a reset restores all environments, and each of them steps."""
        for _ in range(10):  # each may report failures from before
            self._do("last reset", self.reset)
            if self.phase is Phase.IDLE:
                break
        else:
            self.world.fail("reset() does not succeed, though nothing fails any more")
        for i in range(40):
            self._do("last step", self.step)
            if i > 2 and not self.driver._slots.records and not self.driver.rows.awaited.any():
                return
        # Slots may move to another node in the first of these steps, and are reset there.
        self.world.fail("slots are not live after whole steps without faults")

    # -- collecting -------------------------------------------------------------------------------------------

    def _collector(self) -> Any:
        if self.policy is None:
            self.policy = ce.NumpyPolicy(_forward, {"w": np.zeros(1, np.float32)})
            draw = self.world.choices.draw
            on_loss, prefetch, sync = ("rerun", "mask")[draw(2)], draw(4) == 3, (None, ce.Every(2))[draw(2)]
            self.is_always = sync is None and not prefetch
            self.world.user_seeds.update(range(1, 1 + self.n))  # a collector resets environments that never were
            self.collectors = [self.envs.collector(self.policy, seed=1, on_loss=on_loss, prefetch=prefetch, sync=sync)]
        return self.collectors[0]

    def _learn(self) -> None:
        """Change the agent's weights, or not."""
        if self.world.choices.draw(3):
            weight = round(0.1 + 0.01 * self.world.choices.draw(200), 2)
            self.policy.values = {"w": np.array([weight], np.float32)}

    def _note_version(self, collector: Any) -> None:
        version = collector._sync.publisher.version
        weight = float(self.policy.values["w"][0])
        while len(self.weights) <= version:
            self.weights.append(weight)

    def rollout(self) -> None:
        draw, phase = self.world.choices.draw, self.phase
        collector = self._collector()
        num_steps = 1 + draw(4)
        fragments = collector._collection.fragments
        if phase is Phase.COLLECTING:
            num_steps = fragments.num_steps
        if not fragments.is_rollout_begun:
            self._learn()
        timeout_s = 0.5 if draw(5) == 4 else None
        deadline_s = (0.0, 0.5)[draw(2)] if draw(4) == 3 else None
        is_newest = phase is Phase.IDLE and self.is_always and self.driver.executor.nodes is None
        try:
            batch = self._attempt(
                lambda: collector.rollout(num_steps, timeout_s, deadline_s=deadline_s), *LOSSES, DeadlineError
            )
        except DeadlineError:
            self._note_version(collector)
            return
        except LOSSES:
            self._note_version(collector)
            self.ledger.give_up(list(range(self.n)))
            return
        except Ended:
            self._note_version(collector)
            raise
        self._note_version(collector)
        self._read_events()
        if is_newest and (batch.versions[batch.valid] != len(self.weights) - 1).any():
            self.world.fail(f"rollout() acted by versions {set(batch.versions[batch.valid].tolist())}, not the newest")
        if batch.slots.tolist() != list(range(self.n)):
            self.world.fail(f"rollout() returned slots {batch.slots.tolist()}")
        self._check_batch(batch, False, may_be_late=deadline_s is not None)

    def _check_batch(self, batch: Any, is_stream: bool, may_be_late: bool = False) -> None:
        self.ledger.fragment(batch, is_stream, may_be_late)
        newest = len(self.weights) - 1
        for t, column in np.argwhere(batch.valid):
            version = int(batch.versions[t, column])
            if not 0 <= version <= newest:
                self.world.fail(f"{self.world.call}: acted by version {version}, the newest is {newest}")
            expected = logprob(self.weights[version], batch.obs[t, column], int(batch.actions[t, column]))
            if abs(expected - batch.logprobs[t, column]) > 1e-4:
                self.world.fail(
                    f"{self.world.call}: log-probability {batch.logprobs[t, column]:.4f} in row {t} of slot "
                    f"{batch.slots[column]}, version {version} gives {expected:.4f}"
                )

    def stream(self) -> None:
        draw = self.world.choices.draw
        collector = self._collector()
        num_steps, queue = 1 + draw(3), 1 + draw(3)
        least = 1 + draw(self.n)
        stale = (None, 1)[draw(2)]
        before = collector.stats()["dropped_fragments"]
        items = collector.stream(num_steps, least, max_staleness=stale, queue=queue)
        self.ledger.begin_stream()
        try:
            for _ in range(1 + draw(5)):
                aside = draw(10)
                if aside > 4:
                    (self.misuse, self.misuse, self.misuse, self.call, self.set_attr)[aside - 5]()
                batch = self._attempt(lambda: next(items), *LOSSES)
                self._note_version(collector)
                self._read_events()
                dropped = collector.stats()["dropped_fragments"]
                if dropped > before:
                    self.ledger.give_up(list(range(self.n)))
                    before = dropped
                if len(batch.slots) < least:
                    self.world.fail(f"stream(min_envs={least}) returned slots {batch.slots}")
                self._check_batch(batch, True)
                self._learn()
                self._attempt(collector.publish)
                self._note_version(collector)
                if draw(3) == 0:
                    self.pause()
        except LOSSES:
            self.ledger.give_up(list(range(self.n)))
        finally:
            self._note_version(collector)
            self._close(items)
            if collector.stats()["dropped_fragments"] > before:
                self.ledger.give_up(list(range(self.n)))

    def _close(self, items: Any) -> None:
        try:
            self._attempt(items.close, CrashLoopError)
        except CrashLoopError:
            self.ledger.give_up(list(range(self.n)))

    def evaluate(self) -> None:
        collector, episodes = self._collector(), 1 + self.world.choices.draw(4)
        try:
            found = self._attempt(lambda: collector.evaluate(episodes=episodes, seed=7), *LOSSES)
        except (*LOSSES, Ended):
            self._note_version(collector)
            self._lost_beside()
            return
        self._note_version(collector)
        if found.lengths.tolist() != [2] * episodes:
            self.world.fail(f"evaluate({episodes}) played {found.lengths.tolist()}")

    def step_with_policy(self) -> None:
        if self._reset_ended():
            return
        self._collector()
        self._learn()
        self._take_step(lambda: self.envs.step(self.policy), None)


def _forward(weights: Any, obs: Any) -> Any:
    return logits(float(weights["w"][0]), obs)
