"""What becomes of a slot that was lost: the table, and that no sequence of events leaves it."""

from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv.engine.slots import Env, Episode, Loss, Row, Slot, SlotError, Slots, after_loss

NEXT, SAME, OFF = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
LOSS = Loss("why", True)


@pytest.mark.parametrize(
    ("mode", "row", "episode", "env", "is_reported"),
    [
        (NEXT, Row.AWAITED, Episode.RUNNING, Env.LOST, True),
        (OFF, Row.AWAITED, Episode.RUNNING, Env.LOST, True),
        (SAME, Row.AWAITED, Episode.RUNNING, Env.DUE, True),
        (NEXT, Row.AWAITED, Episode.ENDED, Env.DUE, False),
        (SAME, Row.AWAITED, Episode.ENDED, Env.DUE, True),
        (NEXT, Row.RESETTING, Episode.RUNNING, Env.DUE, False),
        (NEXT, Row.READY, Episode.RUNNING, Env.LOST, True),
        (NEXT, Row.READY_ENDING, Episode.ENDED, Env.DOWN, False),
        (SAME, Row.READY_ENDING, Episode.ENDED, Env.LOST, True),
        (OFF, Row.READY_ENDING, Episode.ENDED, Env.DOWN, False),
        (NEXT, Row.READY_LOSS, Episode.RUNNING, Env.DOWN, False),
        (NEXT, Row.IDLE, Episode.RUNNING, Env.LOST, True),
        (NEXT, Row.IDLE, Episode.ENDED, Env.DUE, False),
        (SAME, Row.IDLE, Episode.ENDED, Env.LOST, True),
        (OFF, Row.IDLE, Episode.ENDED, Env.DOWN, False),
        (NEXT, Row.IDLE, Episode.NONE, Env.DOWN, False),
    ],
)
def test_what_a_loss_means(mode, row, episode, env, is_reported):
    assert after_loss(mode, row, episode, was_held=False) == (env, is_reported)
    slots = Slots(mode)
    reported = slots.lose(3, LOSS, row, episode, 9.0, 10.0)
    assert reported == (LOSS if row is Row.AWAITED and env is Env.LOST else None)
    assert (slots.due([3], 10.0) == [3]) == (env is Env.DUE)
    assert slots.due([3], 9.5) == [], "not before its backoff is over"


def test_a_rebuild_is_asked_for_once():
    slots = Slots(NEXT)
    slots.lose_by_error(1, "why", 0.0)
    assert slots.step(1) == (None, None)
    assert slots.due([0, 1], 0.0) == [1]
    slots.rebuild([1])
    slots.bring_back(1)
    assert slots.due([0, 1], 5.0) == []
    assert slots.rebuilt(1) is None and not slots


def test_whoever_waits_again_has_as_long_again():
    slots = Slots(NEXT)
    slots.lose_by_error(0, "why", 0.0)
    assert slots.late([True], 1.0, limit_s=8.0) == []
    assert slots.late([True], 9.5, limit_s=8.0) == [0], "a call raises"
    assert slots.late([True], 10.0, limit_s=8.0) == [], "the next one has begun"
    assert slots.late([True], 18.5, limit_s=8.0) == [0]


def test_a_transition_that_cannot_be_names_the_last_ones():
    slot = Slot(7)
    slot.move(Env.LOST, "worker 2 exited")
    with pytest.raises(SlotError, match=r"slot 7: live -> lost \(worker 2 exited\); lost -> held \(odd\)"):
        slot.move(Env.HELD, "odd")


class _User:
    """The rows of one slot as `rows.py` keeps them, and what the user has seen of its episodes."""

    def __init__(self, mode):
        self.mode, self.slots = mode, Slots(mode)
        self.row, self.episode = Row.IDLE, Episode.RUNNING
        self.seen, self.incarnation = 0, 0  # which incarnation the last row delivered was of
        self.is_over = False  # the user knows that the episode of `seen` is over

    def lose(self):
        loss = self.slots.lose(0, LOSS, self.row, self.episode, 0.0, 0.0)
        if loss is not None:
            self.row = Row.READY_LOSS

    def ask(self):
        if self.row is not Row.IDLE or (self.mode is OFF and self.episode is Episode.ENDED):
            return
        asked = self.slots.step(0)
        self.row = Row.AWAITED
        if asked is not None and asked.first is not None:
            self.arrive_first(asked.loss)
        elif asked is not None and asked.loss is not None:
            self.row = Row.READY_LOSS

    def reset(self):
        if self.row is not Row.IDLE:
            return
        self.is_over = True
        self.slots.reset(0)
        self.row = Row.RESETTING

    def arrive(self, ends):
        if self.slots.env(0) is Env.LIVE and self.row in (Row.AWAITED, Row.RESETTING):
            is_reset = self.row is Row.RESETTING or self.episode is Episode.ENDED
            self.is_over = self.is_over or (is_reset and self.episode is Episode.ENDED)
            self.row = Row.READY_ENDING if ends and not is_reset else Row.READY
            self.of = self.incarnation

    def arrive_first(self, loss):
        self.row, self.of = Row.READY, self.incarnation
        self.is_over = self.is_over or loss is not None

    def rebuild(self):
        if self.slots.due([0], 1.0):
            assert self.row not in (Row.READY, Row.READY_ENDING), "over a row that was not delivered"
            self.slots.rebuild([0])
            self.incarnation += 1

    def rebuilt(self):
        if self.slots.env(0) is Env.REBUILDING:
            if self.row in (Row.AWAITED, Row.RESETTING):
                self.arrive_first(self.slots.rebuilt(0))
            else:
                self.slots.hold(0, {})

    def deliver(self):
        if self.row in (Row.READY_LOSS, Row.READY_ENDING):
            self.is_over, self.episode = True, Episode.ENDED
        elif self.row is Row.READY:
            assert self.of == self.seen or self.is_over, "two incarnations are spliced"
            self.seen, self.is_over, self.episode = self.of, False, Episode.RUNNING
        else:
            return
        if self.row is Row.READY_ENDING:
            assert self.of == self.seen or self.mode is SAME
            self.seen = self.of
            if self.mode is SAME:
                self.is_over = False  # the row holds the first observation of the next episode
                self.episode = Episode.ENDED
        if self.episode is Episode.ENDED and self.mode is NEXT and self.slots.is_gone(0):
            self.slots.bring_back(0)
        self.row = Row.IDLE


@settings(max_examples=400)
@given(
    st.sampled_from([NEXT, SAME, OFF]),
    st.lists(
        st.sampled_from(["lose", "ask", "reset", "arrive", "arrive ending", "rebuild", "rebuilt", "deliver"]),
        max_size=40,
    ),
)
def test_no_order_of_events_splices_two_incarnations_or_overwrites_a_row(mode, events):
    user = _User(mode)
    for event in events:
        if event.startswith("arrive"):
            user.arrive(ends=event.endswith("ending"))
        else:
            getattr(user, event)()
