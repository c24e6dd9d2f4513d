"""The weight ledger, and what the head gives to nodes that pull."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clusterenv.cluster.weight_server import WeightServer
from clusterenv.engine.collecting.weights import Node, WeightLedger
from clusterenv.engine.health import Health
from clusterenv.engine.inputs import WeightsHeld, WeightsRefused, WeightsSent
from clusterenv.engine.instructions import Kill
from clusterenv.engine.requests import Requests
from clusterenv.engine.workers import Workers
from clusterenv.errors import ProtocolError
from clusterenv.memory.progress import PHASES
from clusterenv.recovery import Recovery
from clusterenv.wire.frames import CHUNK
from clusterenv.wire.messages import Pull, Withdrawn

pytestmark = pytest.mark.guarantee(27)


class Told:
    """A ledger of four workers on two nodes, with what workers are told, and what travels."""

    def __init__(self):
        self.ledger = WeightLedger([0, 0, 1, 1])
        self.nodes = [Node(), Node()]
        self.ledger.placed(0, 0, 1)
        self.ledger.placed(1, 1, 2)
        self.ledger.attach(SimpleNamespace(nodes=self.nodes))
        self.requests = 0

    def load(self, worker, now=0.0):
        """Returns request, offset and what has to travel; None where there is nothing to load."""
        weights = self.ledger.of(worker).missing(worker)
        if weights is None:
            return None
        self.requests += 1
        return self.requests, *self.ledger.load(worker, weights, self.requests, now)

    def arrive(self, transfer, at=1.0):
        self.ledger.heard(WeightsSent(transfer.weights.number, len(transfer.data)))
        self.ledger.heard(WeightsHeld(transfer.weights.number, at))


@pytest.fixture
def told():
    return Told()


def test_weights_travel_once_to_a_machine_and_are_counted_as_they_do(told):
    machine = told.ledger.of(0)
    told.ledger.assign(machine, 0, b"x" * 100)
    request, offset, transfer = told.load(0)
    assert transfer.data == b"x" * 100 and machine.is_receiving and told.ledger.is_travelling(1)
    assert told.load(1) == (2, offset, None), "the other worker reads the same"
    assert told.load(0) is None and not told.ledger.is_travelling(2)
    told.ledger.heard(WeightsSent(transfer.weights.number, 60))
    assert (told.nodes[0].weight_bytes, told.nodes[0].pulls, machine.version) == (60, 0, -1)
    told.ledger.heard(WeightsSent(transfer.weights.number, 40))
    told.ledger.heard(WeightsHeld(transfer.weights.number, 2.5))
    assert (told.nodes[0].weight_bytes, told.nodes[0].pulls, machine.version) == (100, 1, 0)
    assert told.ledger.pull_s == [2.5, None] and not machine.is_receiving and not told.ledger.is_travelling(0)
    machine.has_read(request)
    assert told.ledger.held_version == -1, "the other machine has none"


def test_what_always_would_send_is_counted_per_machine_and_session(told):
    ledger, nodes = told.ledger, told.nodes
    machine = ledger.of(0)
    ledger.push(0)
    assert nodes[0].pushes == 0, "nothing is published yet"
    machine.newest = 3, 100
    for worker in (0, 1, 0):
        ledger.push(worker)
    assert (nodes[0].pushes, nodes[0].pushed_bytes, nodes[1].pushes) == (1, 100, 0), "once for both workers"
    machine.newest = 5, 100
    ledger.evaluate(machine, b"y" * 100)
    ledger.push(0)
    assert nodes[0].pushes == 1, "what is loaded only for an evaluation is counted apart"
    ledger.end_evaluation()
    ledger.push(1)
    assert (nodes[0].pushes, nodes[0].pushed_bytes) == (2, 200)
    ledger.placed(0, 0, 7)
    ledger.push(0)
    assert (nodes[0].pushes, nodes[0].pushed_bytes) == (3, 300), "a new session has nothing"
    ledger.attach(SimpleNamespace(nodes=[Node(), Node()]))
    ledger.push(0)
    assert (nodes[0].pushes, ledger.attached.nodes[0].pushes) == (3, 0), "nothing is decided for the new policy yet"


def test_weights_are_not_written_over_before_they_are_read(told):
    machine = told.ledger.of(0)
    told.ledger.assign(machine, 0, b"x" * 100)
    one, first, transfer = told.load(0)
    two, _, _ = told.load(1)
    told.arrive(transfer)
    machine.has_read(one)
    told.ledger.assign(machine, 1, b"y" * 100)
    three, second, transfer = told.load(0)
    assert second != first, "worker 1 has yet to read there"
    told.arrive(transfer)
    machine.has_read(two)
    machine.has_read(three)
    told.ledger.assign(machine, 2, b"z" * 100)
    _, third, transfer = told.load(0)
    assert third == first and transfer is not None
    told.ledger.assign(machine, 3, b"z" * 101)
    assert told.load(1)[1] not in (first, second), "larger than any place so far"


def test_a_dead_worker_reads_nothing_and_its_replacement_loads_without_a_transfer(told):
    machine = told.ledger.of(0)
    told.ledger.assign(machine, 0, b"x")
    _, offset, transfer = told.load(0)
    machine.worker_lost(0)
    assert not told.ledger.is_travelling(0), "nobody waits for it"
    told.arrive(transfer)
    assert told.load(0) == (2, offset, None) and told.nodes[0].pulls == 1


def test_a_replaced_node_gets_the_same_again_whole_and_counted(told):
    machine = told.ledger.of(0)
    told.ledger.assign(machine, 0, b"x" * 100, keep=True)
    told.arrive(told.load(0)[2])
    told.ledger.assign(machine, 1, b"y" * 100, "int8", b"y" * 9, takes_steps=True, keep=True)
    transfer = told.load(0)[2]
    assert transfer.data == b"y" * 9, "steps from what it has"
    told.arrive(transfer)
    told.ledger.placed(0, None, 0)
    told.ledger.placed(0, 0, 3)
    transfer = told.load(0)[2]
    assert transfer.data == b"y" * 100 and transfer.machine.session == 3
    told.arrive(transfer)
    assert (told.nodes[0].weight_bytes, told.nodes[0].pulls) == (209, 3)
    assert told.nodes[0].forms == {"fp32": 2, "int8": 1}


def test_what_is_said_of_a_session_that_is_over_changes_nothing(told):
    told.ledger.assign(told.ledger.of(0), 0, b"x")
    transfer = told.load(0)[2]
    told.ledger.placed(0, None, 0)
    told.arrive(transfer)
    assert told.nodes[0].pulls == 0 and told.ledger.of(0).held is None and not told.ledger.is_travelling(0)


def test_a_shard_that_moves_reads_what_its_new_machine_has(told):
    for machine in told.ledger:
        told.ledger.assign(machine, 4, b"x")
        told.arrive(told.load(told.ledger.workers_of(machine)[0])[2])
    told.ledger.placed(1, None, 0)
    told.ledger.placed(1, 0, 1)
    assert list(told.ledger) == [told.ledger.of(0)] and told.ledger.of(3) is told.ledger.of(0)
    assert told.load(3)[2] is None, "it is there already"
    assert [node.pulls for node in told.nodes] == [1, 1]


def test_weights_that_cannot_be_unpacked_go_whole_and_both_are_counted(told):
    told.ledger.assign(told.ledger.of(0), 0, b"x" * 100, "fp16", b"x" * 50)
    transfer = told.load(0)[2]
    told.ledger.heard(WeightsSent(transfer.weights.number, 50))
    assert told.ledger.heard(WeightsRefused(transfer.weights.number)) is transfer and transfer.data == b"x" * 100
    told.arrive(transfer)
    assert told.nodes[0].weight_bytes == 150 and told.nodes[0].forms == {"fp32": 1} and told.nodes[0].pulls == 1


def test_an_evaluation_has_its_own_weights_and_counter(told):
    machine = told.ledger.of(0)
    told.ledger.assign(machine, 0, b"x" * 10)
    _, offset, transfer = told.load(0)
    told.arrive(transfer)
    told.ledger.evaluate(machine, b"e" * 20)
    request, other, transfer = told.load(0)
    assert other != offset and transfer.weights.version == -1
    told.arrive(transfer)
    machine.has_read(request)
    told.ledger.end_evaluation()
    assert told.load(0) == (3, offset, None), "back to what it acted with, which stayed there"
    assert (machine.version, told.nodes[0].evaluation_bytes, told.nodes[0].weight_bytes) == (0, 20, 10)
    assert told.nodes[0].pulls == 1


def test_another_policy_is_not_mistaken_for_what_was_on_its_way(told):
    machine = told.ledger.of(0)
    told.ledger.assign(machine, 0, b"x")
    transfer = told.load(0)[2]
    others = [Node(), Node()]
    told.ledger.attach(SimpleNamespace(nodes=others))
    assert not machine.is_receiving, "what was on its way holds up no decision"
    told.arrive(transfer)
    assert machine.held is None and told.nodes[0].pulls == 1 and others[0].pulls == 0


def test_a_shard_that_leaves_a_machine_with_another_one_reads_nothing_there(told):
    told.ledger.placed(1, 0, 1)
    machine = told.ledger.of(0)
    told.ledger.assign(machine, 0, b"x")
    _, first, transfer = told.load(0)
    told.load(3)
    told.arrive(transfer)
    machine.has_read(1)
    told.ledger.placed(1, None, 0)
    told.ledger.assign(machine, 1, b"y")
    assert told.load(0)[1] == first, "worker 3 would have kept the place for ever"


def test_the_same_weights_have_a_number_of_their_own_on_each_machine(told):
    """Both machines pull at the same time: what one is given must not be withdrawn from the other."""
    ledger, server = told.ledger, WeightServer()
    ledger.placed(0, 0, 5)
    ledger.placed(1, 0, 5)
    ledger.assign(ledger.of(0), 0, b"weights")
    told.load(0)
    ledger.placed(1, None, 0)
    ledger.placed(1, 1, 6)
    first, second = ledger.of(0).assigned, ledger.of(2).assigned
    assert first.data == second.data and first.number != second.number
    for weights, session in ((first, 5), (second, 6)):
        server.put(weights.number, session, weights.data, False)
    for weights, session in ((first, 5), (second, 6)):
        ((message, _),) = server.answer(Pull(weights.number, 0, 7), session)
        assert not isinstance(message, Withdrawn)


def test_limits_for_hangs_begin_when_the_weights_are_there(told):
    workers = Workers([[0], [1], [2], [3]], [0, 0, 1, 1], None)
    health = Health(workers, Requests([[0], [1], [2], [3]]), told.ledger, Recovery(step_timeout_s=10.0))
    stepping = (0, PHASES.index("step"), 0)
    told.ledger.assign(told.ledger.of(0), 0, b"x")
    transfer = told.load(0)[2]
    for now in (0.0, 8.0, 16.0, 100.0):
        assert health.watch(0, stepping, now) is None
    told.arrive(transfer)
    assert health.watch(0, stepping, 101.0) is None and health.watch(0, stepping, 110.0) is None
    assert health.watch(0, stepping, 112.0) == Kill(0)


def given(server, at, size, session=5, number=7):
    return [(message, bytes(frames[0])) for message, frames in server.answer(Pull(number, at, size), session) if frames]


DATA = bytes(range(256)) * (CHUNK // 128)  # four chunks


@pytest.fixture
def server():
    server = WeightServer()
    server.put(7, 5, DATA, False)
    return server


def test_each_range_is_given_once_and_in_order(server):
    pieces = given(server, 0, CHUNK + 10) + given(server, CHUNK + 10, len(DATA) - CHUNK - 10)
    assert b"".join(piece for _, piece in pieces) == DATA and max(len(piece) for _, piece in pieces) <= CHUNK
    for at, size in ((CHUNK, CHUNK), (len(DATA), 1), (10, 10)):
        with pytest.raises(ProtocolError, match="bytes of weights from"):
            given(server, at, size)


def test_pulls_of_the_same_weights_are_bounded(server):
    """Whatever a node asks for and does not read is queued in the head: three times the weights at most."""
    queued = 0
    with pytest.raises(ProtocolError):
        for _ in range(100):
            queued += sum(len(piece) for _, piece in given(server, 0, len(DATA)))
    assert queued == 3 * len(DATA)


def test_what_the_head_does_not_know_is_withdrawn_and_never_met_with_silence(server):
    for number, session in ((8, 5), (7, 6)):
        ((message, _),) = server.answer(Pull(number, 0, 1), session)
        assert message == Withdrawn(number)
    given(server, 0, len(DATA))
    assert list(server.answer(Pull(7, len(DATA), 0), 5)) == []
    assert [message for message, _ in server.answer(Pull(7, 0, 1), 5)] == [Withdrawn(7)], "it has them all"


def test_weights_that_were_not_pulled_are_not_taken_for_received(server):
    for size in (0, -1):
        with pytest.raises(ProtocolError, match="not pulled"):
            server.answer(Pull(7, 0, size), 5)


def test_what_is_for_a_session_that_is_over_is_dropped(server):
    server.put(8, 6, b"x", False)
    server.keep({6})
    assert [message for message, _ in server.answer(Pull(7, 0, 1), 5)] == [Withdrawn(7)]
    assert given(server, 0, 1, 6, 8)[0][1] == b"x"
