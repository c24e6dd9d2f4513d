"""For tests and experiments: a cluster without machines.

`VirtualCluster` has W logical nodes in the calling process. Collector, drift table, rules, codec and counters are the
real ones; only the clock is not: which node's fragment comes next is decided by numbers, so that a run is the same each
time, and how stale its data is was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.backends.local import split
from clusterenv.collector import Collector
from clusterenv.errors import ClosedError, SpecError, UsageError
from clusterenv.events import Event, EventLog
from clusterenv.policy.sync import Rule
from clusterenv.pool import Pool
from clusterenv.pool.inline import InlineCrew
from clusterenv.pool.streaming import FragmentStream
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint, blueprint

__all__ = ["VirtualCluster"]


class VirtualCluster:
    """`nodes` machines that exist only in name, each with its share of the environments and its own policy version.

    `rollout` lets all of them collect before it returns. In `stream`, node i needs `periods[i]` ticks for a fragment,
    and the fragments come in the order in which they would be finished; with `queue=q` a node decides on its weights
    q of its own fragments before the learner gets to see them.

    Args:
        env, num_envs, env_kwargs: as for `ClusterEnv`.
        periods: ticks per fragment, one number per node; None: all are equally fast, and take turns.

    Example:
        >>> import torch, clusterenv as ce
        >>> from clusterenv.testing import VirtualCluster
        >>> policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical")
        >>> with VirtualCluster("CartPole-v1", num_envs=8, nodes=4) as cluster:
        ...     collector = cluster.collector(policy, sync=ce.APS(threshold=0.02), seed=1)
        ...     batch = collector.rollout(16)
        ...     [node["pulls"] for node in collector.stats()["nodes"]]
        [1, 1, 1, 1]
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        nodes: int,
        periods: Sequence[float] | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        plan = blueprint(env, num_envs, env_kwargs)
        if plan.is_vector:
            raise SpecError("VirtualCluster: Vector(fn) has no collector")
        if not 1 <= nodes <= plan.num_envs:
            raise SpecError(f"VirtualCluster(nodes={nodes}): expected 1 to {plan.num_envs}, one environment each")
        periods = [1.0] * nodes if periods is None else list(periods)
        if len(periods) != nodes or not all(period > 0 for period in periods):
            raise SpecError(f"VirtualCluster(periods={periods}): expected {nodes} numbers above 0")
        self.num_envs = plan.num_envs
        self.attached: Collector | None = None
        self._log = EventLog()
        self._periods = periods
        self._due: list[float] = []
        self._was_reset = self._is_closed = False
        self.members = [self._pool(plan, slots) for slots in split(plan.num_envs, nodes)]
        self.single_observation_space = self.members[0].single_observation_space
        self.single_action_space = self.members[0].single_action_space

    def _pool(self, plan: Blueprint, slots: list[int]) -> Pool:
        mode, recovery = AutoresetMode.NEXT_STEP, Recovery(on_error="raise")
        crew = InlineCrew(plan, mode, recovery.check, slots)
        own = [list(range(len(slots)))]
        return Pool(crew, own, mode, recovery, is_vector=False, events=self._log, first_slot=slots[0])

    def collector(
        self, agent: Any, *, sync: Rule | None = None, info_keys: Sequence[str] = (), seed: int | None = None
    ) -> Collector:
        """As `ClusterEnv.collector`."""
        return Collector(self, agent, sync=sync, info_keys=info_keys, seed=seed)

    def reset(self, seed: int | None = None) -> None:
        """Begin every environment anew; slot i is seeded with `seed + i`."""
        first = 0
        for pool in self.members:
            own = [None if seed is None else seed + first + i for i in range(pool.num_envs)]
            pool.desk.abandon()
            pool.drain()
            pool.set_seed_base([seed] * pool.num_envs)
            pool.send_reset(list(range(pool.num_envs)), own, None)
            pool.collect(pool.num_envs, None)
            pool.deliver(True)
            first += pool.num_envs
        self._was_reset = True

    def ready_to_collect(self, collector: Collector) -> None:
        if self._is_closed:
            raise ClosedError("this cluster was closed; make a new one")
        if any(pool.desk.is_streaming for pool in self.members):
            raise UsageError("a stream is open: leave its loop first (or close() the generator)")
        if not self._was_reset:
            self.reset(collector.seed)
        self._due = list(self._periods)

    def next_member(self, streams: Sequence[FragmentStream]) -> int:
        """Whose fragment is finished first; the lowest number among equals."""
        chosen = self._due.index(min(self._due))
        self._due[chosen] += self._periods[chosen]
        return chosen

    def events(self) -> tuple[Event, ...]:
        return self._log()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for pool in self.members:
                pool.close(0.0)

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
