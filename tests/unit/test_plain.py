"""Plain data to bytes and back: exact, or refused with its place; and no bytes whatever do harm."""

from __future__ import annotations

import ast
import collections
import contextlib
import datetime
import enum
import math
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import clusterenv as ce
from clusterenv.errors import NotPlainError, ProtocolError
from clusterenv.wire import format as wire
from clusterenv.wire import infos
from clusterenv.wire import requests as messages
from clusterenv.wire.plain import PlainCodec

pytestmark = pytest.mark.guarantee(23)


class Pair(NamedTuple):
    left: Any
    right: Any = None


class Empty(NamedTuple):
    pass


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 10


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


MESSAGES = (
    messages.Reply,
    messages.Fault,
    messages.FragmentResult,
    messages.Finals,
    messages.DriftSamples,
    messages.Acted,
    messages.PlayedEpisode,
    messages.Built,
    infos.Column,
)
codec = PlainCodec([*MESSAGES, Pair, Empty], [Colour, Level, Rights])

SPACES = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
    spaces.Text,
    spaces.Dict,
    spaces.Tuple,
    spaces.Sequence,
    spaces.Graph,
    spaces.OneOf,
)


def exact(a: Any, b: Any) -> None:
    """Equal in everything: types, bits, order."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, np.ndarray):
        assert (a.dtype.str, a.dtype.num, a.shape) == (b.dtype.str, b.dtype.num, b.shape)
        if a.dtype.kind == "O":
            for index in np.ndindex(a.shape):
                exact(a[index], b[index])
        else:
            assert a.tobytes() == b.tobytes()
    elif isinstance(a, (np.str_, np.bytes_)):
        assert a == b
    elif isinstance(a, np.generic):
        assert a.dtype.str == b.dtype.str and a.tobytes() == b.tobytes()
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b)
    elif isinstance(a, complex):
        exact((a.real, a.imag), (b.real, b.imag))
    elif isinstance(a, dict):
        exact(list(a), list(b))
        exact(list(a.values()), list(b.values()))
    elif isinstance(a, (set, frozenset)):
        assert sorted(map(spelled, a)) == sorted(map(spelled, b))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            exact(x, y)
    elif isinstance(a, SPACES):
        exact_space(a, b)
    else:
        assert a == b, (a, b)


def spelled(value: Any) -> str:
    inner = ", ".join(sorted(map(spelled, value))) if isinstance(value, (tuple, frozenset)) else ascii(value)
    return f"{type(value)} {inner}"


def exact_space(a: Any, b: Any) -> None:
    assert a == b and b == a and a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, spaces.Box):
        for name in ("low", "high", "bounded_below", "bounded_above"):
            exact(np.asarray(getattr(a, name)), np.asarray(getattr(b, name)))
    elif isinstance(a, spaces.Discrete):
        exact((a.n, a.start), (b.n, b.start))
    elif isinstance(a, spaces.MultiDiscrete):
        exact((a.nvec, a.start), (b.nvec, b.start))
    elif isinstance(a, spaces.MultiBinary):
        exact(a.n, b.n)
    elif isinstance(a, spaces.Text):
        exact((a.min_length, a.max_length, a.character_list), (b.min_length, b.max_length, b.character_list))
    elif isinstance(a, spaces.Dict):
        assert getattr(a, "sort_keys", None) == getattr(b, "sort_keys", None)
        exact(a.spaces, b.spaces)
    elif isinstance(a, (spaces.Tuple, spaces.OneOf)):
        exact(a.spaces, b.spaces)
    elif isinstance(a, spaces.Sequence):
        exact((a.feature_space, a.stack), (b.feature_space, b.stack))
    else:
        exact((a.node_space, a.edge_space), (b.node_space, b.edge_space))


def travels(value: Any) -> None:
    data = codec.pack(value)
    exact(codec.unpack(data), value)
    exact(codec.unpack(memoryview(bytearray(data))), value)
    assert codec.pack(value, "repr") == data, "nothing of it is replaced"


@pytest.fixture
def little_free(monkeypatch):
    """What any message may take is not what is tested here."""
    monkeypatch.setattr(wire, "FREE", 1 << 16)


# ---- what survives

texts = st.text(st.characters(), max_size=6)  # lone surrogates too
numbers = st.one_of(
    st.booleans(),
    st.integers(-300, 300),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 255, 256, -1]),
    st.floats(),
    st.complex_numbers(),
)
KINDS = [np.dtype(char).type for char in np.typecodes["All"] if np.dtype(char).kind in "biufc"]
types = st.sampled_from([int, float, bool, *KINDS, np.str_, np.bytes_, np.datetime64, np.timedelta64])
units = st.sampled_from(["[Y]", "[D]", "[s]", "[25us]", "[ns]", "[as]"])
dtypes = st.one_of(
    st.sampled_from(KINDS).map(np.dtype),
    st.sampled_from(KINDS).map(np.dtype).map(np.dtype.newbyteorder),
    npst.byte_string_dtypes(max_len=4),
    npst.unicode_string_dtypes(max_len=4),
    st.builds("{}{}8{}".format, st.sampled_from("<>"), st.sampled_from("Mm"), units).map(np.dtype),
)
shapes = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Any bits, any memory order."""
    dtype, shape = draw(dtypes), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    elif dtype.kind == "U":
        code = f"{dtype.str[0]}u4"
        raw = (np.frombuffer(raw, code) % 0x110000).astype(code).tobytes() if raw else raw
    array = np.ndarray(shape, dtype, raw).copy()
    order = draw(st.sampled_from(["C", "F", "reversed", "transposed"]))
    if order == "reversed":
        return array[::-1] if array.ndim else array
    return array.T if order == "transposed" else np.asarray(array, order=order)


scalars = st.one_of(
    arrays().filter(lambda array: array.size and array.dtype.kind not in "SU").map(lambda array: array.reshape(-1)[0]),
    texts.map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
)
atoms = st.one_of(
    st.none(), numbers, texts, st.binary(max_size=5), types, st.sampled_from([*Colour, *Level, *Rights]), scalars
)

keys = st.recursive(
    atoms,
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3), st.builds(Pair, inner, inner)),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def fill(shape: tuple[int, ...], values: list[Any]) -> Any:
        array = np.empty(math.prod(shape), object)
        array[:] = values[: array.size]
        return array.reshape(shape)

    shape = npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=2)
    return st.builds(fill, shape, st.lists(inner, min_size=4, max_size=4))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.tuples(inner, inner), max_size=6),
        st.tuples(inner),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(keys, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(infos.Column, st.lists(st.integers(0, 99), max_size=4), inner, st.just("object"), types),
        st.just(Empty()),
        objects(inner),
    )


values = st.recursive(st.one_of(atoms, arrays()), containers, max_leaves=12)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(max_examples=400)
@given(values)
def test_plain_values_survive_exactly(value):
    travels(value)


@given(arrays())
def test_arrays_survive_and_own_their_memory(array):
    travels(array)
    back = codec.unpack(codec.pack(array))
    assert back.flags.owndata and back.flags.writeable and back.flags.c_contiguous


many = st.one_of(
    st.lists(st.integers(-(2**64), 2**64)),
    st.lists(st.integers()),
    st.lists(st.floats()),
    st.lists(texts),
    st.lists(st.tuples(st.integers(), st.floats(), texts)),
    st.lists(st.tuples(st.tuples(st.integers(0, 9), st.none()))),
    st.lists(st.lists(st.integers(0, 1), max_size=2).map(tuple)),
)


@given(many)
def test_lists_of_one_kind_survive_exactly(value):
    travels(value)


def test_a_large_array_survives_whatever_its_layout():
    image = np.random.default_rng(0).integers(0, 255, (210, 160, 3), np.uint8)
    frames = {
        "c": image,
        "f": np.asfortranarray(image),
        "cut": image[::2, ::3],
        "t": image.reshape(210, -1).view("M8[s]").T,
    }
    data = codec.pack(frames)
    exact(codec.unpack(data), frames)
    exact(codec.unpack(memoryview(data)), frames)


@pytest.mark.parametrize(
    "values", [[[1, 2], [3, 4]], [np.zeros(2)], [np.zeros(2)] * 2, [np.array(5)], [()], [[]]], ids=repr
)
def test_an_object_array_keeps_what_looks_like_more_of_it(values):
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    travels(array)
    travels(array[:1].reshape(()))


@pytest.mark.filterwarnings("ignore:The 'generic' unit")  # numpy 2.5
def test_times_without_a_unit_survive():
    travels([np.datetime64("NaT"), np.timedelta64(5), np.array(["NaT"], "M8"), np.array([1, 2], ">m8")])


def test_a_bytearray_becomes_bytes():
    exact(codec.unpack(codec.pack([bytearray(b"ab")])), [b"ab"])


def test_unpacked_values_do_not_depend_on_the_buffer():
    data = bytearray(codec.pack({"a": np.arange(3), "b": "text", "c": b"raw", "d": np.float32(1)}))
    value = codec.unpack(memoryview(data))
    data[:] = bytes(len(data))
    exact(value, {"a": np.arange(3), "b": "text", "c": b"raw", "d": np.float32(1)})


# ---- spaces

ints = st.sampled_from([np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.dtype(">i4")]).map(np.dtype)


@st.composite
def boxes(draw: st.DrawFn) -> Any:
    dtype = draw(st.one_of(ints, st.sampled_from([np.float16, np.float32, np.float64, np.bool_]).map(np.dtype)))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=2))
    if dtype.kind in "if" and draw(st.booleans()):
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    bounds = {"allow_nan": False} if dtype.kind == "f" else {}
    one, other = (draw(npst.arrays(dtype, shape, elements=npst.from_dtype(dtype, **bounds))) for _ in range(2))
    return spaces.Box(np.asarray(np.minimum(one, other)), np.asarray(np.maximum(one, other)), shape, dtype)


leaves = st.one_of(
    boxes(),
    st.builds(
        lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
        st.integers(1, 99),
        st.integers(0, 20),
        ints,
    ),
    st.builds(
        lambda n, dtype: spaces.MultiDiscrete(n + np.uint8(1), dtype, start=n),
        npst.arrays(np.uint8, shapes, elements=st.integers(0, 50)),
        ints,
    ),
    st.one_of(st.integers(1, 9), st.lists(st.integers(1, 3), max_size=3)).map(spaces.MultiBinary),
    st.builds(
        lambda low, more, charset: spaces.Text(low + more, min_length=low, charset=charset),
        st.integers(0, 5),
        st.integers(0, 2**60),
        st.one_of(st.text(max_size=5), st.frozensets(st.characters(), max_size=5)),
    ),
)
space_keys = st.one_of(texts, st.integers(0, 5), st.tuples(texts))
any_space = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda items, sort: spaces.Dict(items, sort_keys=sort),
            st.dictionaries(space_keys, inner, max_size=3),
            st.booleans(),
        ),
        st.dictionaries(space_keys, inner, max_size=3).map(lambda items: spaces.Dict(list(items.items()))),
        st.lists(inner, max_size=3).map(spaces.Tuple),
        st.lists(inner, min_size=1, max_size=3).map(spaces.OneOf),
        st.builds(lambda space, stack: spaces.Sequence(space, stack=stack), inner, st.booleans()),
        st.builds(spaces.Graph, inner, st.one_of(st.none(), inner)),
    ),
    max_leaves=5,
)


@settings(max_examples=200)
@given(any_space)
def test_spaces_survive(space):
    exact(codec.unpack(codec.pack(space)), space)


@pytest.mark.parametrize("bound", [np.inf, np.array(np.inf), np.array([np.inf, 5.0, np.inf])], ids=repr)
def test_an_integer_box_remembers_that_it_is_unbounded(bound):
    space = spaces.Box(-bound, bound, np.shape(bound), np.int32)
    back = codec.unpack(codec.pack(space))
    exact(back, space)
    space.seed(1), back.seed(1)
    exact(back.sample(), space.sample())
    assert not back.is_bounded("below") and not back.is_bounded("above")


def test_a_space_samples_after_its_travel():
    space = spaces.Dict(b=spaces.Box(-1, 1, (2,)), a=spaces.Sequence(spaces.Discrete(3), stack=True))
    back = codec.unpack(codec.pack(space))
    space.seed(1), back.seed(1)
    assert space.contains(back.sample()) and back.contains(space.sample())
    exact(back["b"].sample(), space["b"].sample())


def test_packing_leaves_a_space_and_its_generator_alone():
    space = spaces.Dict(a=spaces.Discrete(99), b=spaces.Sequence(spaces.Dict(c=spaces.Discrete(99)), stack=True))
    twin = spaces.Dict(a=spaces.Discrete(99), b=spaces.Sequence(spaces.Dict(c=spaces.Discrete(99)), stack=True))
    space.seed(3), twin.seed(3)
    codec.pack(space)
    for _ in range(5):
        assert str(space.sample()) == str(twin.sample())


class Halves(spaces.Box):
    pass


class Odd(spaces.Space):
    pass


def test_space_classes_that_are_not_gymnasiums_are_refused_by_name():
    built = messages.Built(1, spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), Halves(0, 1)])), None, {}, None, [], [])
    with pytest.raises(
        NotPlainError, match=r"^\.observation_space\['a'\]\[1\] is a test_plain\.Halves and cannot travel"
    ):
        codec.pack(built)
    with pytest.raises(NotPlainError, match=r"^\.left\.feature_space\.edge_space is a test_plain\.Odd "):
        codec.pack(Pair(spaces.Sequence(spaces.Graph(spaces.Discrete(2), Odd()))))
    assert codec.unpack(codec.pack([spaces.Tuple([Odd()])], "repr"))[0].startswith("Tuple(<test_plain.Odd")


def test_a_space_that_gymnasium_would_not_make_is_refused_where_it_is_packed():
    box = spaces.Box(0.0, 1.0, (2,))
    box.low[0] = np.nan
    with pytest.raises(NotPlainError, match=r"^\['box'\] is a gymnasium\.spaces\.box\.Box that cannot be made again "):
        codec.pack({"box": box})
    wide = spaces.Discrete(3, dtype=np.int8)
    wide.n = 1000
    with pytest.raises(NotPlainError, match="parts are odd"):
        codec.pack(wide)
    assert codec.unpack(codec.pack(wide, "repr")) == "Discrete(1000, dtype=int8)"


def test_stacked_spaces_that_double_with_every_level_are_refused(little_free):
    space: Any = spaces.Discrete(2)
    for _ in range(8):
        space = spaces.Sequence(space, stack=True)
    with pytest.raises(NotPlainError, match="too much memory"):
        codec.pack(space)


# ---- the messages of the driver


def sample_messages() -> list[Any]:
    rng = np.random.default_rng(0)
    fault = messages.Fault(3, "step", "ValueError: no", "Traceback ...", None, 2, 17)
    columns = infos.pack(
        (
            row,
            {
                "x": 0.5 * row,
                "n": np.int32(row),
                "pos": rng.random(3),
                "who": "a\0b",
                "deep": {"big": 2**70},
                "odd": [row],
            },
        )
        for row in range(3)
    )
    finals = messages.Finals(np.arange(2), np.arange(2), [rng.random((2, 4)), np.array([b"a", b"bc"])])
    fragment = messages.FragmentResult(
        128,
        7,
        finals,
        [(t, t % 2, 1.5, 100, {"l": t, "o": np.float32(t)}) for t in range(9)],
        {"lives": [(t, 0, 3) for t in range(9)], "mixed": [(0, 0, None), (1, 1, [1.0])]},
        (rng.random((2, 8), np.float32), None),
        ("it failed", "Traceback"),
        messages.DriftSamples(np.arange(3), np.zeros(3, np.int64), rng.random((3, 2), np.float32)),
        0.25,
        1.75,
    )
    space = spaces.Dict(
        z=spaces.Box(-np.inf, np.inf, (2,), np.int64), a=spaces.Tuple([spaces.Text(4), spaces.MultiBinary(3)])
    )
    return [
        messages.Reply(1, list(range(32)), None, None, [], None, True),
        messages.Reply(2, [0, 1], columns, [(0, [rng.random(2), "obs"])], [fault], {"result": (1, 2)}, False),
        messages.Reply(3, [], result=fragment),
        messages.Reply(
            4, [], result=[messages.PlayedEpisode(n, 1.5, n, [np.full((2, 2, 3), n, np.uint8)]) for n in range(5)]
        ),
        messages.Reply(5, [4], result=messages.Acted([4], rng.random((1, 2)), rng.random(1), 3)),
        messages.Built(6, space, spaces.Discrete(4, start=-1), {"render_fps": 7}, None, [(1, space, space)], [fault]),
    ]


@pytest.mark.parametrize("message", sample_messages(), ids=lambda message: type(message).__name__)
def test_the_messages_of_the_pool_survive(message):
    travels(message)


def test_columns_join_the_same_after_their_travel():
    part = infos.pack([(0, {"a": True, "b": {"c": np.float32(1)}}), (1, {"a": False, "d": "x"})])
    exact(infos.batch([codec.unpack(codec.pack(part))], 2), infos.batch([part], 2))


# ---- what is refused


class Sim:
    def __repr__(self) -> str:
        return "Sim()"


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError


def objects_with(value: Any) -> Any:
    array = np.full((2, 2), None)
    array[1, 0] = value
    return array


cyclic: list[Any] = []
cyclic.append({"again": cyclic})
deep: list[Any] = []
for _ in range(100):
    deep = [deep]

REFUSED = [
    (Sim(), "the value is a test_plain.Sim and"),
    ({"debug": {"sim": Sim()}}, "['debug']['sim'] is a test_plain.Sim and"),
    (
        messages.Reply(1, [], {"debug": infos.Column([0], [1, 2, 3, Sim()], "object")}),
        ".infos['debug'].values[3] is a ",
    ),
    ([(0, 1), (0, 1), (0, {"a": Sim()}), (1, 1)], "[2][1]['a'] is a test_plain.Sim"),
    ([((1, Sim()),)] * 5, "[0][0][1] is a test_plain.Sim"),
    ({(1, Sim()): 2}, ".keys()[1] is a test_plain.Sim"),
    ({Sim(): 2}, ".keys() is a test_plain.Sim"),
    ([{1, Sim()}], "[0]{...} is a test_plain.Sim"),
    (objects_with(Sim()), "[1, 0] is a test_plain.Sim"),
    (objects_with(Sim())[1:, 0].reshape(()), "[()] is a test_plain.Sim"),
    ([Sim], "[0] is the class test_plain.Sim"),
    ([enum.Enum], "[0] is the class enum.Enum"),
    ([np.generic], "[0] is the class numpy.generic"),
    ([print], "[0] is a builtin_function_or_method"),
    ([range(3)], "[0] is a range"),
    ([object()], "[0] is a object"),
    ([collections.OrderedDict()], "[0] is a collections.OrderedDict"),
    ([datetime.date(2020, 1, 1)], "[0] is a datetime.date"),
    ([memoryview(b"")], "[0] is a memoryview"),
    ([messages.Close(1)], "[0] is a clusterenv.wire.requests.Close"),
    ([Rights.READ | Rights.WRITE], "[0] is a combination of flags of test_plain.Rights"),
    ([np.zeros(2, "i4,f4")], "[0] is an array of dtype [('f0', '<i4'), ('f1', '<f4')]"),
    ([np.zeros(2, "V3")], "[0] is an array of dtype |V3"),
    ([np.void(b"abc")], "[0] is a numpy.void"),
    ([np.ma.masked_array([1.0], [True])], "[0] is a numpy.ma"),
    ([np.ndarray(3, "S0", b"")], "[0] is an array of dtype |S0"),
    ([np.dtype("f4")], "[0] is a numpy.dtype"),
    (cyclic, "[0]['again'][0]['again']"),
    ([deep], "[0][0][0]"),
]


def test_what_is_not_plain_is_refused_with_its_place():
    for value, message in REFUSED:
        with pytest.raises(NotPlainError) as caught:
            codec.pack(value)
        text = str(caught.value)
        assert text.startswith(message) and len(text) < 600
        assert text.endswith(" cannot travel: return plain data: numbers, strings, arrays, None, lists, dicts")
        assert isinstance(caught.value, ce.ClusterEnvError) and isinstance(caught.value, TypeError)


def test_a_hundred_containers_are_not_too_many_whatever_they_are():
    travels(deep[0])
    space: Any = spaces.Discrete(2)
    nested: list[Any] = [1, 2.0, "a", None, (1,), np.zeros(1, object)]
    for _ in range(98):
        space, nested = spaces.Tuple([space]), [nested]
    for value in (space, nested, [(nested,)] * 5):
        try:
            data = codec.pack(value)
        except NotPlainError:
            continue
        exact(codec.unpack(data), value)
    with pytest.raises(NotPlainError, match=r"more than 100 deep, or one that contains itself, and cannot travel"):
        codec.pack([deep])


def test_what_is_not_plain_can_be_replaced_by_its_repr():
    for value, _ in REFUSED:
        codec.unpack(codec.pack(value, "repr"))


def test_the_repr_stands_in_the_place_of_what_is_not_plain():
    value = {
        "a": [1, Sim(), (Rude(), 2)],
        "b": objects_with(Sim),
        "c": {1: "x" * 2000, "d": type("Long", (), {"__repr__": lambda s: "y" * 2000})()},
    }
    back = codec.unpack(codec.pack(value, "repr"))
    assert back["a"] == [1, "Sim()", ("<Rude>", 2)]
    assert back["b"][1, 0] == "<class 'test_plain.Sim'>" and back["b"][0, 0] is None
    assert back["c"] == {1: "x" * 2000, "d": "y" * 1000}
    assert codec.unpack(codec.pack([(0, Sim())] * 5, "repr")) == [(0, "Sim()")] * 5


def test_keys_replaced_by_their_repr_stay_apart():
    value = {Sim(): 0, "Sim()": 1, Sim(): 2, (Sim(), 1): 3, Rude(): 4}
    back = codec.unpack(codec.pack(value, "repr"))
    assert back == {"Sim() #2": 0, "Sim()": 1, "Sim() #3": 2, "(Sim(), 1)": 3, "<Rude>": 4}
    assert codec.unpack(codec.pack({Sim(), Sim(), 1}, "repr")) == {"Sim()", "Sim() #2", 1}


def test_cycles_end_in_a_repr():
    assert codec.unpack(codec.pack(cyclic, "repr")) == [{"again": "[{'again': [...]}]"}]
    twice: list[Any] = [1]
    twice += [twice, twice]
    assert codec.unpack(codec.pack(twice, "repr")) == [1, "[1, [...], [...]]", "[1, [...], [...]]"]
    shared = [1]
    travels([shared, shared, {"a": shared}])
    back = codec.unpack(codec.pack([deep], "repr"))
    for _ in range(100):
        (back,) = back
    assert back == "[[]]"


def test_a_codec_knows_each_name_once():
    class Pair(NamedTuple):
        x: int

    with pytest.raises(ValueError, match="two classes are called Pair"):
        PlainCodec([Pair, globals()["Pair"]])
    with pytest.raises(TypeError, match=r"builtins?.*tuple|tuple is no NamedTuple"):
        PlainCodec([tuple])


# ---- any bytes


def rejected(data: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        codec.unpack(data)
    assert type(caught.value) is ProtocolError and isinstance(caught.value, ce.ClusterEnvError)
    assert caught.value.__context__ is None, "what was read so far is let go"
    return str(caught.value)


def tolerant(data: bytes) -> None:
    """Anything may be made of it, or a ProtocolError."""
    with contextlib.suppress(ProtocolError):
        codec.unpack(data)


def peak(data: bytes) -> int:
    tracemalloc.start()
    try:
        tolerant(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def message(node: Any, *buffers: bytes) -> bytes:
    tree = msgspec.msgpack.encode(node)
    return wire.VERSION + struct.pack("<I", len(tree)) + tree + b"".join(buffers)


def parts(value: Any) -> tuple[Any, bytes]:
    """The node of a value, and its buffers."""
    data = codec.pack(value)
    end = 5 + struct.unpack_from("<I", data, 1)[0]
    return msgspec.msgpack.decode(data[5:end]), data[end:]


def space_of(name: str, *values: Any) -> bytes:
    found = [parts(value) for value in values]
    return message([wire.SPACE, name, *(node for node, _ in found)], *(buffers for _, buffers in found))


def box_of(low: Any, high: Any, flags: Any = None) -> bytes:
    flags = np.ones(low.shape, bool) if flags is None else flags
    return space_of("Box", low, high, flags, flags)


def array_of(dtype: Any, *shape: Any, data: bytes = bytes(16)) -> bytes:
    return message([wire.ARRAY, dtype, *shape], data)


def tree_of(tree: bytes) -> bytes:
    return wire.VERSION + struct.pack("<I", len(tree)) + tree


CRAFTED = {
    "nothing": b"",
    "only a version": wire.VERSION,
    "no tree": message(None)[:5],
    "another version": b"\x01" + message(None)[1:],
    "a pickle": b"\x80\x05N.",
    "a tree of more than is there": wire.VERSION + struct.pack("<I", 2**32 - 1) + b"\xc0",
    "a tree of two values": tree_of(b"\xc0\xc0"),
    "no such tag": message([99]),
    "no tag": message([]),
    "a tag that is no number": message(["x"]),
    "a tag that is a list": message([[0]]),
    "something after the value": message(None, b"N"),
    "a list that is too long": tree_of(b"\xdd\xff\xff\xff\xff\x00"),
    "a map": message({1: 2}),
    "a map in a list": message([wire.LIST, {1: 2}]),
    "bytes in the tree": message([wire.LIST, b"a"]),
    "a time in the tree": message([wire.LIST, datetime.datetime.now(datetime.UTC)]),
    "an extension in the tree": message([wire.LIST, msgspec.msgpack.Ext(5, b"abc")]),
    "a text that is no text": tree_of(b"\xa2\xff\xfe"),
    "ints that are too many": message([wire.INTS, 2**29], bytes(8)),
    "ints that are fewer than none": message([wire.INTS, -1], bytes(8)),
    "ints of a number that is a text": message([wire.INTS, "1q1"], bytes(24)),
    "floats of no number": message([wire.FLOATS], bytes(8)),
    "rows that differ": message([wire.ROWS, [wire.LIST, 1, 2], [wire.LIST, 1]]),
    "rows that are no lists": message([wire.ROWS, [wire.TUPLE, 1, 2]]),
    "rows that are texts": message([wire.ROWS, "abc", "abc"]),
    "rows without columns": message([wire.ROWS]),
    "a long text that is too long": message([wire.STR, 2**63], b"abc"),
    "a long text that is no text": message([wire.STR, 2], b"\xff\xfe"),
    "bytes that are too long": message([wire.BYTES, 2**40], b"abc"),
    "bytes of no size": message([wire.BYTES, None], b"abc"),
    "bytes of half a size": message([wire.BYTES, 1.5], b"abc"),
    "an int that is too long": message([wire.INT, 2**63], b"abc"),
    "a complex number of texts": message([wire.COMPLEX, "1", "2"]),
    "a dict of no lists": message([wire.DICT, 1, 2]),
    "a dict that lacks a value": message([wire.DICT, [1, 2], [3]]),
    "a dict of texts": message([wire.DICT, "ab", "ab"]),
    "an unhashable key": message([wire.DICT, [[wire.LIST]], [None]]),
    "an array as a key": message([wire.DICT, [parts(np.zeros(2))[0]], [None]], bytes(16)),
    "an unhashable element": message([wire.SET, [wire.DICT, [], []]]),
    "a key twice": message([wire.DICT, [5, 5], [None, None]]),
    "equal keys": message([wire.DICT, [1, True], [None, None]]),
    "an element twice": message([wire.FROZENSET, None, None]),
    "an unknown struct": message([wire.STRUCT, "Popen", None]),
    "a struct of other fields": message([wire.STRUCT, "Pair", 1, 2, 3]),
    "a struct of no name": message([wire.STRUCT]),
    "an unknown enum": message([wire.ENUM, "Shade", "RED"]),
    "an unknown member": message([wire.ENUM, "Colour", "mro"]),
    "an unknown type": message([wire.TYPE, "object"]),
    "a type that is no text": message([wire.TYPE, []]),
    "an array too large": array_of("<float64", 2**40),
    "an array whose size overflows": array_of("<float64", 2**32, 2**32),
    "a negative shape": array_of("<float64", -1),
    "two negative dimensions": array_of("<float64", -1, -1),
    "a huge dimension beside none": array_of("<float64", 0, 2**63),
    "a shape of texts": array_of("<float64", "a" * 1000, 2**40),
    "a shape of lists": array_of("<float64", [wire.LIST, 1], 2**40),
    "255 dimensions": array_of("|int8", *[1] * 255, data=b"\0"),
    "a dtype that is no text": array_of([1], 1),
    "objects as an array": array_of("|O", 1),
    "a structured array": array_of("i4,O", 1),
    "a void array": array_of("|V8", 1),
    "a dtype that evaluates": array_of("[('a','O')]", 1),
    "a dtype with a unit that is none": array_of("<M8[weeks]", 1),
    "a dtype with a newline": array_of("<U1\n", 1),
    "a dtype that is too wide": array_of("<U99999999", 0),
    "a wide dtype": array_of("<U9999999", 1),
    "a dtype of no width": array_of("|S0", 2**62),
    "another long double": array_of("<longdouble.7", 1),
    "characters that do not exist": array_of("<U1", 1, data=b"\xff\xff\xff\x7f"),
    "half an array": array_of("<float64", 2, data=bytes(15)),
    "a scalar of objects": message([wire.SCALAR, "|O"], bytes(8)),
    "a scalar of no dtype": message([wire.SCALAR], bytes(8)),
    "an object array that is too large": message([wire.OBJECTS, [2**32, 2**31], None]),
    "an object array beside a huge dimension": message([wire.OBJECTS, [0, 2**63]]),
    "an object array of a shape of texts": message([wire.OBJECTS, ["a" * 1000, 2**40], None]),
    "an object array without a shape": message([wire.OBJECTS, 1, None]),
    "an unknown space": space_of("Space"),
    "a space without parts": space_of("Box"),
    "a Text without parts": space_of("Text"),
    "a Sequence without parts": space_of("Sequence"),
    "a Tuple of what are no spaces": space_of("Tuple", None),
    "a OneOf of nothing": space_of("OneOf"),
    "a Graph of nothing": space_of("Graph", None, None),
    "a Dict that lacks a space": space_of("Dict", True, ("a",)),
    "a Dict of unhashable keys": space_of("Dict", True, ([],), spaces.Discrete(2)),
    "a Discrete of none": space_of("Discrete", np.array([0, 0])),
    "a Discrete of floats": space_of("Discrete", np.array([1.0, 0.0])),
    "other starts": space_of("MultiDiscrete", np.ones(2, int), np.ones(3, int)),
    "a MultiBinary of none": space_of("MultiBinary", 0),
    "a MultiBinary too large": space_of("MultiBinary", 2**63),
    "a Box upside down": box_of(np.ones(2), np.zeros(2)),
    "a Box of nan": box_of(np.full(2, np.nan), np.ones(2)),
    "a Box of complex numbers": box_of(np.ones(2, "c8"), np.ones(2, "c8")),
    "a Box of two dtypes": box_of(np.zeros(2), np.ones(2, int)),
    "a Box with flags of another shape": box_of(np.ones(2), np.ones(2), np.ones(3, bool)),
    "a Box with flags that are no arrays": box_of(np.ones(2), np.ones(2), True),
    "a Box with other flags": box_of(np.ones(2), np.ones(2), np.ones(2)),
    "a Text upside down": space_of("Text", 5, 2, "ab"),
    "a stack that makes a huge Box": space_of("Sequence", spaces.MultiBinary([2**20, 2**20]), True),
    "a graph that makes a huge Box": space_of("Graph", spaces.MultiBinary(2**40), None),
}


def test_crafted_bytes_are_refused_before_they_cost_anything():
    for name, data in CRAFTED.items():
        text = rejected(data)
        assert "cannot be read: " in text and len(text) < 500, name
        assert peak(data) < 1 << 20, name


def test_errors_do_not_spell_out_what_they_are_about(little_free):
    high, low = np.ones(50_000), np.full(50_000, 2.0)
    with np.printoptions(threshold=sys.maxsize):
        for bad in (
            space_of("Tuple", bytes(200_000)),
            space_of("Dict", True, ("a",), bytes(200_000)),
            space_of("Sequence", "a" * 200_000, True),
            space_of("Graph", "a" * 200_000, None),
            box_of(low, high),
            box_of(low * np.nan, low),
            space_of("MultiBinary", tuple(range(-1, 20_000))),
            space_of("Text", 1 << 10**6, 1, "a"),
            message([wire.STR, 200_000], b"\xff" * 200_000),
            message([wire.STRUCT, "a" * 200_000]),
            array_of("a" * 200_000, 1),
        ):
            assert len(rejected(bad)) < 500
            assert peak(bad) < (100 << 10) + 6 * len(bad)


def test_damaged_bools_are_bools():
    back = codec.unpack(array_of("|bool_", 3, data=b"\0\1\7"))
    assert back.tolist() == [False, True, True] and back.view(np.uint8).tolist() == [0, 1, 1]


def nested(*head: Any) -> bytes:
    """Such a node in the last place of another, and so on, 100,000 times."""
    return tree_of(msgspec.msgpack.encode([*head, None])[:-1] * 100_000)


NESTED = {
    "lists": nested(wire.LIST),
    "tuples": nested(wire.TUPLE),
    "dicts": nested(wire.DICT, []),
    "sets": nested(wire.SET),
    "frozensets": nested(wire.FROZENSET),
    "rows": nested(wire.ROWS),
    "structs": nested(wire.STRUCT, "Pair", 1),
    "object arrays": nested(wire.OBJECTS, [1]),
    "tuple spaces": nested(wire.SPACE, "Tuple"),
    "graph spaces": nested(wire.SPACE, "Graph", None),
    "untagged lists": nested(),
}


def test_no_nesting_is_too_deep_for_the_reader():
    for name, data in NESTED.items():
        assert "ValidationError" in rejected(data) or "too much memory" in rejected(data), name
        assert peak(data) < (1 << 20) + len(data), name


def test_stacks_of_stacks_do_not_double():
    leaf, buffers = parts(spaces.Discrete(2))
    stack, graph = leaf, leaf
    for _ in range(40):
        stack = [wire.SPACE, "Sequence", stack, True]
        graph = [wire.SPACE, "Graph", graph, None]
    assert "too much memory" in rejected(message(stack, buffers))
    assert "too much memory" in rejected(message(graph, buffers))


TEXT = "a" * 996 + "\U0001f600"
FLOODS: dict[str, tuple[Any, bytes]] = {
    "None": (None, b""),
    "small ints": (7, b""),
    "ints of two bytes": (12345, b""),
    "ints": (12345678, b""),
    "long ints": (2**60, b""),
    "big ints": ([wire.INT, 2], b"\xff\x7f"),
    "floats": (1.5, b""),
    "complex numbers": ([wire.COMPLEX, 1.5, 2.5], b""),
    "short texts": ("ab", b""),
    "wide texts": (TEXT, b""),
    "wide texts beside the tree": ([wire.STR, len(TEXT.encode())], TEXT.encode()),
    "bytes": ([wire.BYTES, 2], b"ab"),
    "empty lists": ([wire.LIST], b""),
    "lists": ([wire.LIST, None], b""),
    "lists of ints": ([wire.INTS, 3], struct.pack("<QQq", 300, 2**40, -(2**62))),
    "lists of floats": ([wire.FLOATS, 3], bytes(range(24))),
    "rows": ([wire.ROWS, [wire.LIST, None, None]], b""),
    "many rows": ([wire.ROWS, [wire.LIST, *[None] * 50], [wire.LIST, *[None] * 50]], b""),
    "tuples": ([wire.TUPLE, None], b""),
    "long tuples": ([wire.TUPLE, *[None] * 2000], b""),
    "empty dicts": ([wire.DICT, [], []], b""),
    "dicts": ([wire.DICT, [None], [None]], b""),
    "larger dicts": ([wire.DICT, list(range(12)), [None] * 12], b""),
    "empty sets": ([wire.SET], b""),
    "small sets": ([wire.SET, 1, 2], b""),
    "sets": ([wire.SET, *range(6)], b""),
    "frozensets": ([wire.FROZENSET, *range(6)], b""),
    "structs": ([wire.STRUCT, "Empty"], b""),
    "arrays": parts(np.int8(0).reshape(())),
    "empty arrays": parts(np.zeros(0, "M8[3fs]")),
    "scalars": parts(np.int8(0)),
    "times": parts(np.datetime64(0, "s")),
    "numpy texts": parts(np.str_("ab")),
    "numpy bytes": parts(np.bytes_(b"ab")),
    "object arrays": ([wire.OBJECTS, [], None], b""),
    "large object arrays": ([wire.OBJECTS, [2000], *[None] * 2000], b""),
    "boxes": parts(spaces.Box(0, 1, (), np.uint8)),
    "discrete spaces": parts(spaces.Discrete(3)),
    "multi-discrete spaces": parts(spaces.MultiDiscrete([3])),
    "multi-binary spaces": parts(spaces.MultiBinary(3)),
    "text spaces": parts(spaces.Text(3, charset="a")),
    "wide text spaces": parts(spaces.Text(3, charset="".join(map(chr, range(200))))),
    "tuple spaces": parts(spaces.Tuple([])),
    "dict spaces": parts(spaces.Dict(a=spaces.MultiBinary(1))),
    "stacked spaces": parts(spaces.Sequence(spaces.MultiBinary(1), stack=True)),
    "stacked large spaces": parts(spaces.Sequence(spaces.MultiBinary(1000), stack=True)),
    "stacked text spaces": parts(spaces.Sequence(spaces.Text(3, charset="a"), stack=True)),
    "stacked stacks": parts(spaces.Sequence(spaces.Sequence(spaces.MultiBinary(1), stack=True), stack=True)),
    "graph spaces": parts(spaces.Graph(spaces.MultiBinary(1), spaces.Discrete(3))),
}


def flood(node: Any, buffers: bytes, count: int, *others: Any) -> bytes:
    return message([wire.LIST, *[node] * count, *others], buffers * count)


def test_many_small_values_take_memory_in_proportion(little_free):
    for name, (node, buffers) in FLOODS.items():
        tolerant(flood(node, buffers, 1))  # what is cached once is no part of it
        count = 60_000 // (len(message(node, buffers)) - 5)
        data = flood(node, buffers, count)
        assert peak(data) < (100 << 10) + 8 * len(data), name
        numbers = [wire.INTS, 5000]  # and the rest is what is not counted
        data = flood(node, buffers, count // 3, numbers) + struct.pack("<5000q", *range(10**6, 10**6 + 5000))
        assert peak(data) < (100 << 10) + 8 * len(data), name


def test_many_small_values_survive_all_the_same(little_free):
    for value in ({}, (), set(), [None], np.float32(1), spaces.MultiBinary(2)):
        many = [value] * 3000
        data = codec.pack(many)
        exact(codec.unpack(data), many)
        padding = len(data) - len(data.rstrip(b"\0"))
        assert padding > 100
        assert "too much memory" in rejected(data[: -padding // 2])


def test_a_message_of_many_small_values_is_padded():
    data = codec.pack([{} for _ in range(60_000)])
    assert len(codec.unpack(data)) == 60_000
    padding = len(data) - len(data.rstrip(b"\0"))
    assert 100_000 < padding < 2_000_000
    assert "too much memory" in rejected(data[: -padding // 2])
    assert "data follows" in rejected(data + b"N")


def large_values() -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        rng.random(30_000),
        rng.random(300_000) < 0.5,
        np.array(["ab", "c"] * 5000),
        list(range(10**6, 10**6 + 20_000)),
        [float(i) for i in range(20_000)],
        [str(i) for i in range(10_000)],
        [(i, i + 1, float(i)) for i in range(5000)],
        dict.fromkeys(range(5000)),
        np.full(20_000, None),
        set(range(5000)),
        1 << 10**6,
        "a" * 10**5 + "\U0001f600",
        spaces.Box(0, 255, (100, 1000), np.uint8),
        spaces.Box(-1, 1, (100, 500), np.float64),
        spaces.Sequence(spaces.Box(0, 255, (20, 1000), np.uint8), stack=True),
        spaces.Text(3, charset="".join(map(chr, range(1000, 3000)))),
        spaces.MultiDiscrete(np.full(20_000, 3)),
    ]


def test_large_payloads_take_memory_in_proportion(little_free):
    for value in large_values():
        data = codec.pack(value)
        exact(codec.unpack(data), value)
        assert peak(data) < (100 << 10) + 8 * len(data), type(value)


CORPUS = [codec.pack(message) for message in sample_messages()] + [
    codec.pack(value)
    for value in (
        {"a": [1, 2.5, "x", None, True, 2**80, 1j], (1, "k"): {1, "z"}, b"b": frozenset([1.5]), Colour.RED: np.float32},
        [np.arange(6).reshape(2, 3), np.array(["ab", "c"]), np.array([b"q"]), np.array([True]), np.datetime64(3, "s")],
        objects_with([Pair(1, np.str_("s")), np.bytes_(b"s"), Level.HIGH]),
        spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
        spaces.Sequence(spaces.MultiDiscrete([2, 3]), stack=True),
        spaces.OneOf([spaces.Text(3), spaces.Dict(b=spaces.MultiBinary([2, 2]), a=spaces.Box(-1, np.inf, (), int))]),
        ["ab", "cd", "ef"],
        [(1, "a", None), (2, "b", 1.5), (3, "c", [1]), (4, "d", {})],
    )
]
SPLICES = [*CRAFTED.values(), *(data[:200] for data in NESTED.values()), *(message(*item) for item in FLOODS.values())]


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(CORPUS))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randrange(1, 10)]
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 10))
            case 5:
                data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1, len(data))))
            case 6:
                data[at : at + rng.randrange(10)] = rng.choice(SPLICES)[5:40]
    return bytes(data)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data):
    tolerant(data)
    tolerant(tree_of(data))
    tolerant(message(None) + data)


@pytest.mark.filterwarnings("ignore")  # of numpy and Gymnasium, on values that make no sense
def test_mutated_messages_raise_nothing_else():
    rng = random.Random(0)
    for _ in range(12_000):
        tolerant(mutated(rng))


@pytest.mark.filterwarnings("ignore")
def test_mutated_messages_take_memory_in_proportion():
    rng = random.Random(1)
    for data in CORPUS:
        tolerant(data)
    for _ in range(800):
        data = mutated(rng)
        assert peak(data) < (16 << 20) + 8 * len(data)


def test_a_message_cut_anywhere_is_refused():
    for data in CORPUS:
        for end in range(0, len(data), 1 + len(data) // 300):
            rejected(data[:end])


def test_nothing_is_unpickled_imported_or_run():
    script = """
import sys, random
import test_plain as t
for data in t.CORPUS:  # lazy imports of numpy and Gymnasium
    t.codec.unpack(data)
seen = set()
watching = True
def hook(event, args):
    if watching and not event.startswith(("object.", "builtins.id", "gc.")):
        seen.add(event)
sys.addaudithook(hook)
import pickle
for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"):
    setattr(pickle, name, None)
seen.clear()
rng = random.Random(2)
for data in [*t.CORPUS, *t.CRAFTED.values(), pickle.dumps(print), *(t.mutated(rng) for _ in range(500))]:
    t.tolerant(data)
watching = False
print(sorted(seen))
"""
    tests = Path(__file__).parent
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=tests, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n", ran.stdout + ran.stderr


def test_the_protocol_has_no_use_for_pickle():
    package = Path(wire.__file__).parent
    for path in set(package.glob("*.py")) - {package / "channel.py"}:  # that one is of a socket pair, not of a network
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.id] if isinstance(node, ast.Name) else []
            assert not {"pickle", "cloudpickle", "eval", "exec", "marshal", "load", "loads"} & set(names), path
