"""Simulate workers on nodes that die, come back and move their slots, and weights that take a while to arrive.

Implements the executor contract: it reports what `RemoteExecutor` reports of a cluster, without a network.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.engine.inputs import Cause, Exit, Placed, WeightsHeld, WeightsRefused, WeightsSent
from clusterenv.engine.requests import Request
from clusterenv.errors import UsageError
from clusterenv.memory.progress import PROGRESS_BYTES
from clusterenv.wire.channel import Brings
from clusterenv.wire.requests import LoadWeights
from clusterenv.worker.dispatch import Dispatcher
from simulation.processes import Memory, Process, SimulatedExecutor
from simulation.world import World

__all__ = ["SimulatedCluster"]


class _Node:
    def __init__(self) -> None:
        self.session = 0
        self.is_here = True
        self.back_at_s = 0.0
        self.memory = Memory()
        self.coming: deque[Any] = deque()
        """Transfers of weights to this node."""


class _NodeMemory(Memory):
    """The head's rows and fragments with the node's weights."""

    def __init__(self, shared: Memory, own: Memory) -> None:
        self._shared, self._own = shared, own

    def rows(self) -> bytearray:
        return self._shared.rows()

    def fragments(self) -> Any:
        return self._shared.fragments()

    def weights(self) -> memoryview:
        return self._own.weights()


class SimulatedCluster(SimulatedExecutor):
    """A simulated cluster. `shard_of`: worker → shard; shard i belongs to node i."""

    def __init__(
        self,
        world: World,
        slots_of: list[list[int]],
        mode: AutoresetMode,
        is_vector: bool,
        shard_of: list[int],
        invited: int,
    ) -> None:
        super().__init__(world, slots_of, mode, is_vector)
        self._shard_of = shard_of
        self._nodes = [_Node() for _ in range(max(shard_of) + 1)]
        self._invited = invited
        self._sessions = 0
        for node in self._nodes[:invited]:
            self._join(node)
        for node in self._nodes[invited:]:
            node.is_here = False
            node.back_at_s = float("inf")
        self._holder: dict[int, int] = {shard: shard if shard < invited else 0 for shard in range(len(self._nodes))}
        self._hosted: set[int] = set()
        self._open: dict[tuple[int, int], Request] = {}

    @property
    def nodes(self) -> SimulatedCluster:  # type: ignore[override]
        return self

    def _join(self, node: _Node) -> None:
        self._sessions += 1
        node.session, node.is_here, node.memory = self._sessions, True, Memory()
        node.coming.clear()

    # -- the contract of nodes --------------------------------------------------------------------------------

    def can_start(self, index: int) -> bool:
        return self._shard_of[index] in self._holder

    def is_leaving(self, index: int) -> bool:
        return self._shard_of[index] in self._leaving()

    def scale(self, nodes: int) -> None:
        if not 1 <= nodes <= len(self._nodes):
            raise UsageError(f"scale(nodes={nodes})")
        self._invited = nodes
        for node in self._nodes[:nodes]:
            if not node.is_here:
                node.back_at_s = self.world.clock.now_s + 1.0

    def need_packages(self, names: tuple[str, ...]) -> None:
        return None

    def start(self, index: int) -> None:
        shard = self._shard_of[index]
        number = self._holder[shard]
        node = self._nodes[number]
        if shard not in self._hosted:
            self._hosted.add(shard)
            self.said.append((-1, Placed(shard, number, node.session)))
        assert index not in self.by_index, f"worker {index} is started while it runs"
        self._progress[index] = memoryview(bytearray(PROGRESS_BYTES)).cast("i")
        self._progress[index][0] = -1
        self._pids += 1
        memory = _NodeMemory(self.memory, node.memory)
        dispatcher = Dispatcher(self._makers[index], self.mode, True, self._progress[index], memory)
        self.by_index[index] = Process(self.world, dispatcher, self._pids)
        self.world.event("start", f"worker {index} on node {number}")

    def send(self, index: int, message: Any, request: Any = None) -> None:
        if request is not None and index in self.by_index:
            self._open[index, request.number] = request
        super().send(index, message, request)

    def read(self, index: int) -> Any:
        message = super().read(index)
        if isinstance(message, Exit):
            self._forget(index)
        elif getattr(message, "last", True):
            self._open.pop((index, getattr(message, "request", message)), None)
        return message

    def _forget(self, index: int) -> None:
        self._open = {key: request for key, request in self._open.items() if key[0] != index}

    # -- weights ----------------------------------------------------------------------------------------------

    def put_weights(self, transfer: Any) -> bool:
        node = self._nodes[transfer.machine.node]
        if node.is_here and node.session == transfer.machine.session:
            node.coming.append(transfer)
        return False

    def runnable(self) -> list[int]:
        return [index for index in super().runnable() if not self._waits(index)]

    def _waits(self, index: int) -> bool:
        """Return whether its next request needs weights that have not arrived."""
        message = self.by_index[index].inbox[0]
        node = self._nodes[self._holder[self._shard_of[index]]]
        return isinstance(message, LoadWeights) and any(t.weights.number == message.number for t in node.coming)

    def _bring_weights(self) -> None:
        draw = self.world.choices.draw
        for node in self._nodes:
            if node.coming and (self.world.calm or draw(2) == 0):
                transfer = node.coming.popleft()
                number = transfer.weights.number
                self.said.append((-1, WeightsSent(number, len(transfer.data))))
                if transfer.is_packed and draw(4) == 3:
                    self.said.append((-1, WeightsRefused(number)))
                    continue
                node.memory.write_weights(transfer.weights.data, transfer.offset)
                self.said.append((-1, WeightsHeld(number, self.world.clock.now_s)))
                self.world.event("weights", f"{number} (version {transfer.weights.version})")

    # -- nodes ------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        world = self.world
        self._bring_weights()
        for number, node in enumerate(self._nodes):
            if not node.is_here and number < self._invited and (world.calm or world.clock.now_s >= node.back_at_s):
                self._join(node)
                world.event("join", f"node {number}")
        if world.happens("node"):
            here = [number for number, node in enumerate(self._nodes) if node.is_here]
            if here:
                self._lose(here[world.choices.draw(len(here))])
        busy = {
            self._shard_of[index] for (index, _), request in self._open.items() if request.brings is not Brings.ROWS
        }
        for shard in sorted(self._leaving() - busy):
            self._unassign(shard, Cause.MOVED)
        self._place()
        return super().poll(timeout_s)

    def _leaving(self) -> set[int]:
        """Return shards whose own node is here, or whose holder is scaled away."""
        here = {number for number, node in enumerate(self._nodes) if node.is_here and number < self._invited}
        if not here:
            return set()
        home = {shard for shard, holder in self._holder.items() if holder != shard and shard in here}
        return home | {shard for shard, holder in self._holder.items() if holder >= self._invited}

    def _lose(self, number: int) -> None:
        self.world.event("node lost", f"node {number}")
        node = self._nodes[number]
        node.is_here = False
        node.back_at_s = self.world.clock.now_s + (0.0, 1.0, 12.0)[self.world.choices.draw(3)]
        node.coming.clear()
        for shard, holder in list(self._holder.items()):
            if holder == number:
                self._unassign(shard, Cause.NODE_LOST)

    def _unassign(self, shard: int, cause: Cause) -> None:
        self.world.event("moved" if cause is Cause.MOVED else "shard lost", f"shard {shard}")
        del self._holder[shard]
        self._hosted.discard(shard)
        self.said.append((-1, Placed(shard, None)))
        for index, its in enumerate(self._shard_of):
            process = self.by_index.get(index) if its == shard else None
            if process is not None:
                process.end("", 0)
                del self.by_index[index]
                self._forget(index)
                self.said.append((index, Exit(f"was on node {shard}, which is gone", "", cause)))

    def _place(self) -> None:
        """Place unassigned shards on their own nodes, or on another that is here."""
        here = [number for number, node in enumerate(self._nodes) if node.is_here and number < self._invited]
        for shard in range(len(self._nodes)):
            if shard not in self._holder and here:
                if shard in here:
                    self._holder[shard] = shard
                elif self.world.calm or self.world.choices.draw(4) == 3:
                    self._holder[shard] = here[self.world.choices.draw(len(here))]
                    self.world.event("placed", f"shard {shard} on node {self._holder[shard]}")
