"""The decisions, without any process: restarts with a clock of the test's own, infos whatever the spread of rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import clusterenv as ce
from clusterenv.backends.local import split
from clusterenv.engine.health import PaceWatch
from clusterenv.engine.workers import Workers
from clusterenv.events import Event
from clusterenv.long_waits import LongWaits
from clusterenv.memory.progress import PHASES
from clusterenv.memory.rows import assemble, flatten, leaves_of, make_layout
from clusterenv.recovery import RestartBook
from clusterenv.wire import infos
from clusterenv.wire.channel import FrameReader, encode, encode_quick
from clusterenv.wire.requests import Close
from clusterenv.worker.pace import Pace
from toys import same


def test_the_first_restart_is_immediate_then_it_backs_off_up_to_a_limit():
    book = RestartBook(ce.Recovery(max_restarts=6, backoff_s=(1.0, 5.0)))
    waits = [book.failed("slot 0", "x", now) - now for now in (0.0, 10.0, 20.0, 30.0, 40.0)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 5.0]
    assert book.failed("slot 1", "x", 50.0) == 50.0, "each subject has a history of its own"


@pytest.mark.parametrize("phase", PHASES)
def test_the_limit_of_every_phase_has_the_name_of_an_option(phase):
    name, value = ce.Recovery(init_timeout_s=1, reset_timeout_s=2, step_timeout_s=3).timeout_of(phase)
    assert (name, value) in [("init_timeout_s", 1), ("reset_timeout_s", 2), ("step_timeout_s", 3)]


def test_failures_leave_the_window():
    book = RestartBook(ce.Recovery(max_restarts=1, restart_window_s=100.0))
    assert book.failed("slot 0", "first", 0.0) == 0.0
    assert book.failed("slot 0", "second", 101.0) == 101.0
    with pytest.raises(ce.CrashLoopError, match=r"(?s)failed 2 times.*second.*third"):
        book.failed("slot 0", "third", 150.0)


def test_a_long_wait_shows_a_line_when_it_has_doubled_and_the_next_one_only_if_it_is_much_longer():
    waits = LongWaits()

    def lines(begin, lasts):
        waits.begin(begin)
        shown = [s for s in range(lasts) if waits.is_due(begin + s)]
        waits.end(begin + lasts)
        return shown

    assert lines(100.0, 5) == []
    assert lines(200.0, 300) == [10, 20, 40, 80, 140, 200, 260], "twice the last one, doubled, then once a minute"
    assert lines(600.0, 500) == [], "nothing new"
    assert lines(2000.0, 8) == []
    assert lines(3000.0, 17) == [16]


values = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.just(np.zeros(2, np.float32)),
    st.just(np.ones((2, 2))),
    st.just(np.float32(0.5)),
)
dicts = st.recursive(
    st.dictionaries(st.sampled_from("abc"), values, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(values, inner), max_size=3),
    max_leaves=6,
)


@given(rows=st.lists(dicts, min_size=1, max_size=6), cut=st.integers(0, 6))
def test_infos_do_not_depend_on_how_rows_are_spread(rows, cut):
    numbered = list(enumerate(rows))
    whole = infos.batch([infos.pack(numbered)], len(rows))
    apart = infos.batch([infos.pack(numbered[:cut]), infos.pack(numbered[cut:])], len(rows))
    same(apart, whole)


@given(rows=st.lists(dicts, min_size=1, max_size=6), data=st.data())
def test_selecting_rows_is_packing_just_them(rows, data):
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True, min_size=1)).copy()
    chosen.sort()
    names = {row: i for i, row in enumerate(chosen)}
    selected = infos.select(infos.pack(list(enumerate(rows))), names)
    packed = infos.pack([(names[row], rows[row]) for row in chosen])
    same(infos.batch([selected], len(chosen)), infos.batch([packed], len(chosen)))


@pytest.mark.parametrize(("n", "workers", "sizes"), [(64, 2, [32, 32]), (5, 3, [1, 2, 2]), (3, 3, [1, 1, 1])])
def test_slots_are_split_evenly_and_in_order(n, workers, sizes):
    parts = split(n, workers)
    assert [len(part) for part in parts] == sizes and [s for part in parts for s in part] == list(range(n))


def test_layouts_do_not_overlap():
    space = spaces.Dict(a=spaces.Box(0, 1, (3, 5), np.float16), b=spaces.Tuple((spaces.Discrete(3), spaces.Text(4))))
    layout = make_layout(space, spaces.MultiBinary(7), 5)
    assert all(offset % 64 == 0 for offset in layout.offsets) and list(layout.offsets) == sorted(set(layout.offsets))
    assert [leaf.name for leaf in leaves_of(space)] == ["['a']", "['b'][0]", "['b'][1]"]
    sample = space.sample()
    same(assemble(space, flatten(space, sample)), sample)


@given(cuts=st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_frames_survive_any_cut(cuts):
    stream = b"".join([encode_quick(7), encode(Close(3)), encode_quick(2**32 - 1), encode(Close(4))])
    reader, got = FrameReader(), []
    at = 0
    for size in [*cuts, len(stream)]:
        if at < len(stream):
            got += reader.feed(stream[at : at + size])
            at += size
    assert got == [7, Close(3), 2**32 - 1, Close(4)]


def test_an_event_says_where():
    text = str(Event("worker_lost", "killed", (0, 1, 2, 5), phase="step", seed=3))
    assert text == "worker_lost: killed (slots 0-2, 5, phase step, seed 3)"


@pytest.mark.parametrize(
    "error",
    [
        ce.EnvError("it exploded", slot=3, phase="step", remote_traceback="..."),
        ce.WorkerLostError("gone", slots=(1, 2), rows=(np.zeros(2),)),
        ce.PolicyError("odd", remote_traceback="..."),
        ce.UsageError("not now"),
        ce.KeyFileError("not yours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_a_process_pool(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and back.__dict__.keys() == error.__dict__.keys()
    assert getattr(back, "slots", None) == getattr(error, "slots", None)


# -- losses -----------------------------------------------------------------------------------------------------


def test_who_hangs_and_who_is_slow():
    worker = Workers([[0], [1]], [0, 0], None)[0]
    worker.asked(100.0)
    assert worker.stuck_s((3, 2, 0), 100.2) == 0.0
    assert worker.stuck_s((3, 2, 0), 101.0) == pytest.approx(0.8)
    assert worker.stuck_s((4, 2, 0), 101.5) == 0.0
    pace = PaceWatch()
    times = np.array([0.01, 0.011, 0.012, 0.2, 0.0])
    assert [slot for slot, _ in pace.newly_slow(times)] == [3] and pace.newly_slow(times) == []
    assert PaceWatch().newly_slow(times / 1e4) == [], "far below a millisecond nobody is slow"
    times[3] = 0.012
    assert pace.newly_slow(times) == [] and pace.slow == set(), "not slow any more"


def test_a_single_step_that_is_held_up_makes_no_environment_slow():
    pace_s = np.zeros(1)
    pace = Pace(pace_s)
    for elapsed_s in (0.5, *[1e-5] * 8):  # the first one imports something
        pace.note(0, elapsed_s)
    assert pace_s[0] < 0.003
    for _ in range(8):
        pace.note(0, 1e-5)
    pace.note(0, 0.02)
    assert pace_s[0] < 5e-5
    for _ in range(12):
        pace.note(0, 0.02)
    assert pace_s[0] > 0.005, "it has become slow"
