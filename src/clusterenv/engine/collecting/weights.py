"""The weight ledger: which weights each machine has or receives, where they are stored, and which workers read them.

`Synchronization` sets what a machine's workers act with (`assign`), `Collecting` what each worker loads before it acts
(`missing`, `load`); engine and driver pass on what the executor reports (`heard`, `placed`). All statistics about
weights come from here. Pure: time is passed in, and transfers are returned as data for the executor to carry out.

Beside what is really sent stands what `Always` would have sent whole, at the same requests (`push`): whenever workers
of a machine are asked to act, the version that was the newest at the last decision for that machine, unless it was
pushed there before. A new session is sent it again. Weights that are loaded only for an evaluation are in neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterenv.engine.inputs import WeightsHeld, WeightsRefused, WeightsSent
from clusterenv.policy.sync.drift import Drift
from clusterenv.policy.sync.rules import Standing

if TYPE_CHECKING:
    from clusterenv.engine.collecting.synchronization import Synchronization

__all__ = ["Machine", "Node", "Transfer", "WeightLedger", "Weights"]

WHOLE = "fp32"
_NOTHING = Standing(-1, -1, None, None)


class Weights(NamedTuple):
    """Exact bytes that workers load, and the form in which they may travel."""

    number: int
    """Identifies these bytes on one machine: lossy forms of one version differ between machines."""
    version: int
    """-1: only for an evaluation."""
    data: bytes
    form: str = WHOLE
    packed: bytes | None = None
    """The same in fewer bytes; None: `data` is sent."""
    base: int = 0
    """`packed` holds steps from the weights with this number; 0: it holds no steps."""
    left: Drift | None = None
    """How far `data` is from the exact weights of this version; None: not measured."""
    keep: bool = False
    """Later weights will be sent as steps from these."""


@dataclass
class Node:
    """Statistics of the traffic with one node, over all its sessions, for one collector."""

    standing: Standing = field(default=_NOTHING, init=False)
    drift_at_pull: float | None = field(default=None, init=False)
    pulls: int = field(default=0, init=False)
    forms: Counter[str] = field(default_factory=Counter, init=False)
    """Codec → number of pulls."""
    weight_bytes: int = field(default=0, init=False)
    pushes: int = field(default=0, init=False)
    """How often `Always` would have sent weights."""
    pushed_bytes: int = field(default=0, init=False)
    """What it would have sent, with whole weights."""
    evaluation_bytes: int = field(default=0, init=False)
    """Weights sent only for evaluations."""
    drift_bytes: int = field(default=0, init=False)
    fragment_bytes: int = field(default=0, init=False)
    """Of fragments before they were packed."""
    fragment_bytes_sent: int = field(default=0, init=False)
    compression: dict[str, str] = field(default_factory=dict, init=False)
    """Leaf of the observations → how it was sent with the last fragment, or why as it is."""
    lags: Counter[int] = field(default_factory=Counter, init=False)
    """Versions behind the newest when a fragment was delivered to the learner → number of fragments."""

    def as_dict(self, version: int) -> dict[str, Any]:
        return {
            "version": version,
            "drift": self.standing.drift,
            "drift_se": self.standing.drift_se,
            "drift_at_pull": self.drift_at_pull,
            "pulls": self.pulls,
            "forms": dict(self.forms),
            "weight_bytes": self.weight_bytes,
            "pushes": self.pushes,
            "pushed_bytes": self.pushed_bytes,
            "evaluation_bytes": self.evaluation_bytes,
            "drift_bytes": self.drift_bytes,
            "fragment_bytes": self.fragment_bytes,
            "fragment_bytes_sent": self.fragment_bytes_sent,
            "compression": dict(self.compression),
            "lags": dict(sorted(self.lags.items())),
        }


@dataclass(eq=False)
class Transfer:
    """Weights on their way to one machine."""

    weights: Weights
    machine: Machine
    node: Node
    """The statistics that count it."""
    offset: int
    is_packed: bool
    began_at: float
    is_wanted: bool = True
    """False: another policy has been attached since."""

    @property
    def data(self) -> bytes:
        """The bytes to send."""
        return self.weights.packed if self.is_packed and self.weights.packed is not None else self.weights.data

    @property
    def form(self) -> str:
        return self.weights.form if self.is_packed else WHOLE


@dataclass
class _Place:
    """A part of the memory for weights. It is not overwritten while a worker has yet to read it."""

    offset: int
    room: int
    number: int = 0
    """Of the weights that are stored here, or on their way here."""
    readers: dict[int, int] = field(default_factory=dict)
    """Request → worker that has yet to read."""


class Machine:
    """The weights of one machine during one session; all its shards share them."""

    def __init__(self, node: int, session: int) -> None:
        self.node = node
        self.session = session
        self.assigned: Weights | None = None
        """What its workers act with from their next fragment on. Sent when the first of them has to load it."""
        self.evaluated: Weights | None = None
        """What they load instead during an evaluation."""
        self.newest: tuple[int, int] | None = None
        """Version and size of the newest weights at the last decision for this machine."""
        self.pushed = -1
        """The version that `Always` would have sent here last; -1: none."""
        self.acted: Counter[int] = Counter()
        """Worker → number of delivered fragments that it acted with the assigned weights."""
        self.held: Weights | None = None
        """The last weights to act with that arrived: packed weights are steps from these."""
        self.transfers: dict[int, Transfer] = {}
        """By number: at most one transfer of weights to act with, and one of weights to evaluate."""
        self._places: list[_Place] = []
        self._loaded: dict[int, int] = {}  # worker → number of the weights that it was last asked to load

    @property
    def is_receiving(self) -> bool:
        """Whether weights to act with are on their way; the rule is applied again when they have arrived."""
        return any(transfer.is_wanted and transfer.weights.version >= 0 for transfer in self.transfers.values())

    @property
    def has_waiting(self) -> bool:
        """Whether a worker waits for weights that are on their way."""
        return any(place.number in self.transfers and place.readers for place in self._places)

    @property
    def version(self) -> int:
        return -1 if self.held is None else self.held.version

    def missing(self, worker: int) -> Weights | None:
        """Return the weights that this worker has to load before it acts; None: it has them."""
        wanted = self.evaluated or self.assigned
        return None if wanted is None or self._loaded.get(worker) == wanted.number else wanted

    def load(self, worker: int, weights: Weights, request: int, node: Node, now: float) -> tuple[int, Transfer | None]:
        """Record that `worker` is asked to load these. Return their offset, and the transfer needed first, if any."""
        transfer = None
        place = next((place for place in self._places if place.number == weights.number), None)
        if place is None:
            steps_fit = not weights.base or (self.held is not None and self.held.number == weights.base)
            is_packed = weights.packed is not None and steps_fit
            place = self._free_place(len(weights.data))
            place.number = weights.number
            transfer = Transfer(weights, self, node, place.offset, is_packed, now)
            self.transfers[weights.number] = transfer
        place.readers[request] = worker
        self._loaded[worker] = weights.number
        return place.offset, transfer

    def _free_place(self, size: int) -> _Place:
        used = {*self.transfers, *(weights.number for weights in (self.assigned, self.evaluated) if weights)}
        for place in self._places:
            if not place.readers and place.number not in used and place.room >= size:
                return place
        end = sum(place.room for place in self._places)
        self._places.append(_Place(end, size))
        return self._places[-1]

    def has_read(self, request: int) -> None:
        for place in self._places:
            place.readers.pop(request, None)

    def worker_lost(self, worker: int) -> None:
        """Its process is gone: it will not read, and its replacement has loaded nothing."""
        self._loaded.pop(worker, None)
        for place in self._places:
            place.readers = {request: reader for request, reader in place.readers.items() if reader != worker}

    def policy_changed(self, worker: int) -> None:
        """Record that the worker is sent a new policy, which discards the weights that it has loaded."""
        self._loaded.pop(worker, None)

    def forget(self) -> None:
        """Forget all weights because another policy is attached; transfers under way are of no use."""
        self.assigned = self.evaluated = self.held = self.newest = None
        self.pushed = -1
        self.acted.clear()
        for transfer in self.transfers.values():
            transfer.is_wanted = False


class WeightLedger:
    """The machines of a run, by the shard that they run; `shard_of`: worker → shard."""

    def __init__(self, shard_of: list[int]) -> None:
        self._shard_of = shard_of
        self.num_workers = len(shard_of)
        self.num_nodes = max(shard_of) + 1
        self._machines = [Machine(shard, 0) for shard in range(self.num_nodes)]
        self.attached: Synchronization | None = None
        """The policy that the workers act with."""
        self.policy_epoch = 0
        """Counts attached policies: a worker that has an older one is sent the newest."""
        self._last_number = 0
        self.pull_s: list[float | None] = [None] * len(self._machines)
        """Duration of each node's last transfer."""

    def __iter__(self) -> Iterator[Machine]:
        """Iterate over the machines, each once."""
        return iter(dict.fromkeys(self._machines))

    def of(self, worker: int) -> Machine:
        return self._machines[self._shard_of[worker]]

    def workers_of(self, machine: Machine) -> list[int]:
        return [worker for worker in range(len(self._shard_of)) if self.of(worker) is machine]

    # -- policy and versions ----------------------------------------------------------------------------------

    def attach(self, policy: Synchronization | None) -> None:
        """Attach a policy, which acts from now on and counts its transfers; None: no policy acts."""
        self.attached = policy
        self.policy_epoch += 1
        for machine in self:
            machine.forget()

    def assign(
        self,
        machine: Machine,
        version: int,
        data: bytes,
        form: str = WHOLE,
        packed: bytes | None = None,
        *,
        takes_steps: bool = False,
        left: Drift | None = None,
        keep: bool = False,
    ) -> Weights:
        """Make the machine's workers act with these weights from their next fragment on."""
        base = machine.held.number if takes_steps and machine.held is not None else 0
        machine.assigned = Weights(self._next_number(), version, data, form, packed, base, left, keep)
        machine.acted.clear()
        return machine.assigned

    def evaluate(self, machine: Machine, data: bytes) -> None:
        """Make the machine's workers load these weights next, until `end_evaluation`."""
        machine.evaluated = Weights(self._next_number(), -1, data)

    def end_evaluation(self) -> None:
        for machine in self:
            machine.evaluated = None

    def data_of(self, version: int) -> bytes | None:
        """Return the weights of a version that some machine acts with; None if no machine does."""
        found = (machine.assigned for machine in self if machine.assigned is not None)
        return next((weights.data for weights in found if weights.version == version), None)

    @property
    def versions(self) -> set[int]:
        """Versions that machines act with."""
        return {machine.assigned.version for machine in self if machine.assigned is not None}

    def version_of(self, node: int) -> int:
        """Return the version that this node has; -1: none."""
        return max((machine.version for machine in self if machine.node == node), default=-1)

    @property
    def held_version(self) -> int:
        """The oldest version that a machine has."""
        return min(machine.version for machine in self)

    # -- loading ----------------------------------------------------------------------------------------------

    def push(self, worker: int) -> None:
        """Count what `Always` would send, whole, before this worker acts."""
        machine = self.of(worker)
        if machine.newest is None or machine.evaluated is not None or self.attached is None:
            return
        version, size = machine.newest
        if version != machine.pushed:
            machine.pushed = version
            node = self.attached.nodes[machine.node]
            node.pushes += 1
            node.pushed_bytes += size

    def load(self, worker: int, weights: Weights, request: int, now: float) -> tuple[int, Transfer | None]:
        assert self.attached is not None
        machine = self.of(worker)
        return machine.load(worker, weights, request, self.attached.nodes[machine.node], now)

    def is_travelling(self, worker: int) -> bool:
        """Return whether requests to this worker may be waiting for weights: then a delay does not mean a hang."""
        return self.of(worker).has_waiting

    # -- what the executor reports ----------------------------------------------------------------------------

    def placed(self, shard: int, node: int | None, session: int) -> None:
        """Record that the shard's workers run on this node from now on; None: on no node."""
        before = self._machines[shard]
        for worker, its in enumerate(self._shard_of):
            if its == shard:  # the machine may remain, with another shard
                before.worker_lost(worker)
        found = None
        if node is not None:
            found = next((m for m in self if (m.node, m.session) == (node, session)), None)
        if found is None:
            found = Machine(shard if node is None else node, session)
        if found.assigned is None:
            found.assigned, found.evaluated = self._anew(before.assigned), self._anew(before.evaluated)
            found.acted = before.acted.copy()
            found.newest = before.newest
        self._machines[shard] = found

    def _anew(self, weights: Weights | None) -> Weights | None:
        """Return the same weights for another machine: a number identifies a transfer to one machine only."""
        return None if weights is None else weights._replace(number=self._next_number())

    def heard(self, event: WeightsSent | WeightsHeld | WeightsRefused) -> Transfer | None:
        """Record what happened to a transfer. Return it if it has to be sent again, unpacked."""
        transfer = next((m.transfers[event.number] for m in self if event.number in m.transfers), None)
        if transfer is None:
            return None  # its session is over
        is_acting = transfer.weights.version >= 0
        if isinstance(event, WeightsSent):
            if is_acting:
                transfer.node.weight_bytes += event.size
            else:
                transfer.node.evaluation_bytes += event.size
        elif isinstance(event, WeightsRefused):
            transfer.is_packed = False
            return transfer
        else:
            machine = transfer.machine
            del machine.transfers[event.number]
            if event.at is not None:
                self.pull_s[machine.node] = event.at - transfer.began_at
            if is_acting:
                transfer.node.pulls += 1
                transfer.node.forms[transfer.form] += 1
                if transfer.is_wanted:
                    machine.held = transfer.weights
        return None

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number
