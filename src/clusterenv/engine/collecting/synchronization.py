"""Synchronization: when the workers of a machine get newer weights, and how stale their fragments are. No I/O.

Before a machine's workers are asked to collect, `decide` applies the rule to their weights and the newest version.
`Exchange` owns the versions and the rule, the weight ledger owns which weights each machine has.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from clusterenv.engine.collecting.assembly import Part
from clusterenv.engine.collecting.collecting import Attached, Samples
from clusterenv.engine.collecting.counters import Counters
from clusterenv.engine.collecting.weights import Machine, Node, WeightLedger
from clusterenv.events import emit
from clusterenv.policy.acting.base import Prepared
from clusterenv.policy.sync.drift import sample_every
from clusterenv.policy.sync.exchange import Exchange
from clusterenv.policy.sync.publisher import REPLAY
from clusterenv.policy.sync.rules import Standing, threshold_of
from clusterenv.policy.weights.packing import takes_steps
from clusterenv.rollout import Rollout, map_arrays

__all__ = ["Synchronization"]

Forms = Iterable[tuple[str, str]]

_RECENT_FRAGMENTS = 100
"""The means of lag and drift cover this many delivered fragments, or four per worker if that is more."""


class Synchronization:
    """Synchronize one policy with the workers, while it is the attached one.

    Args:
        policy: the policy as it is sent to workers.
        counts: counters of what workers collect with it.
    """

    def __init__(
        self, exchange: Exchange, ledger: WeightLedger, prepared: Prepared, policy: Attached, counts: Counters
    ) -> None:
        self.exchange = exchange
        self.policy = policy
        self.counts = counts
        self.publisher = exchange.publisher
        self.publisher.weights_of = self._weights_of
        self._ledger = ledger
        self.nodes = [Node() for _ in range(ledger.num_nodes)]
        self.described = {"family": prepared.family.name, "runtime": prepared.runtime, "reason": prepared.reason}
        self._is_recurrent = prepared.is_recurrent
        self.wants_first_states = exchange.codec == "auto" and not prepared.is_recurrent and prepared.mask is None
        """Whether to measure drift on initial states of episodes until there are others."""
        self._was_overdue = False
        self._delivered: deque[Standing] = deque(maxlen=max(_RECENT_FRAGMENTS, 4 * ledger.num_workers))

    @property
    def is_attached(self) -> bool:
        """Whether the workers act with this policy."""
        return self._ledger.attached is self

    def detach(self) -> None:
        """Detach this policy, so that workers are sent it again before they act."""
        self._ledger.attach(None)

    def attach(self, first_obs: Any | None) -> None:
        """Make the workers act with this policy from now on; `first_obs` are initial states of episodes."""
        self._ledger.attach(self)
        if first_obs is not None:
            self.publisher.note_begin(first_obs)

    def samples(self, num_steps: int, num_envs: int) -> Samples:
        """Return which states of fragments of `num_steps` steps to sample."""
        within = REPLAY if self._is_recurrent else None
        steps = min(num_steps, within or num_steps)
        return Samples(sample_every(steps * num_envs) if self.exchange.measures_drift else 0, within)

    def _weights_of(self, version: int) -> bytes | None:
        return self._ledger.data_of(version) if self.is_attached else None

    # -- deciding ---------------------------------------------------------------------------------------------

    def decide(self, machine: Machine, max_lag: int | None = None) -> str | None:
        """Assign the newest version to this machine if the rule says so. Return the reason, or None.

        `max_lag`: beyond this lag fragments are dropped, and never learned from, so pull whatever the rule says.
        """
        if machine.is_receiving:
            return None  # decided after they have arrived, for the newest version then
        node = self.nodes[machine.node]
        node.standing = self.exchange.stand(machine.assigned, max(machine.acted.values(), default=0))
        decision = self.exchange.consider(machine.node, node.standing, max_lag)
        if decision.is_overdue and not self._was_overdue:
            self._was_overdue = True
            emit(
                logging.WARNING,
                f"node {machine.node} acted {decision.reason}: it pulls now. Unless learning is over, a loss that "
                "clips around the acting policy may hold it there: lower the threshold, or see docs/aps.md",
            )
        pulled = self._pull(machine, node) if decision.pull else None
        machine.newest = self.publisher.snapshot(), len(self.publisher.data)
        return None if pulled is None else f"version {pulled}: {decision.reason}"

    def _pull(self, machine: Machine, node: Node) -> int:
        pulled = self.exchange.pull(machine.held)
        steps = takes_steps(pulled.form)
        weights = self._ledger.assign(
            machine, *pulled[:4], takes_steps=steps, left=pulled.left, keep=self.exchange.keeps
        )
        self.publisher.keep(self._ledger.versions)
        node.drift_at_pull = node.standing.drift
        node.standing = Standing(pulled.version, pulled.version, *self.exchange.drift_of(weights, pulled.version))
        return pulled.version

    def evaluate_newest(self, other: bytes | None) -> None:
        """Make every machine load exactly the newest weights, or `other`, until `end_evaluation`."""
        self.publisher.snapshot()
        wanted = self.publisher.data if other is None else other
        for machine in self._ledger:
            # Assigned weights may be approximate: good enough to act with, but not to evaluate.
            if other is not None or machine.assigned is None or machine.assigned.data != wanted:
                self._ledger.evaluate(machine, wanted)

    # -- fragments --------------------------------------------------------------------------------------------

    def delivered(self, worker: int, version: int, fragment_bytes: int, saved_bytes: int, forms: Forms) -> Standing:
        """Record that a fragment acted by `version` goes to the learner. Return how stale it is now.

        `saved_bytes`: by packing; `forms`: how the leaves of its observations were sent.
        Note its samples first. In a stream the newest version has changed since the fragment was requested.
        """
        machine = self._ledger.of(worker)
        node = self.nodes[machine.node]
        assigned = machine.assigned if self.is_attached else None  # else it is another policy's
        latest = self.publisher.snapshot()
        standing = Standing(version, latest, *self.exchange.drift_of(assigned, version))
        self._delivered.append(standing)
        node.lags[standing.lag] += 1
        node.fragment_bytes += fragment_bytes
        node.fragment_bytes_sent += fragment_bytes - saved_bytes
        node.compression.update(forms)
        if assigned is not None and version == assigned.version:
            machine.acted[worker] += 1
        return standing

    def note_drift(self, batch: Rollout, parts: list[Part]) -> None:
        """Add the batch's samples to the drift table, in an order that does not depend on which worker sent them."""
        sampled: dict[int, list[tuple[Any, Any, Any]]] = {}  # version → t, column, parameters
        first = 0
        for part in parts:
            if part.result is not None and part.result.samples is not None:
                samples = part.result.samples
                entry = (samples.t, samples.columns.astype(np.int64) + first, samples.params)
                sampled.setdefault(part.result.version, []).append(entry)
                node = self.nodes[self._ledger.of(part.worker).node]
                node.drift_bytes += sum(values.nbytes for values in samples)
            first += len(part.slots)
        for version, entries in sampled.items():
            when, who, params = (np.concatenate(pieces) for pieces in zip(*entries, strict=True))
            order = np.lexsort((who, when))
            order = order[batch.valid[when[order], who[order]]]
            rows = self._states(batch, when[order], who[order])
            self.publisher.note(version, rows, params[order])

    def _states(self, batch: Rollout, when: Any, who: Any) -> dict[str, Any]:
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
        return rows

    # -- statistics -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.publisher.version, "seed": self.policy.seed, "counts": dict(self.counts.counts)}

    def stats(self) -> dict[str, Any]:
        ledger = self._ledger
        nodes = [node.as_dict(ledger.version_of(i) if self.is_attached else -1) for i, node in enumerate(self.nodes)]
        sums = ["pulls", "pushes", "weight_bytes", "pushed_bytes", "evaluation_bytes", "drift_bytes"]
        sums += ["fragment_bytes", "fragment_bytes_sent"]
        lags = [standing.lag for standing in self._delivered]
        drifts = [standing.drift for standing in self._delivered if standing.drift is not None]
        stalest = max(nodes, key=lambda node: -1.0 if node["drift"] is None else node["drift"])
        return {
            **{name: sum(node[name] for node in nodes) for name in sums},
            "version": self.publisher.version,
            "held_version": ledger.held_version if self.is_attached else -1,
            "drift": stalest["drift"],
            "drift_se": stalest["drift_se"],
            "drift_at_pull": stalest["drift_at_pull"],
            "threshold": threshold_of(self.exchange.rule),
            "mean_lag": float(np.mean(lags)) if lags else None,
            "mean_drift": float(np.mean(drifts)) if drifts else None,
            "nodes": nodes,
        }
