"""A node's part of the run while it pulls weights: what happens to requests whose worker dies meanwhile."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from clusterenv.cluster.weight_server import Offers
from clusterenv.engine.inputs import Exit
from clusterenv.node import shard as seat_module
from clusterenv.node.shard import Seat
from clusterenv.spec import Delivered
from clusterenv.wire.messages import Chunk, Exited, Host, Offer, Pull, Tell, Withdrawn


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

    def wait(self, timeout_s):
        events, self.events = self.events, []
        return events

    def put_weights(self, node, data, offset):
        pass

    def die(self, index):
        self.running.discard(index)
        self.events.append((index, Exit("killed", "")))


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setattr(seat_module, "ProcessCrew", FakeProcesses)
    sent: list[Any] = []
    workers = ((4, (0,)), (5, (1,)))
    host = Host(2, workers, 2, None, None, True, 1, (), "refuse", False, ())
    seat = Seat(host, b"", Delivered({}, b""), lambda message, frames: sent.append(message))
    for worker, _ in workers:
        seat.start(worker)
    return seat, seat._crew, sent


def offer(number, data):
    return Offer(2, number, 0, len(data), zlib.crc32(data), False, 0, False)


def tell(worker, request):
    return Tell(2, worker, request, (), "nothing", 0, 0, False)


def test_requests_of_a_dead_worker_do_not_reach_its_replacement(node):
    seat, processes, sent = node
    seat.offer(offer(7, b"weights"))
    seat.tell(tell(4, 1), [b"load"])
    seat.tell(tell(5, 2), [b"load"])
    processes.die(0)
    seat.take()
    assert isinstance(sent[-1], Exited) and sent[-1].worker == 4
    seat.tell(tell(4, 3), [b"run"])  # sent before the head knew
    seat.start(4)
    seat.tell(tell(4, 4), [b"build"])
    seat.chunk(Chunk(2, 7, 0), b"weights")
    assert processes.told == [(1, b"load"), (0, b"build")]


def test_weights_that_were_withdrawn_hold_nothing_up(node):
    seat, processes, sent = node
    seat.offer(offer(7, b"weights"))
    seat.offer(offer(8, b"newer"))
    seat.tell(tell(5, 2), [b"load"])
    assert sent == [Pull(2, 7, 0, 7)]
    ((answer, _),) = Offers(3).answer(sent[0], 0.0)
    assert answer == Withdrawn(2, 7), "the head has forgotten them"
    seat.withdrawn(7)
    assert sent[-1] == Pull(2, 8, 0, 5)
    seat.chunk(Chunk(2, 8, 0), b"newer")
    assert processes.told == [(1, b"load")]
