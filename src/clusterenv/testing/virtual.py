"""A simulated cluster, for tests and experiments.

`Virtual` is a backend of W logical nodes in the calling process. Collector, drift table, rules, codec and counters are
the real ones; only the clock is simulated: `periods` decide which node's fragment comes next, so that a run and the
staleness of its data are reproducible.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.backends.local import split
from clusterenv.driver import Driver
from clusterenv.engine.collecting.weights import Transfer
from clusterenv.engine.requests import Request, Requests
from clusterenv.errors import SpecError
from clusterenv.events import EventLog
from clusterenv.executors.envelopes import inputs_of, to_worker_of
from clusterenv.executors.inline import InlineExecutor
from clusterenv.journal import Journal
from clusterenv.memory.rows import Buffers, Layout
from clusterenv.recovery import Recovery
from clusterenv.spec import Blueprint
from clusterenv.wire.channel import encode
from clusterenv.wire.frames import CHUNK, to_wire
from clusterenv.wire.messages import Chunk, Offer
from clusterenv.wire.requests import Close, LoadWeights, Reply, RunFragment


@dataclass(frozen=True)
class Virtual:
    """`nodes` machines that exist only in name, each with its share of the environments and its own policy version.

    `rollout` lets all of them collect before it returns. In `stream`, node i needs `periods[i]` ticks for a fragment,
    and fragments come in the order in which they would finish; with `queue=q`, a node's weights are chosen q of its own
    fragments before the learner sees the result.

    Args:
        periods: ticks per fragment, one number per node; None: all are equally fast and take turns.

    Example:
        >>> import torch, clusterenv as ce
        >>> from clusterenv.testing import Virtual
        >>> policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical")
        >>> with ce.ClusterEnv("CartPole-v1", num_envs=8, backend=Virtual(nodes=4)) as envs:
        ...     collector = envs.collector(policy, sync=ce.APS(threshold=0.02), seed=1)
        ...     batch = collector.rollout(16)
        ...     [node["pulls"] for node in collector.stats()["nodes"]]
        [1, 1, 1, 1]
    """

    nodes: int
    periods: tuple[float, ...] | None = None
    is_remote = False
    allow_pickle = True

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise SpecError(f"Virtual(nodes={self.nodes}): expected 1 or more")
        if self.periods is not None and (len(self.periods) != self.nodes or not all(p > 0 for p in self.periods)):
            raise SpecError(f"Virtual(periods={self.periods}): expected {self.nodes} numbers above 0")

    def start(
        self,
        blueprint: Blueprint,
        mode: AutoresetMode | None,
        recovery: Recovery,
        events: EventLog,
        journal: Journal | None = None,
    ) -> Driver:
        if self.nodes > blueprint.num_envs:
            raise SpecError(f"Virtual(nodes={self.nodes}): {blueprint.num_envs} environments are for fewer nodes")
        executor = _VirtualExecutor(blueprint, mode, recovery.check, list(self.periods or (1.0,) * self.nodes))
        slots_of = split(blueprint.num_envs, self.nodes)
        nodes = list(range(self.nodes))
        return Driver(
            executor,
            Requests(slots_of),
            mode,
            recovery,
            blueprint=blueprint,
            events=events,
            node_of=nodes,
            journal=journal,
        )


class _VirtualExecutor(InlineExecutor):
    """Executes requests at once, and returns fragments one by one when they are due."""

    def __init__(self, blueprint: Blueprint, mode: AutoresetMode | None, check: bool, periods: list[float]) -> None:
        super().__init__(blueprint, mode, check, workers=len(periods))
        self._slots = split(blueprint.num_envs, len(periods))
        self._sent = [0] * len(periods)
        self._put: list[dict[int, bytes]] = [{} for _ in periods]  # offset → weights that are not yet counted as sent
        self._buffers: Buffers | None = None
        self._periods = periods
        self._now = 0.0
        self._busy_until = [0.0] * len(periods)
        self._due: list[tuple[float, int, Reply]] = []

    def allocate(self, layout: Layout) -> bytearray:
        memory = super().allocate(layout)
        self._buffers = Buffers(layout, memory)
        return memory

    def put_weights(self, transfer: Transfer) -> bool:
        self._put[transfer.machine.node][transfer.offset] = transfer.data
        return super().put_weights(transfer)

    def stats(self) -> dict[str, Any]:
        """Add the bytes that a head would have sent to each node, without Welcome and the environments' code."""
        return {**super().stats(), "sent_bytes": list(self._sent)}

    def _count(self, index: int, message: Any, payload: Sequence[Any]) -> None:
        self._sent[index] += sum(len(frame) for frames in to_wire(1, message, payload) for frame in frames)

    def _count_message(self, index: int, message: Any) -> None:
        data = self._put[index].pop(message.offset, None) if isinstance(message, LoadWeights) else None
        if data is not None:
            self._count(index, Offer(1, message.offset, len(data), zlib.crc32(data), True, 0, True), ())
            for at in range(0, len(data), CHUNK):
                self._count(index, Chunk(1, at), [data[at : at + CHUNK]])
        request = to_worker_of(message, index, index, self._slots[index])
        self._count(index, request, [encode(message), *inputs_of(request, self._buffers)])

    def close(self, timeout_s: float) -> None:
        self._buffers = None
        super().close(timeout_s)

    def send(self, index: int, message: Any, request: Request | None = None) -> None:
        if not isinstance(message, (int, Close)):
            self._count_message(index, message)
        super().send(index, message, request)
        if isinstance(message, RunFragment):
            self._busy_until[index] = max(self._now, self._busy_until[index]) + self._periods[index]
            _, reply = self._events.pop()
            self._due.append((self._busy_until[index], index, reply))

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        events = super().poll(timeout_s)
        if events or not self._due:
            return events
        first = min(self._due, key=lambda entry: entry[:2])
        self._due.remove(first)
        self._now, index, reply = first
        return [(index, reply)]
