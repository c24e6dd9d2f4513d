"""The roster against a simple model: no order of joins, leaves, deaths, late answers and timeouts breaks it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from clusterenv.cluster.roster import Admit, Dismiss, NodeState, Refuse, Replace, Roster, ShardAssigned, ShardUnassigned

NODES = 3
DEAD_S, MOVE_S = 10.0, 20.0
node_numbers = st.integers(0, NODES - 1)


class Cluster(RuleBasedStateMachine):
    """Asks every shard for rows, and keeps a ledger: each request is answered once, or declared lost once."""

    def __init__(self):
        super().__init__()
        self.roster = Roster(NODES, DEAD_S, MOVE_S)
        self.now = 0.0
        self.placed = {}  # shard → node, as the instructions say
        self.sessions = {}  # node → session that it was told
        self.asked = {}  # request → (shard, node, session)
        self.open, self.delivered, self.lost = set(), set(), set()
        self.requests = 0
        self.highest = 0
        self.invited = NODES

    def obey(self, instructions):
        for item in instructions:
            if isinstance(item, Admit):
                assert item.session > self.highest, "sessions never come again"
                self.highest = self.sessions[item.node] = item.session
            elif isinstance(item, ShardAssigned):
                assert item.shard not in self.placed, "a shard is given to one node at a time"
                self.placed[item.shard] = item.node
            elif isinstance(item, ShardUnassigned):
                assert self.placed.pop(item.shard) == item.node
                for request in [r for r in self.open if self.asked[r][0] == item.shard]:
                    self.open.discard(request)
                    self.lost.add(request)
            elif isinstance(item, Dismiss):
                assert item.is_unfit or item.node >= self.invited
                assert self.roster.state(item.node) is not NodeState.ACTIVE
            elif isinstance(item, Replace):
                assert item.node < self.invited
                assert self.roster.state(item.node) not in (NodeState.ACTIVE, NodeState.UNFIT)

    @rule(node=node_numbers, instance=st.sampled_from("ab"))
    def hello(self, node, instance):
        self.obey(self.roster.hello(node, instance, None, self.now))

    @rule(node=node_numbers)
    def another_version(self, node):
        before = self.roster.state(node)
        (answer,) = self.roster.hello(node, "x", "versions differ", self.now)
        assert isinstance(answer, Refuse) and answer.final and self.roster.state(node) is before

    @rule(node=node_numbers)
    def connection_ends(self, node):
        self.obey(self.roster.gone(node, "its connection ended", self.now))

    @rule(node=node_numbers)
    def cannot_load_the_code(self, node):
        was_active = self.roster.state(node) is NodeState.ACTIVE
        self.obey(self.roster.unfit(node, "no such module", self.now))
        if was_active:
            assert self.roster.state(node) is NodeState.UNFIT and node not in self.placed.values()
            assert self.roster.gone(node, "its job ended", self.now) == [], "nobody is asked for in its place"

    @rule(seconds=st.sampled_from([0.1, 3.0, DEAD_S + 1, MOVE_S + 1]), was_busy=st.booleans())
    def time_passes(self, seconds, was_busy):
        active = [n for n in range(NODES) if self.roster.state(n) is NodeState.ACTIVE]
        self.now += seconds
        done = self.roster.tick(self.now, self.now if was_busy else 0.0)
        if was_busy:
            assert all(self.roster.state(n) is NodeState.ACTIVE for n in active), "silence while nobody listened"
        self.obey(done)

    @rule(nodes=st.integers(1, NODES))
    def scale(self, nodes):
        self.invited = nodes
        self.obey(self.roster.scale(nodes, self.now))
        for node in range(nodes, NODES):
            assert self.roster.state(node) is not NodeState.ACTIVE or node in self.placed.values()

    @rule(shard=node_numbers)
    def release(self, shard):
        """A shard that is to change hands does so, and only such a one."""
        leaving, holder = self.roster.leaving, self.placed.get(shard)
        self.obey(self.roster.release(shard))
        assert (self.placed.get(shard) != holder) == (shard in leaving)
        assert shard not in self.roster.leaving

    @rule()
    def share_out(self):
        """Begin with whoever is here: nobody's shard stays empty."""
        self.obey(self.roster.share_out(self.now))
        if len(self.roster.missing) < self.invited:
            assert set(self.placed) == set(range(NODES))

    @rule(node=node_numbers)
    def beats(self, node):
        if node in self.sessions:
            heard = self.roster.heard(node, self.sessions[node], self.now)
            assert heard == (self.roster.state(node) is NodeState.ACTIVE)

    @rule(shard=node_numbers)
    def ask(self, shard):
        if shard in self.placed:
            node = self.placed[shard]
            self.requests += 1
            self.asked[self.requests] = (shard, node, self.sessions[node])
            self.open.add(self.requests)

    @rule(data=st.data())
    def answer(self, data):
        """Any request that was ever made is answered: in time, late, or for the second time."""
        if not self.asked:
            return
        request = data.draw(st.sampled_from(sorted(self.asked)))
        shard, node, session = self.asked[request]
        counts = self.roster.heard(node, session, self.now) and self.roster.holder(shard) == node
        if counts and request in self.open:
            assert request not in self.delivered and request not in self.lost
            self.open.discard(request)
            self.delivered.add(request)
        elif counts:
            # The driver has no ticket for it any more: answered before, or lost when the shard went and came back.
            assert request in self.delivered or request in self.lost

    @invariant()
    def the_ledger_is_exact(self):
        assert self.open | self.delivered | self.lost == set(self.asked)
        assert len(self.open) + len(self.delivered) + len(self.lost) == len(self.asked)

    @invariant()
    def seats_are_where_the_roster_says(self):
        for shard in range(NODES):
            assert self.roster.holder(shard) == self.placed.get(shard)
            if shard in self.placed:
                assert self.roster.state(self.placed[shard]) is NodeState.ACTIVE

    @invariant()
    def a_node_that_is_here_has_its_own_seat(self):
        for node in range(NODES):
            if self.roster.state(node) is NodeState.ACTIVE and node < self.invited:
                assert self.placed.get(node) == node or node in self.roster.leaving

    @invariant()
    def nobody_who_is_not_wanted_stays_for_ever(self):
        here = [n for n in range(self.invited) if self.roster.state(n) is NodeState.ACTIVE]
        for shard, node in self.placed.items():
            if node >= self.invited and here:
                assert shard in self.roster.leaving


Cluster.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestRoster = Cluster.TestCase


def test_an_orphaned_seat_moves_after_a_while_and_goes_home_again():
    roster = Roster(2, DEAD_S, MOVE_S)
    roster.hello(0, "a", None, 0.0)
    roster.hello(1, "b", None, 0.0)
    assert roster.gone(0, "killed", 1.0) == [ShardUnassigned(0, 0, "killed", False), Replace(0, "killed")]
    roster.heard(1, 2, 5.0)
    assert roster.tick(5.0, 0.0) == []
    roster.heard(1, 2, 21.0)
    assert roster.tick(21.5, 0.0) == [ShardAssigned(0, 1)]
    assert roster.leaving == frozenset()
    assert roster.hello(0, "c", None, 22.0) == [Admit(0, 3)]
    assert roster.leaving == {0} and roster.holder(0) == 1, "until what is under way there is done"
    assert roster.release(0) == [ShardUnassigned(0, 1, "node 0 is here", True, True), ShardAssigned(0, 0)]
    assert roster.history(0) == ["joined", "killed", "joined"]


def test_a_replacement_that_never_came_is_asked_for_again_ever_later():
    roster = Roster(1, DEAD_S, MOVE_S)
    assert roster.gone(0, "its job ended", 0.0) == [], "while the run starts, the backend tells"
    assert roster.gone(0, "its job ended", 5.0) == [Replace(0, "its job ended", "node_asked_again")]
    assert roster.gone(0, "its job ended", 14.0) == [] and roster.times_asked(0) == 1
    roster.hello(0, "a", None, 0.0)
    assert roster.gone(0, "killed", 1.0)[-1] == Replace(0, "killed")
    asked = [t for t in range(2, 100) if roster.gone(0, "ended", float(t)) == [Replace(0, "ended", "node_asked_again")]]
    assert asked == [6, 16, 36, 76]


def test_a_node_that_ends_before_it_ever_came_is_asked_for_again():
    roster = Roster(3, DEAD_S, MOVE_S, invited=2)
    roster.hello(0, "a", None, 0.0)
    assert roster.gone(1, "its job ended", 1.0) == [], "the backend tells"
    assert roster.gone(1, "its job ended", 6.0) == [Replace(1, "its job ended", "node_asked_again")]
    roster.share_out(7.0)
    assert roster.gone(1, "its job ended", 13.0) == [Replace(1, "its job ended", "node_asked_again")]
    roster.scale(3, 15.0)
    assert roster.gone(2, "no quota", 21.0) == [Replace(2, "no quota", "node_asked_again")]


def test_a_node_that_cannot_run_the_environments_is_not_used_and_not_asked_for_again():
    roster = Roster(2, DEAD_S, None)
    for node in (0, 1):
        roster.hello(node, "a", None, 0.0)
    done = roster.unfit(0, "no such module", 1.0)
    assert done == [ShardUnassigned(0, 0, "no such module", False), Dismiss(0, is_unfit=True), ShardAssigned(0, 1)]
    assert roster.num_usable == 1 and roster.missing == [0]
    assert roster.gone(0, "its job ended", 2.0) == [] == roster.tick(2.0, 2.0)
    (refusal,) = roster.hello(0, "b", None, 3.0)
    assert isinstance(refusal, Refuse) and refusal.final
    roster.scale(1, 4.0)
    roster.scale(2, 5.0)
    assert roster.num_usable == 1, "it is the first of them"


def test_a_seat_waits_for_ever_if_told():
    roster = Roster(2, DEAD_S, None)
    for node in (0, 1):
        roster.hello(node, "a", None, 0.0)
    roster.gone(0, "killed", 1.0)
    roster.heard(1, 2, 1000.0)
    assert roster.tick(1000.0, 999.0) == [] and roster.missing == [0]
