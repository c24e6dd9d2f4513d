"""A node's part of the run while it pulls weights: what happens to requests whose worker dies meanwhile."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from clusterenv.engine.inputs import Exit
from clusterenv.errors import ProtocolError
from clusterenv.node import shard as seat_module
from clusterenv.node.shard import Shard
from clusterenv.node.weight_store import WeightStore
from clusterenv.spec import Delivered
from clusterenv.wire.frames import CHUNK
from clusterenv.wire.messages import AssignShard, Chunk, Exited, Offer, Pull, Start, ToWorker


class FakeProcesses:
    """Worker processes that only remember what they were told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.running: set[int] = set()
        self.told: list[tuple[int, bytes]] = []
        self.events: list[tuple[int, Any]] = []

    def start(self, index):
        self.running.add(index)

    def is_running(self, index):
        return index in self.running

    def forward(self, index, frame):
        self.told.append((index, frame))

    def poll(self, timeout_s):
        events, self.events = self.events, []
        return events

    def die(self, index):
        self.running.discard(index)
        self.events.append((index, Exit("killed", "")))


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setattr(seat_module, "WorkerProcesses", FakeProcesses)
    sent: list[Any] = []
    workers = ((4, (0,)), (5, (1,)))
    host = AssignShard(2, workers, 2, None, None, True, 1, (), "refuse", False, ())
    store = WeightStore(lambda message, frames: sent.append(message))
    shard = Shard(host, b"", Delivered({}, b""), lambda message, frames: sent.append(message), store)
    for worker, _ in workers:
        shard.handle(Start(0, worker), [])
    yield shard, shard._executor, store, sent
    store.close()


def offer(number, data):
    return Offer(number, 0, len(data), zlib.crc32(data), False, 0, False)


def tell(worker, request, weights=0):
    return ToWorker(2, worker, request, (), False, weights)


def test_requests_of_a_dead_worker_do_not_reach_its_replacement(node):
    shard, processes, store, sent = node
    store.offer(offer(7, b"weights"), 0.0)
    shard.handle(tell(4, 1, 7), [b"load"])
    shard.handle(tell(5, 2, 7), [b"load"])
    processes.die(0)
    shard.take()
    assert isinstance(sent[-1], Exited) and sent[-1].worker == 4
    shard.handle(tell(4, 3), [b"run"])  # sent before the head knew
    shard.handle(Start(0, 4), [])
    shard.handle(tell(4, 4), [b"build"])
    store.chunk(Chunk(7, 0), b"weights", 0.0)
    shard.go_on()
    assert processes.told == [(1, b"load"), (0, b"build")]


def test_requests_wait_only_for_weights_that_they_are_about(node):
    shard, processes, store, _ = node
    store.offer(offer(7, b"weights"), 0.0)
    shard.handle(tell(4, 1), [b"step"])
    assert processes.told == [(0, b"step")], "it was told to a worker that acts with what it has"
    shard.handle(tell(4, 2, 7), [b"load"])
    shard.handle(tell(5, 3), [b"step"])
    assert processes.told == [(0, b"step")]
    processes.die(0)
    shard.take()
    assert processes.told == [(0, b"step"), (1, b"step")], "nobody waits for the weights any more"


def test_weights_that_were_withdrawn_hold_nothing_up(node):
    shard, processes, store, sent = node
    store.offer(offer(7, b"weights"), 0.0)
    store.offer(offer(8, b"newer"), 0.0)
    shard.handle(tell(5, 2, 8), [b"load"])
    assert sent == [Pull(7, 0, 7)]
    store.withdrawn(7, 0.0)
    assert sent[-1] == Pull(8, 0, 5)
    store.chunk(Chunk(8, 0), b"newer", 0.0)
    shard.go_on()
    assert processes.told == [(1, b"load")] and sent[-1] == Pull(8, 5, 0)


def test_no_worker_loads_weights_that_are_not_there(node):
    """Whether the request waits when they are withdrawn, or comes later, or others lie in their place by now."""
    shard, processes, store, _ = node
    store.offer(offer(7, b"weights"), 0.0)
    store.chunk(Chunk(7, 0), b"weights", 0.0)
    shard.handle(tell(4, 1, 7), [b"load 7"])
    store.offer(offer(8, b"newer"), 0.0)
    shard.handle(tell(4, 2, 8), [b"load 8"])
    store.withdrawn(8, 0.0)
    with pytest.raises(ProtocolError, match="cannot be pulled"):
        shard.go_on()
    for number in (7, 8, 9):  # in the place of 7, a part of 8 may lie
        shard._waiting.clear()
        with pytest.raises(ProtocolError, match="cannot be pulled"):
            shard.handle(tell(5, 3, number), [b"load"])
    assert processes.told == [(0, b"load 7")]


@pytest.mark.guarantee(27)
@pytest.mark.parametrize("wrong", [b"", b"weight", b"weights!", b"WEIGHTS"])
def test_weights_that_are_damaged_or_cut_off_are_pulled_again(node, wrong):
    _, _, store, sent = node
    store.offer(offer(7, b"weights"), 0.0)
    store.chunk(Chunk(7, 0), wrong, 0.0)
    assert sent == [Pull(7, 0, 7)] * 2 and store.awaits(7) and not store.has(7)
    store.chunk(Chunk(7, 0), b"weights", 0.0)
    assert sent[-1] == Pull(7, 7, 0) and store.has(7)


def pulled(store, sent, data, seconds_per_byte):
    """Answer every pull as a link of this speed would; returns how many bytes were on their way at most."""
    now = most = got = 0
    asked = []
    store.offer(offer(9, data), now)
    while sent or asked:
        asked += [pull for pull in sent if pull.size > 0]
        sent.clear()
        most = max(most, sum(pull.size for pull in asked))
        if asked:
            pull = asked.pop(0)
            assert pull.at == got, "in order, each once"
            got += pull.size
            now += pull.size * seconds_per_byte
            for at in range(pull.at, got, CHUNK):
                store.chunk(Chunk(9, at), data[at : min(at + CHUNK, got)], now)
    assert got == len(data) and not store.awaits(9)
    return most


@pytest.mark.parametrize(("bytes_per_s", "least", "most"), [(40e3, 1 << 16, 1 << 17), (1e9, 3 << 20, 4 << 20)])
def test_a_slow_link_has_little_on_its_way(node, bytes_per_s, least, most):
    """A frame that takes seconds would hold up whatever else is said, and look like a dead connection."""
    _, _, store, sent = node
    assert least <= pulled(store, sent, bytes(20 << 20), 1 / bytes_per_s) <= most
