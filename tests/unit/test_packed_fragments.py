"""What workers pack, when they do, and what the head accepts of it."""

from __future__ import annotations

import mmap
import zlib

import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce
from clusterenv.engine.requests import Kind, Requests
from clusterenv.executors.remote_answers import RemoteAnswers
from clusterenv.memory.compression import CODECS, Form, installed_codecs
from clusterenv.memory.fragments import Arena, ArenaLayout, FragmentArrays
from clusterenv.memory.rows import leaves_of, make_layout
from clusterenv.memory.stacks import Stack
from clusterenv.memory.transfer import read_fragment
from clusterenv.transport.link_rate import LinkRate
from clusterenv.transport.sockets import LOCAL_BYTES_PER_S
from clusterenv.wire.channel import Brings, FrameReader, encode_plain, plain
from clusterenv.wire.messages import Answer
from clusterenv.wire.requests import Finals, FragmentResult, Reply, RunFragment
from clusterenv.worker.compressing import FragmentPacker, Measured, choose

BEST = CODECS[0]
ONCE, ZSTD, BOTH = Form(Stack(0, 1), ""), Form(None, BEST), Form(Stack(0, 1), BEST)
SPACE = spaces.Dict(image=spaces.Box(0, 255, (4, 30, 30), np.uint8), vector=spaces.Box(-1, 1, (3,), np.float32))
ACTION = spaces.Discrete(2)
ROWS = make_layout(SPACE, ACTION, 6)
LAYOUT = ArenaLayout(12, 6, ROWS.obs, leaves_of(ACTION)[0], 0)
SLOTS = [2, 3, 4]
COLUMNS = slice(2, 5)
STEPS = 12
IMAGE = 8  # its position among the arrays
SECOND = 1.0


# -- deciding ---------------------------------------------------------------------------------------------------


def test_the_form_that_is_sent_soonest_is_chosen():
    measured = {ONCE: Measured(0.1e-9, 0.25), BOTH: Measured(2e-9, 0.01)}
    assert choose(measured, 1 / 10e6) == BOTH
    assert choose(measured, 1 / 500e6) == ONCE, "the compressor takes longer than it saves"
    assert choose(measured, 1 / 10e9) is None
    assert choose({}, 1.0) is None


def test_little_gain_is_none():
    assert choose({ZSTD: Measured(1e-9, 0.9)}, 1.0) is None
    assert choose({ZSTD: Measured(1e-9, 0.7)}, 1.0) == ZSTD
    assert choose({ZSTD: Measured(0.3, 0.3)}, 1.0) is None, "a second of the CPU counts twice"


def test_the_rate_of_a_link_is_that_of_large_messages():
    rate = LinkRate()
    rate.sending(1000, 0, 0)
    assert not rate.is_measuring and not rate.bytes_per_s
    rate.sending(1_000_000, 5000, 100)
    assert not rate.read(500_000, 4_000)
    assert rate.read(1_005_000, 10_100) and rate.bytes_per_s == pytest.approx(100e6)
    assert not rate.is_measuring and not rate.read(2_000_000, 20_000)
    rate.sending(1_500_000, 2_000_000, 20_000)
    assert not rate.read(3_000_000, 30_000)
    assert rate.read(3_500_000, 20_000 + 150_000)
    assert 10e6 < rate.bytes_per_s < 16e6, "both measurements count, the slower one for longer"


def test_the_rate_is_known_soon_on_a_link_that_is_always_full():
    rate, size, sent, acked = LinkRate(), 1_000_000, 0, 0
    while not rate.read(acked, acked // 10):
        while sent - acked < 100 * size:
            rate.sending(size, acked, acked // 10)
            sent += size
        acked += size // 2
    assert acked <= 2 * size and rate.bytes_per_s == pytest.approx(10e6)


class Clock:
    """Time that only passes when it is asked for: packing takes as long as the test says."""

    def __init__(self, each=0.0):
        self.now, self.each = 0.0, each

    def __call__(self):
        self.now += self.each
        return self.now


def side_with(fill):
    arena = Arena(LAYOUT, mmap.mmap(-1, LAYOUT.size))
    side = arena.sides[0]
    side.valid[...] = True
    fill(side.obs[0])
    side.obs[1][...] = np.random.default_rng(0).random(side.obs[1].shape)
    return side


def stacked(rows):
    frames = np.random.default_rng(1).integers(0, 4, (len(rows) + 3, 6, 30, 30)).astype(np.uint8)
    for t in range(len(rows)):
        rows[t] = np.stack(frames[t : t + 4], 1)


def noise(rows):
    rows[...] = np.random.default_rng(1).integers(0, 256, rows.shape)


def result_of(side, finals=()):
    when, who = (np.array([pair[i] for pair in finals], np.int64) for i in (0, 1))
    leaves = [leaf[when + 1, 2 + who].copy() for leaf in side.obs]
    for t, k in finals:
        side.terminations[t, 2 + k] = True
    return FragmentResult(STEPS, 0, Finals(when, who, leaves), [], {}, None, None, None, 0.1, 0.1)


def pack(side, result, mode="auto", rate=1e6, codecs=CODECS, clock=None, packer=None):
    packer = packer or FragmentPacker(mode, codecs, lambda: rate, clock or Clock(), clock or Clock())
    return packer.pack(FragmentArrays(side.specs, side.part(STEPS, COLUMNS)), result)


def forms(side, **options):
    packed, result = pack(side, result_of(side), **options)
    assert set(packed) == ({IMAGE} if result.forms[0][:3] != "off" else set())
    return result.forms


SMALL = "off: small"


def test_what_is_packed_and_why_not():
    frames, random = side_with(stacked), side_with(noise)
    assert forms(frames) == [f"frames once + {BEST}", SMALL]
    assert forms(frames, rate=0.0) == ["off: the link is not measured yet", SMALL]
    assert forms(frames, rate=1e12, mode="always") == [f"frames once + {BEST}", SMALL]
    assert forms(frames, mode="never") == ["off: compress=False", "off: compress=False"]
    assert forms(random) == ["off: it does not compress", SMALL]
    assert forms(random, mode="always") == ["off: it does not compress", SMALL]


def test_what_is_packed_is_limited(monkeypatch):
    monkeypatch.setattr("clusterenv.worker.compressing._MOST_BYTES", 10)
    assert forms(side_with(stacked)) == ["off: too large", SMALL]


def test_packing_that_takes_longer_than_sending_is_not_done():
    side = side_with(stacked)
    for rate, expected in ((1e3, "frames once"), (1e6, "off: the link is fast")):
        assert forms(side, rate=rate, clock=Clock(each=SECOND))[0].startswith(expected)


def test_within_one_machine_cheap_packing_pays_and_compression_of_noise_does_not():
    """As measured on Atari frames: 0.4 ns for a byte to send frames once and compress them; noise takes 3 ns."""
    once, noisy = Form(Stack(0, 1), "zstd"), Form(None, "zstd")
    byte_s = 1 / LOCAL_BYTES_PER_S
    assert choose({once: Measured(4e-10, 0.01)}, byte_s) == once
    assert choose({noisy: Measured(3e-9, 0.5)}, byte_s) is None


def test_a_compressor_that_is_missing_is_named(monkeypatch):
    side = side_with(stacked)
    assert forms(side, codecs=("zlib",))[0] == "frames once + zlib (zstd is missing at the head)"
    assert forms(side, codecs=())[0] == "frames once (zstd is missing at the head)"
    monkeypatch.setattr("clusterenv.worker.compressing.installed_codecs", lambda: ("zlib",))
    assert forms(side, codecs=("zlib",))[0] == "frames once + zlib (zstd is missing on this node)"


def test_what_does_not_compress_any_more_is_sent_as_it_is_and_measured_again_later():
    clock = Clock()
    packer = FragmentPacker("auto", CODECS, lambda: 1e6, clock, Clock())
    frames, random = side_with(stacked), side_with(noise)
    said = [pack(frames, result_of(frames), packer=packer)[1].forms[0]]
    for _ in range(3):
        packed, result = pack(random, result_of(random), packer=packer)
        said.append(result.forms[0])
    assert not packed and said[0] == f"frames once + {BEST}" and said[-1].startswith("off: ")
    assert pack(frames, result_of(frames), packer=packer)[1].forms[0].startswith("off: ")
    clock.now += 11
    assert pack(frames, result_of(frames), packer=packer)[1].forms[0] == f"frames once + {BEST}"


def test_measuring_takes_a_small_share_of_the_time():
    clock = Clock(each=0.25)
    packer = FragmentPacker("auto", CODECS, lambda: 1e6, clock, Clock())
    side = side_with(stacked)
    pack(side, result_of(side), packer=packer)
    assert packer._leaves[0].measure_at - clock.now > 45, "it took a quarter of a second"


# -- the way to the head ----------------------------------------------------------------------------------------

FINALS = [(t, k) for t in (3, 5, 7, 9) for k in range(3)]


def answered(side, finals=FINALS):
    """Return the answer of a worker to a request for this fragment, as a node sends it."""
    packed, result = pack(side, result_of(side, finals))
    assert isinstance(result.finals.leaves[0], bytes) == (len(finals) > 4)
    (raw,) = FrameReader().feed(
        encode_plain(Reply(1, SLOTS, result=result), brings=(Brings.FRAGMENT, 0, STEPS), packed=packed)
    )
    frames = [raw.body, *read_fragment(side, COLUMNS, STEPS, raw.packed)]
    return Answer(0, 1, 1, True, raw.slots, tuple(raw.packed)), [bytes(frame) for frame in frames]


@pytest.fixture
def head():
    ledger = Requests([[0, 1], SLOTS, [5]])
    answers = RemoteAnswers(ledger, ledger.slots_of, [[0, 1, 2]], is_vector=False, open_bytes=[0])
    answers.allocate(ROWS)
    memory = answers.allocate_arena(LAYOUT)
    answers.expect(ledger.open(1, Kind.FRAGMENT, SLOTS, RunFragment(1, STEPS, 0, {}, [0, 0, 0])))
    return answers, memory


def test_a_packed_fragment_arrives_as_it_was(head):
    answers, memory = head
    side = side_with(stacked)
    answer, frames = answered(side)
    assert answer.packed == (IMAGE,)
    ((worker, reply),) = answers.of_worker(answer, frames)
    here = Arena(LAYOUT, memory).sides[0]
    for sent, got in zip(side.part(STEPS, COLUMNS), here.part(STEPS, COLUMNS), strict=True):
        assert sent.tobytes() == got.tobytes()
    expected = result_of(side, FINALS).finals
    for sent, got in zip(expected, reply.result.finals, strict=True):
        assert np.array_equal(sent[0], got[0]) if isinstance(sent, list) else np.array_equal(sent, got)
    arrays = sum(array.nbytes for array in side.part(STEPS, COLUMNS))
    raw_bytes = arrays + sum(leaf.nbytes for leaf in expected.leaves)
    sent_bytes = raw_bytes - reply.result.saved_bytes
    body = len(plain().pack(Reply(1, SLOTS, result=result_of(side))))
    assert worker == 1 and 0 < sent_bytes < raw_bytes / 8
    assert abs(sent_bytes - (sum(map(len, frames)) - body)) < 1000


def zeros(size):
    return zlib.compress(bytes(size), 1)


def _with(frames, i, data):
    return [*frames[: 1 + i], data, *frames[2 + i :]]


def _finals(frames, leaf, count=12):
    reply = plain().unpack(frames[0])
    where = np.zeros(count, np.int64)
    finals = Finals(where, where, [leaf, reply.result.finals.leaves[1]])
    return [plain().pack(reply._replace(result=reply.result._replace(finals=finals))), *frames[1:]]


LIES = {
    "an array packed twice": lambda p, f: ((IMAGE, IMAGE), f),
    "an array that does not exist": lambda p, f: ((IMAGE, 99), f),
    "an array before the first": lambda p, f: ((-1,), f),
    "rewards": lambda p, f: ((1, IMAGE), f),
    "garbage": lambda p, f: (p, _with(f, IMAGE, b"garbage of some length")),
    "nothing": lambda p, f: (p, _with(f, IMAGE, b"")),
    "one byte less": lambda p, f: (p, _with(f, IMAGE, f[1 + IMAGE][:-1])),
    "a packed array that is not said to be one": lambda p, f: ((), f),
    "fewer rows": lambda p, f: (p, _with(f, IMAGE, b"\1\xff\0\1\0\0\0" + zeros(3 * 3600))),
    "zeros without end": lambda p, f: (p, _with(f, IMAGE, b"\1\xff\0\x0d\0\0\0" + zeros(100 << 20))),
    "an array less": lambda p, f: (p, f[:-1]),
    "no arrays": lambda p, f: (p, f[:1]),
    "finals that are garbage": lambda p, f: (p, _finals(f, b"garbage of some length")),
    "finals that are empty": lambda p, f: (p, _finals(f, b"")),
    "finals without end": lambda p, f: (p, _finals(f, b"\1\xff\0\x40\x42\x0f\0" + zeros(1 << 20), 1_000_000)),
}


@pytest.mark.guarantee(22)
@pytest.mark.parametrize("lie", LIES)
def test_lies_about_packed_arrays_change_nothing(head, lie):
    answers, memory = head
    answer, frames = answered(side_with(stacked))
    before = memory[:]
    packed, frames = LIES[lie](answer.packed, frames)
    with pytest.raises(ce.ProtocolError):
        answers.of_worker(Answer(0, 1, 1, True, answer.slots, packed), frames)
    assert memory[:] == before


def test_only_fragments_may_be_packed():
    ledger = Requests([SLOTS])
    answers = RemoteAnswers(ledger, ledger.slots_of, [[0]], is_vector=False, open_bytes=[0])
    answers.allocate(ROWS)
    ledger.step_all = 1
    answers.expect(ledger.open_step(0))
    with pytest.raises(ce.ProtocolError, match="where none were requested"):
        answers.of_worker(Answer(0, 0, 1, True, tuple(SLOTS), (0,)), [b"", b"x"])


def test_what_a_node_says_about_itself_is_not_counted(head):
    answers, _ = head
    side = side_with(noise)
    packed, result = pack(side, result_of(side), mode="never")
    lie = Reply(1, SLOTS, result=result._replace(saved_bytes=10**9))
    frames = [plain().pack(lie), *read_fragment(side, COLUMNS, STEPS)]
    ((_, reply),) = answers.of_worker(Answer(0, 1, 1, True, tuple(SLOTS)), frames)
    assert not packed and reply.result.saved_bytes == 0


@pytest.mark.parametrize("said", [7, ["x" * 2000], ["x"] * 2000, [3]])
def test_forms_that_are_no_short_texts_are_refused(head, said):
    answers, _ = head
    side = side_with(noise)
    lie = Reply(1, SLOTS, result=result_of(side)._replace(forms=said))
    frames = [plain().pack(lie), *read_fragment(side, COLUMNS, STEPS)]
    with pytest.raises(ce.ProtocolError, match="malformed forms"):
        answers.of_worker(Answer(0, 1, 1, True, tuple(SLOTS)), frames)


def test_this_python_can_compress():
    assert "zlib" in installed_codecs() and set(installed_codecs()) <= set(CODECS)
