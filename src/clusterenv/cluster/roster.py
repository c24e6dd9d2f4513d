"""Which nodes have joined, and which shards they have. Pure: events and a clock go in, instructions come out.

A node is known by its number, which its key proves. Shard i belongs to node i; while that node is away, another may
have it. A shard that is to move between two nodes that have joined is *leaving* until `release` says that nothing is
under way there. A session is one connection of one node: messages of an older one are ignored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class NodeState(enum.Enum):
    AWAITED = "awaited"  # requested as the run starts, has never joined
    ACTIVE = "active"
    LOST = "lost"  # was active, or was requested during the run; it or its replacement is awaited
    UNFIT = "unfit"  # was active, but cannot run the environments; it is not used, and not replaced


class Admit(NamedTuple):
    """Tell this node that it has joined."""

    node: int
    session: int


class Refuse(NamedTuple):
    node: int
    reason: str
    final: bool


class ShardAssigned(NamedTuple):
    """This node hosts this shard from now on."""

    shard: int
    node: int


class ShardUnassigned(NamedTuple):
    """No node has this shard any more: its workers are gone."""

    shard: int
    node: int
    reason: str
    is_there: bool  # the node is still active, and must be told
    is_moved: bool = False  # moved on purpose, not lost


class Replace(NamedTuple):
    """Request this node from the backend again."""

    node: int
    reason: str
    event: Literal["node_lost", "node_asked_again", "node_invited"] = "node_lost"
    """In this order: it was active; it or its replacement ended before it joined; the run is scaled up."""


class Dismiss(NamedTuple):
    """Tell this node and the backend that it is not needed any more."""

    node: int
    is_unfit: bool = False  # it cannot run the environments; otherwise, the run needs fewer nodes


Instruction = Admit | Refuse | ShardAssigned | ShardUnassigned | Replace | Dismiss

_ASK_AGAIN_S = 5.0
_ASK_MOST_S = 60.0
"""Delay before a node that ended before it joined is requested again: doubled each time, up to the second value."""

_AFTER = {
    (NodeState.AWAITED, "hello"): NodeState.ACTIVE,
    (NodeState.LOST, "hello"): NodeState.ACTIVE,
    (NodeState.ACTIVE, "hello"): NodeState.ACTIVE,  # it joined again before its loss was noticed
    (NodeState.ACTIVE, "gone"): NodeState.LOST,
    (NodeState.ACTIVE, "unfit"): NodeState.UNFIT,
}


@dataclass
class _Node:
    state: NodeState = NodeState.AWAITED
    instance: str = ""
    session: int = 0
    heard_at: float = 0.0
    shards: set[int] = field(default_factory=set)
    history: list[str] = field(default_factory=list)
    asked: int = 0  # how often it was requested again since it was last active
    asked_at: float | None = None


class Roster:
    """`nodes` nodes with a shard each, of which the first `invited` take part; `scale` changes that.

    Args:
        dead_after_s: a node that is silent for this long is lost.
        move_after_s: a shard without a node for this long goes to another one, if there is any; None: never.
    """

    def __init__(
        self, nodes: int, dead_after_s: float, move_after_s: float | None = None, invited: int | None = None
    ) -> None:
        self._nodes = [_Node() for _ in range(nodes)]
        self._invited = range(nodes if invited is None else invited)
        self._dead_after_s = dead_after_s
        self._move_after_s = move_after_s
        self._sessions = 0
        self._holder: dict[int, int] = {}  # shard → node
        self._empty_since: dict[int, float] = dict.fromkeys(range(nodes), 0.0)  # shard → when
        self._was_placed: set[int] = set()

    # -- queries ----------------------------------------------------------------------------------------------

    def state(self, node: int) -> NodeState:
        return self._nodes[node].state

    def session(self, node: int) -> int:
        return self._nodes[node].session

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def is_invited(self, node: int) -> bool:
        """Return whether this node takes part in the run."""
        return node in self._invited

    def heard_at(self, node: int) -> float:
        return self._nodes[node].heard_at

    def holder(self, shard: int) -> int | None:
        """Return the node that has this shard."""
        return self._holder.get(shard)

    def shards(self, node: int) -> frozenset[int]:
        """Return the shards of this node."""
        return frozenset(self._nodes[node].shards)

    def history(self, node: int) -> list[str]:
        return list(self._nodes[node].history)

    @property
    def leaving(self) -> frozenset[int]:
        """Shards that are to move once nothing is under way: to their own node, or from one that is to leave."""
        here = self._here()
        away = {shard for shard, holder in self._holder.items() if holder not in self._invited}
        home = {shard for shard, holder in self._holder.items() if holder != shard and shard in here}
        return frozenset(away | home if here else ())

    @property
    def missing(self) -> list[int]:
        return [i for i in self._invited if self._nodes[i].state is not NodeState.ACTIVE]

    @property
    def num_usable(self) -> int:
        """The number of nodes that have joined, or may still join."""
        return sum(self._nodes[i].state is not NodeState.UNFIT for i in self._invited)

    @property
    def has_met_any(self) -> bool:
        """Whether any node has ever joined."""
        return self._sessions > 0

    def times_asked(self, node: int) -> int:
        """Return how often this node was requested again since it was last active."""
        return self._nodes[node].asked

    # -- events -----------------------------------------------------------------------------------------------

    def hello(self, number: int, instance: str, mismatch: str | None, now: float) -> list[Instruction]:
        """Handle a node's Hello; `mismatch`: why it cannot take part in this run."""
        node = self._nodes[number]
        if mismatch is not None:
            self._note(node, f"refused: {mismatch}")
            return [Refuse(number, mismatch, True)]
        if number not in self._invited:
            refusal = Refuse(number, f"the run has {len(self._invited)} nodes now, without node {number}", True)
            return [refusal, *self.gone(number, "its connection ended", now)]
        if node.state is NodeState.UNFIT:
            return [Refuse(number, "it cannot run the environments of this run", True)]
        done: list[Instruction] = []
        if node.state is NodeState.ACTIVE:
            if node.instance != instance:
                if now - node.heard_at < self._dead_after_s / 2:
                    return [Refuse(number, f"node {number} is here already, with the same key", True)]
                return [Refuse(number, f"node {number} was here a moment ago; try again", False)]
            done += self._unassign(node, number, "it came back with a new connection", now)
        self._move(node, "hello", "joined")
        self._sessions += 1
        node.instance, node.session, node.heard_at, node.asked = instance, self._sessions, now, 0
        done.append(Admit(number, node.session))
        return done + self._place(now)

    def heard(self, number: int, session: int, now: float) -> bool:
        """Note that a node is alive; returns whether the message is of its current session."""
        node = self._nodes[number]
        if node.state is not NodeState.ACTIVE or node.session != session:
            return False
        node.heard_at = now
        return True

    def gone(self, number: int, reason: str, now: float) -> list[Instruction]:
        """Handle the end of a node's connection or job, or its Bye; one that is not active ended before it joined."""
        node = self._nodes[number]
        if number not in self._invited:
            if node.state is not NodeState.ACTIVE:
                return []
            self._move(node, "gone", reason)
            return [*self._unassign(node, number, reason, now), Dismiss(number), *self._place(now)]
        if node.state is not NodeState.ACTIVE:
            if node.asked_at is None:  # not at once: the caller may give up the start
                node.asked_at = now
            if node.state is NodeState.UNFIT or now - node.asked_at < min(_ASK_AGAIN_S * 2**node.asked, _ASK_MOST_S):
                return []
            node.asked, node.asked_at = node.asked + 1, now
            self._note(node, reason)
            return [Replace(number, reason, "node_asked_again")]
        self._move(node, "gone", reason)
        node.asked_at = now
        return [*self._unassign(node, number, reason, now), Replace(number, reason), *self._place(now)]

    def unfit(self, number: int, reason: str, now: float) -> list[Instruction]:
        """Move the shards of a node that cannot run the environments, without delay; it is not requested again."""
        node = self._nodes[number]
        if node.state is not NodeState.ACTIVE:
            return []
        self._move(node, "unfit", reason)
        return [*self._unassign(node, number, reason, now), Dismiss(number, is_unfit=True), *self._place(now)]

    def tick(self, now: float, listening_since: float) -> list[Instruction]:
        """Find silent nodes and place shards. Silence counts only while the head itself was listening."""
        done: list[Instruction] = []
        for number, node in enumerate(self._nodes):
            silent_s = now - max(node.heard_at, listening_since)
            if node.state is NodeState.ACTIVE and silent_s > self._dead_after_s:
                done += self.gone(number, f"it was silent for {silent_s:.1f} s", now)
        return done + self._place(now)

    def scale(self, nodes: int, now: float) -> list[Instruction]:
        """Change how many nodes take part; each of the others leaves with its last shard."""
        before, self._invited = self._invited, range(nodes)
        done: list[Instruction] = []
        for number in before[nodes:]:
            done += self._dismiss(number)
        for number in self._invited[len(before) :]:
            if self.state(number) is not NodeState.ACTIVE:
                self._want(number, now)
                done.append(Replace(number, "the run needs more nodes", "node_invited"))
        return done + self._place(now)

    def release(self, shard: int) -> list[Instruction]:
        """Move a leaving shard: nothing is under way there any more."""
        if shard not in self.leaving:
            return []
        here, number = self._here(), self._holder.pop(shard)
        self._nodes[number].shards.discard(shard)
        to = shard if shard in here else self._least(here)
        reason = f"node {shard} is here" if to == shard else "the run needs fewer nodes"
        done: list[Instruction] = [ShardUnassigned(shard, number, reason, True, is_moved=True), self._shard(shard, to)]
        return done if number in self._invited else done + self._dismiss(number)

    def share_out(self, now: float) -> list[Instruction]:
        """Begin the run: assign every shard to a node that has joined, even if its own node never has."""
        done = self._place(now)
        for number in self.missing:
            if self._nodes[number].state is NodeState.AWAITED:
                self._want(number, now)
        here = self._here()
        if here:
            done += [self._shard(shard, self._least(here)) for shard in sorted(self._empty_since)]
        return done

    # -- inside -----------------------------------------------------------------------------------------------

    def _move(self, node: _Node, event: str, reason: str) -> None:
        node.state = _AFTER[node.state, event]
        self._note(node, reason)

    def _note(self, node: _Node, text: str) -> None:
        node.history = [*node.history[-19:], text]

    def _here(self) -> list[int]:
        return [i for i in self._invited if self._nodes[i].state is NodeState.ACTIVE]

    def _want(self, number: int, now: float) -> None:
        """Await a node during the run: if it ends before it joins, it is requested again."""
        node = self._nodes[number]
        node.state, node.asked, node.asked_at = NodeState.LOST, 0, now

    def _dismiss(self, number: int) -> list[Instruction]:
        """Dismiss a node, unless it still has a shard."""
        node = self._nodes[number]
        if node.shards:
            return []
        if node.state is NodeState.ACTIVE:
            self._move(node, "gone", "scaled down")
        return [Dismiss(number)]

    def _unassign(self, node: _Node, number: int, reason: str, now: float) -> list[Instruction]:
        shards, node.shards = sorted(node.shards), set()
        for shard in shards:
            del self._holder[shard]
        self._empty_since.update(dict.fromkeys(shards, now))
        return [ShardUnassigned(shard, number, reason, False) for shard in shards]

    def _place(self, now: float) -> list[Instruction]:
        """Assign every shard without a node to its own node or, after a while, to the one with the fewest."""
        done: list[Instruction] = []
        here = self._here()
        for shard in sorted(self._empty_since):
            if shard in here:
                done.append(self._shard(shard, shard))
            elif here and self._may_move(shard, now):
                done.append(self._shard(shard, self._least(here)))
        return done

    def _least(self, here: list[int]) -> int:
        return min(here, key=lambda i: (len(self._nodes[i].shards), i))

    def _may_move(self, shard: int, now: float) -> bool:
        if shard not in self._was_placed:
            return False
        if shard not in self._invited or self._nodes[shard].state is NodeState.UNFIT:
            return True
        if self._move_after_s is None:
            return False
        return now - self._empty_since[shard] >= self._move_after_s

    def _shard(self, shard: int, node: int) -> ShardAssigned:
        self._nodes[node].shards.add(shard)
        self._holder[shard] = node
        self._empty_since.pop(shard, None)
        self._was_placed.add(shard)
        return ShardAssigned(shard, node)
