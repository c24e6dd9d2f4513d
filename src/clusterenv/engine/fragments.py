"""The pool's side of fragments: which worker collects what, under which policy, and what becomes of it when one dies.

`Collector` attaches a policy, offers weights, starts fragments and takes them. The unfinished fragment of a dead worker
is dropped whole and run again by its replacement, so nothing is ever spliced.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from clusterenv.code.missing import missing_package
from clusterenv.engine.cut import cut
from clusterenv.engine.places import Shelf
from clusterenv.engine.requests import Kind, Request
from clusterenv.engine.streaming import FragmentStream
from clusterenv.errors import DeadlineError, PolicyError
from clusterenv.events import Event, EventLog
from clusterenv.memory.fragments import Arena, ArenaLayout, Side
from clusterenv.memory.rows import Buffers, Layout, leaves_of
from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.acting.named import Named
from clusterenv.wire.requests import (
    Episode,
    Evaluate,
    FragmentResult,
    LoadWeights,
    MapArena,
    MissingKeys,
    Reply,
    RunFragment,
    SetPolicy,
    Sticky,
)
from clusterenv.worker.key_watch import explain

__all__ = ["Attached", "FragmentDesk", "Host", "of_slots"]


class Attached(NamedTuple):
    """A policy as workers are told of it."""

    recipe: bytes | Named
    family: Family
    mask: str | None
    seed: int
    info_keys: tuple[str, ...]


class Host(Protocol):
    """What the desk needs of a pool."""

    layout: Layout
    num_envs: int
    single_action_space: Any
    slots_of: list[list[int]]
    node_of: list[int]
    events: EventLog

    @property
    def buffers(self) -> Buffers: ...
    def number(self) -> int: ...
    def post(self, worker: int, kind: Kind, slots: list[int], message: Any) -> Request: ...
    def turn(self, deadline: float | None) -> None: ...
    def tell(self, worker: int, message: Any) -> None: ...
    def bring_back(self, worker: int) -> bool: ...
    def is_leaving(self, worker: int) -> bool: ...
    def replies(self, requests: list[Request]) -> list[Reply]: ...
    def incarnations(self, slots: list[int]) -> list[int]: ...
    def stickies(self, slots: list[int]) -> tuple[list[list[Sticky]], int]: ...
    def collected(self, slots: list[int], stepped: Any, result: FragmentResult) -> None: ...
    def info_not_sent(self, worker: int, reason: str) -> None: ...
    def allocate_arena(self, layout: ArenaLayout) -> Any: ...
    def put_weights(
        self, node: int, data: bytes, offset: int, packed: bytes | None = None, keep: bool = False
    ) -> None: ...


class FragmentDesk:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._policy: Attached | None = None
        self._epoch = 0  # counts policies: a worker that has an older one is told anew
        self._arena: Arena | None = None
        self._arena_epoch = 0
        nodes = max(host.node_of) + 1
        self._weights = [(-1, 0, 0)] * nodes  # version, offset, size
        self._shelves = [Shelf() for _ in range(nodes)]
        self._known: dict[int, tuple[int, int, int]] = {}  # worker → epochs of policy and arena, version
        self._waiting: set[int] = set()  # workers whose fragment is not begun
        self._running: set[int] = set()
        self._stale: set[int] = set()  # running, but nobody wants the result any more
        self._done: dict[int, FragmentResult | None] = {}
        self._incarnations: dict[int, list[int]] = {}  # worker → of its slots when its fragment began
        self._started = False
        self._error: PolicyError | None = None
        self._side = 0
        self._num_steps = 0
        self._knobs: dict[str, Any] = {}
        self.sample_every = 0
        self.sample_within: int | None = None
        self._stream: FragmentStream | None = None
        self.on_loss: Literal["rerun", "mask"] = "rerun"
        self._told_missing: set[str | None] = {None}

    # -- what the collector asks ------------------------------------------------------------------------------

    def attach(self, policy: Attached) -> None:
        self._policy = policy
        self._epoch += 1
        self._weights = [(-1, 0, 0)] * len(self._weights)

    def offer(self, node: int, version: int, data: bytes, packed: bytes | None = None, keep: bool = False) -> None:
        """Weights of a new version for one machine; its workers load them before their next fragment."""
        offset = self._shelves[node].place(len(data), None)
        self._host.put_weights(node, data, offset, packed, keep)
        self._weights[node] = (version, offset, len(data))

    def _put(self, node: int, data: bytes) -> int:
        """Beside what the machine has."""
        offset = self._shelves[node].place(len(data), self._weights[node][1])
        self._host.put_weights(node, data, offset)
        return offset

    def _load(self, worker: int, version: int, offset: int, size: int) -> None:
        request = LoadWeights(self._host.number(), version, offset, size)
        self._shelves[self._host.node_of[worker]].reads(worker, request.request, offset)
        self._host.post(worker, Kind.POLICY, self._host.slots_of[worker], request)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def is_under_way(self) -> bool:
        """A fragment was started, and not taken or abandoned."""
        return self._started

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def start(self, num_steps: int, knobs: dict[str, Any]) -> None:
        """Every worker begins a fragment as soon as it can."""
        assert self._policy is not None
        self._settle_down()
        self._stale.clear()
        self._prepare_arena(num_steps)
        self._side = 1 - self._side
        self._num_steps, self._knobs = num_steps, knobs
        self._done = {}
        self._error = None
        self._started = True
        self._waiting = set(range(len(self._host.slots_of)))
        self._begin_ready()

    def take(
        self, deadline: float | None, timeout_s: float | None
    ) -> tuple[Side, list[tuple[FragmentResult | None, list[int]]]]:
        """Return, for each worker, its fragment and the incarnations of its slots in it.

        None in place of a fragment that was lost and is not run again.
        """
        try:
            while self.is_busy:
                self._begin_ready()
                if deadline is not None and time.monotonic() >= deadline:
                    late = sorted(self._waiting | self._running)
                    raise DeadlineError(
                        f"workers {late} have no whole fragment within {timeout_s} s. Nothing is lost: call again"
                    )
                self.turn(deadline)
        except DeadlineError:
            raise
        except BaseException:
            self.abandon()
            raise
        assert self._arena is not None
        self._started = False
        workers = range(len(self._host.slots_of))
        return self._arena.sides[self._side], [(self._done.get(w), self._incarnations[w]) for w in workers]

    # -- streaming --------------------------------------------------------------------------------------------

    def open_stream(self, num_steps: int, queue: int) -> FragmentStream:
        self._settle_down()
        self._prepare_arena(num_steps, max(queue, 2))
        self._stream = FragmentStream(self, num_steps, queue, len(self._host.slots_of))
        return self._stream

    def close_stream(self) -> int:
        """Returns how many fragments were dropped."""
        if self._stream is None:
            return 0
        dropped = self._stream.stop()
        self._stream = None
        return dropped

    def _settle_down(self) -> None:
        """Wait for what an earlier call left running: a fragment, or a stream whose end was interrupted."""
        self.close_stream()
        try:
            while self._running:
                self.turn(None)
        except PolicyError:
            self.abandon()
            raise

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None and self._stream.is_open

    def side(self, index: int) -> Side:
        assert self._arena is not None
        return self._arena.sides[index]

    def can_run(self, worker: int) -> bool:
        return self._host.bring_back(worker)

    def is_leaving(self, worker: int) -> bool:
        return self._host.is_leaving(worker)

    def turn(self, deadline: float | None) -> None:
        self._host.turn(deadline)
        error = self.policy_error()
        if error is not None:
            raise error

    def evaluate(
        self,
        episodes: int,
        seed: int,
        deterministic: bool,
        record: int,
        knobs: dict[str, Any],
        others: dict[int, bytes],
    ) -> list[Episode]:
        """Play episodes with the policy that is attached; on the nodes in `others` with those weights instead."""
        host = self._host
        workers = range(len(host.slots_of))
        self._settle_down()  # a prefetched fragment is kept, and taken by the next rollout
        while not all(host.bring_back(worker) for worker in workers):
            host.turn(None)
        for worker in workers:
            self._tell_policy(worker)
        places = {node: self._put(node, data) for node, data in others.items()}
        for worker in workers:
            node = host.node_of[worker]
            if node in others:
                self._load(worker, -1, places[node], len(others[node]))
                self._known[worker] = (self._epoch, self._known[worker][1], -2)
        requests = []
        for worker in workers:
            mine = list(range(episodes))[worker :: len(workers)]
            if mine:
                plain = {name: float(np.mean(value)) for name, value in knobs.items()}
                stickies, epoch = host.stickies(host.slots_of[worker])
                message = Evaluate(host.number(), mine, seed, deterministic, record, plain, stickies, epoch)
                requests.append(host.post(worker, Kind.CALL, host.slots_of[worker], message))
        played: list[Episode] = []
        for reply in host.replies(requests):
            played += reply.result
        error = self.policy_error()
        if error is not None:
            raise error
        return sorted(played)

    def tell_all(self) -> None:
        """Every worker that is there gets the policy, as far as it does not have it; the others when they are back."""
        for worker in range(len(self._host.slots_of)):
            if self._host.bring_back(worker):
                self._tell_policy(worker)

    def policy_error(self) -> PolicyError | None:
        error, self._error = self._error, None
        return error

    def abandon(self) -> int:
        """Give up what is under way: it runs to its end, and is dropped. Returns how many fragments that are."""
        dropped = len(self._running | self._done.keys()) if self._started else 0
        self._started = False
        self._stale |= self._running
        self._waiting.clear()
        return dropped

    def close(self) -> None:
        self._arena = None  # views would keep the shared memory open

    # -- what the pool tells ----------------------------------------------------------------------------------

    def took(self, worker: int, kind: Kind, reply: Reply) -> None:
        result: FragmentResult | None = reply.result
        self._shelves[self._host.node_of[worker]].has_read(reply.request)
        if result is not None and result.policy_error is not None and worker not in self._stale:
            what, text = result.policy_error
            where = f"worker {worker}" + (f" on node {self._host.node_of[worker]}" if len(self._weights) > 1 else "")
            advice = missing_package(what, where)
            what = f"{what} ({where})" + (f": {advice}" if advice else "")
            if self._error is None:  # what follows from the first is not worth telling
                self._error = PolicyError(f"{what}\n{text}", remote_traceback=text)
        if kind is not Kind.FRAGMENT or result is None:
            return
        if result.not_sent:
            self._host.info_not_sent(worker, result.not_sent)
        if isinstance(reply.infos, MissingKeys):
            self.tell_missing(reply.infos, self._host.slots_of[worker])
        assert self._arena is not None
        side = self._side
        if self._stream is not None:
            side = self._stream.took(worker, result)
        else:
            self._running.discard(worker)
        self._keep_last_obs(worker, result.num_steps, self._arena.sides[side])
        if result.num_steps:
            self._host.collected(self._host.slots_of[worker], self._arena.sides[side].valid[0], result)
        if self._stream is not None:
            return
        if worker in self._stale:
            self._stale.discard(worker)
        else:
            self._done[worker] = result

    def tell_missing(self, missing: MissingKeys, slots: list[int]) -> None:
        """Warn of keys that no info of these slots had; of each key once, whoever says it first."""
        mask = None if missing.mask in self._told_missing else missing.mask
        keys = [key for key in missing.info_keys if key not in self._told_missing]
        self._told_missing |= {mask, *keys}
        for text in explain(missing._replace(mask=mask, info_keys=keys)):
            self._host.events.add(Event("missing_key", text, tuple(slots)))

    def moved(self, worker: int) -> None:
        """It has finished what was asked, and its slots go on elsewhere."""
        result = self._done.get(worker)
        if self._stream is not None:
            self._stream.cut(worker)
        elif self._started and result is not None:
            self._done[worker] = self.cut(worker, self._side, result)
        self.lost(worker)

    def cut(self, worker: int, side: int, result: FragmentResult) -> FragmentResult:
        slots = self._host.slots_of[worker]
        return cut(self.side(side), slots[0], len(slots), result)

    def lost(self, worker: int) -> None:
        """The worker died; its replacement knows nothing."""
        self._known.pop(worker, None)
        self._shelves[self._host.node_of[worker]].forget(worker)
        if self._stream is not None:
            self._stream.lost(worker)
            return
        if worker not in self._running:
            return
        self._running.discard(worker)
        if worker in self._stale:
            self._stale.discard(worker)
        elif self.on_loss == "mask":
            self._done[worker] = None
        else:
            self._waiting.add(worker)

    # -- inside -----------------------------------------------------------------------------------------------

    def _prepare_arena(self, num_steps: int, num_sides: int = 2) -> None:
        host, policy = self._host, self._policy
        assert policy is not None
        masks = 0 if policy.mask is None else policy.family.num_params
        old = self._arena.layout if self._arena is not None else None
        enough = old is not None and old.num_steps >= num_steps and old.num_sides >= num_sides
        if old is not None and enough and old.num_masks == masks:
            return
        layout = ArenaLayout(
            num_steps, host.num_envs, host.layout.obs, leaves_of(host.single_action_space)[0], masks, num_sides
        )
        self._arena = Arena(layout, host.allocate_arena(layout))
        self._arena_epoch += 1

    def _begin_ready(self) -> None:
        for worker in sorted(self._waiting):
            if self._host.bring_back(worker):
                self._waiting.discard(worker)
                self._send(worker)

    def _tell_policy(self, worker: int) -> None:
        """Policy and weights, as far as the worker does not have them."""
        host, policy = self._host, self._policy
        assert policy is not None
        slots = host.slots_of[worker]
        epoch, arena_epoch, version = self._known.get(worker, (0, 0, -2))
        if epoch != self._epoch:
            told = SetPolicy(host.number(), *policy)
            host.post(
                worker, Kind.POLICY, slots, told._replace(family=None) if isinstance(told.recipe, Named) else told
            )
            version = -2
        newest, offset, size = self._weights[host.node_of[worker]]
        if version != newest:
            self._load(worker, newest, offset, size)
        self._known[worker] = (self._epoch, arena_epoch, newest)

    def _send(self, worker: int) -> None:
        self._incarnations[worker] = self.send(worker, self._num_steps, self._side, self._knobs)
        self._running.add(worker)

    def send(self, worker: int, num_steps: int, side: int, all_knobs: dict[str, Any]) -> list[int]:
        """One fragment, after whatever the worker has to be told first; returns its slots' incarnations."""
        host = self._host
        assert self._arena is not None
        slots = host.slots_of[worker]
        self._tell_policy(worker)
        epoch, arena_epoch, newest = self._known[worker]
        if arena_epoch != self._arena_epoch:
            host.tell(worker, MapArena(self._arena.layout))
            self._known[worker] = (epoch, self._arena_epoch, newest)
        # Zero is what a worker takes for a knob that is not there.
        knobs = {name: of_slots(value, slots) for name, value in all_knobs.items() if np.ndim(value) or value}
        incarnations = host.incarnations(slots)
        message = RunFragment(
            host.number(), num_steps, side, knobs, incarnations, self.sample_every, self.sample_within
        )
        host.post(worker, Kind.FRAGMENT, slots, message)
        return incarnations

    def _keep_last_obs(self, worker: int, steps: int, side: Side) -> None:
        """`step` goes on from the last observation."""
        slots = self._host.slots_of[worker]
        rows = slice(slots[0], slots[-1] + 1)
        buffers = self._host.buffers
        for shared, collected in zip(buffers.obs, side.obs, strict=True):
            shared[buffers.side[rows], np.arange(rows.start, rows.stop)] = collected[steps, rows]


def of_slots(value: Any, slots: list[int]) -> Any:
    """A knob's value for these slots: a number for all, or their own."""
    array = np.asarray(value)
    return array[slots] if array.ndim else value
