"""One policy's versions on their way to machines: its rule and codec, applied to what the weight ledger knows. Pure.

Called by `Collector`: before something is asked of a machine (`consider`, and `pull` where its rule says so), and when
a fragment is handed to the learner (`delivered`).
"""

from __future__ import annotations

from typing import Any

from clusterenv.engine.weights import Machine, Node, WeightLedger
from clusterenv.policy.sync.exchange import Exchange
from clusterenv.policy.sync.rules import Decision, Standing
from clusterenv.policy.weights.packing import takes_steps

__all__ = ["Sync"]


class Sync:
    def __init__(self, exchange: Exchange, ledger: WeightLedger) -> None:
        self.exchange = exchange
        self._ledger = ledger
        self._nodes = [Node() for _ in range(ledger.num_nodes)]
        exchange.publisher.weights_of = self._weights_of

    def attach(self) -> None:
        """From now on the machines act with this policy."""
        self._ledger.attach(self._nodes)

    @property
    def _is_attached(self) -> bool:
        return self._ledger.counts_in(self._nodes)

    def _weights_of(self, version: int) -> bytes | None:
        return self._ledger.data_of(version) if self._is_attached else None

    def node_of(self, worker: int) -> Node:
        """Return where what goes to the machine of this worker, and comes from it, is counted."""
        return self._nodes[self._ledger.of(worker).node]

    def consider(self, machine: Machine, max_lag: int | None = None) -> Decision | None:
        """Apply the rule to what the machine acts with.

        None while weights are on their way to it: it is decided when they have arrived, for what is newest then.

        Args:
            max_lag: what is older would be dropped, and nothing ever learned from it: pull, whatever the rule says.
        """
        if machine.is_receiving:
            return None
        node = self._nodes[machine.node]
        node.standing = self.exchange.stand(machine.assigned, max(machine.acted.values(), default=0))
        return self.exchange.consider(machine.node, node.standing, max_lag)

    def pull(self, machine: Machine) -> int:
        """The machine's workers act with the newest version from now on; returns its number."""
        exchange, node = self.exchange, self._nodes[machine.node]
        pulled = exchange.pull(machine.held)
        steps = takes_steps(pulled.form)
        weights = self._ledger.assign(machine, *pulled[:4], takes_steps=steps, left=pulled.left, keep=exchange.keeps)
        exchange.publisher.keep(self._ledger.versions)
        node.drift_at_pull = node.standing.drift
        node.standing = Standing(pulled.version, pulled.version, *exchange.drift_of(weights, pulled.version))
        return pulled.version

    def delivered(self, worker: int, version: int) -> Standing:
        """A fragment acted by `version` is handed to the learner; returns how stale it is by now.

        Its samples are to be noted before. In a stream the newest is another than when the fragment was asked for.
        """
        machine = self._ledger.of(worker)
        latest = self.exchange.publisher.snapshot()
        standing = Standing(version, latest, *self.exchange.drift_of(machine.assigned, version))
        self._nodes[machine.node].lags[standing.lag] += 1
        if machine.assigned is not None and version == machine.assigned.version:
            machine.acted[worker] += 1
        return standing

    def evaluate(self, other: bytes | None) -> None:
        """Have the machines load the newest weights as they are, or `other` ones, until the evaluation ends."""
        self.exchange.publisher.snapshot()
        wanted = self.exchange.publisher.data if other is None else other
        for machine in self._ledger:
            # What is near enough to act with is not what is to be evaluated.
            if other is not None or machine.assigned is None or machine.assigned.data != wanted:
                self._ledger.evaluate(machine, wanted)

    def stats(self) -> dict[str, Any]:
        ledger, is_attached = self._ledger, self._is_attached
        nodes = [node.as_dict(ledger.version_of(i) if is_attached else -1) for i, node in enumerate(self._nodes)]
        sums = ("pulls", "weight_bytes", "evaluation_bytes", "drift_bytes", "fragment_bytes")
        stalest = max(nodes, key=lambda node: -1.0 if node["drift"] is None else node["drift"])
        return {
            **{name: sum(node[name] for node in nodes) for name in sums},
            "version": self.exchange.publisher.version,
            "held_version": ledger.held_version if is_attached else -1,
            **{name: stalest[name] for name in ("drift", "drift_se", "drift_at_pull")},
            "nodes": nodes,
        }
