"""Split Gymnasium's spaces into plain parts, and build them again. Pure.

Only the classes below are supported, not their subclasses: a space that comes back as another class accepts other
values. The state of a space's random generator is not sent. A space of any other class is described (`portable`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

__all__ = ["KINDS", "DescribedSpace", "SpaceForm", "cost", "describe", "is_known", "portable"]

Parts = list[tuple[str, Any]]
"""The parts of a space, each with its name in the path of an error."""

# Upper bounds in bytes: a space, one with its random generator, a part, and a character of a charset.
_SPACE, _BATCHED, _PART, _CHARACTER = 800, 4000, 100, 300


class SpaceForm(NamedTuple):
    parts: Callable[[Any], Parts]
    build: Callable[..., Space[Any]]


def cost(kind: type[Space[Any]], values: list[Any]) -> int:
    """Return an upper bound of the bytes that building a space takes beside its parts, which may be anything."""
    size = _SPACE + _PART * len(values)
    size += sum(_box(value.size, value.itemsize) for value in values if isinstance(value, np.ndarray))
    if kind is spaces.Text:
        size += _CHARACTER * len(values[-1])
    elif kind is spaces.Graph or (kind is spaces.Sequence and values[-1]):
        size += sum(_batched(value) for value in values if isinstance(value, Space))
    return size


def _box(size: int, itemsize: int) -> int:
    return size * (itemsize + 3)


def _batched(space: Space[Any]) -> int:
    """Return an upper bound of the bytes of `batch_space(space)`, made for a stacked sequence or a graph."""
    size = _BATCHED + sum(_PART + _batched(inner) for inner in _within(space))
    if isinstance(space, spaces.Text):
        return size + _BATCHED + _CHARACTER * len(space.character_list)
    if isinstance(space, (spaces.Sequence, spaces.Graph)):
        return 2 * size  # copied whole where they are stacked, so each level doubles
    if space.shape is not None and space.dtype is not None:
        return size + 3 * _box(math.prod(space.shape), space.dtype.itemsize)
    return size


# Parts are checked before Gymnasium gets them: its errors print the offending values, however large.


def _check(good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"these are not the parts of a {what} space")


def _box_parts(space: spaces.Box) -> Parts:
    # If an integer Box was given infinity, only the flags show it. Without dimensions, they are not arrays.
    names = ("low", "high", "bounded_below", "bounded_above")
    return [(f".{name}", np.asarray(getattr(space, name))) for name in names]


def _build_box(low: Any, high: Any, below: Any, above: Any) -> spaces.Box:
    parts = (low, high, below, above)
    _check(all(isinstance(part, np.ndarray) and part.shape == low.shape for part in parts), "Box")
    _check(low.dtype == high.dtype and low.dtype.kind in "biuf" and below.dtype == above.dtype == np.bool_, "Box")
    _check(bool(np.all(low <= high)), "Box")  # also refuses NaN
    space = spaces.Box(low, high, low.shape, low.dtype)
    space.bounded_below, space.bounded_above = below, above
    return space


def _build_discrete(numbers: Any) -> spaces.Discrete:
    _check(isinstance(numbers, np.ndarray) and numbers.shape == (2,) and numbers.dtype.kind in "iu", "Discrete")
    n, start, dtype = int(numbers[0]), int(numbers[1]), numbers.dtype
    # Older Gymnasium has only int64, and no dtype argument.
    return spaces.Discrete(n, start=start) if dtype == np.int64 else spaces.Discrete(n, start=start, dtype=dtype)


def _build_multi_discrete(nvec: Any, start: Any) -> spaces.MultiDiscrete:
    arrays = isinstance(nvec, np.ndarray) and isinstance(start, np.ndarray)
    _check(arrays and nvec.dtype.kind in "iu" and start.dtype == nvec.dtype, "MultiDiscrete")
    return spaces.MultiDiscrete(nvec, dtype=nvec.dtype, start=start)


def _build_multi_binary(n: Any) -> spaces.MultiBinary:
    sizes = n if type(n) is tuple else (n,)
    _check(all(type(size) is int and 0 < size < 2**63 for size in sizes), "MultiBinary")
    return spaces.MultiBinary(n)


def _build_text(min_length: Any, max_length: Any, characters: Any) -> spaces.Text:
    _check(type(min_length) is int and type(max_length) is int and type(characters) is str, "Text")
    _check(0 <= min_length <= max_length < 2**63, "Text")
    return spaces.Text(max_length, min_length=min_length, charset=characters)


def _dict_parts(space: spaces.Dict) -> Parts:
    head = [(".sort_keys", getattr(space, "sort_keys", True)), (".keys()", tuple(space.spaces))]
    return head + [(f"[{key!r:.50}]", inner) for key, inner in space.spaces.items()]


def _build_dict(sort_keys: Any, keys: Any, *inner: Any) -> spaces.Dict:
    _check(type(sort_keys) is bool and type(keys) is tuple and len(set(keys)) == len(inner), "Dict")
    _check(all(isinstance(space, Space) for space in inner), "Dict")
    space = spaces.Dict(OrderedDict(zip(keys, inner, strict=True)))  # any other mapping is sorted
    if hasattr(space, "sort_keys"):  # older Gymnasium has none
        space.sort_keys = sort_keys
    return space


def _inner_parts(space: spaces.Tuple[Any] | spaces.OneOf[Any]) -> Parts:
    return [(f"[{i}]", inner) for i, inner in enumerate(space.spaces)]


def _build_from_inner(kind: Any, *inner: Any) -> Space[Any]:
    _check(all(isinstance(space, Space) for space in inner), kind.__name__)
    space: Space[Any] = kind(inner)
    return space


def _build_sequence(feature: Any, stack: Any) -> spaces.Sequence:
    _check(isinstance(feature, Space) and type(stack) is bool, "Sequence")
    return spaces.Sequence(feature, stack=stack)


def _build_graph(nodes: Any, edges: Any) -> spaces.Graph:
    _check(isinstance(nodes, Space) and (edges is None or isinstance(edges, Space)), "Graph")
    return spaces.Graph(nodes, edges)


KINDS: dict[type[Space[Any]], SpaceForm] = {
    spaces.Box: SpaceForm(_box_parts, _build_box),
    spaces.Discrete: SpaceForm(lambda s: [(".n", np.array([s.n, s.start], s.dtype))], _build_discrete),
    spaces.MultiDiscrete: SpaceForm(lambda s: [(".nvec", s.nvec), (".start", s.start)], _build_multi_discrete),
    spaces.MultiBinary: SpaceForm(lambda s: [(".n", s.n)], _build_multi_binary),
    spaces.Text: SpaceForm(
        lambda s: [(".min_length", s.min_length), (".max_length", s.max_length), ("", "".join(s.character_list))],
        _build_text,
    ),
    spaces.Dict: SpaceForm(_dict_parts, _build_dict),
    spaces.Tuple: SpaceForm(_inner_parts, partial(_build_from_inner, spaces.Tuple)),
    spaces.OneOf: SpaceForm(_inner_parts, partial(_build_from_inner, spaces.OneOf)),
    spaces.Sequence: SpaceForm(lambda s: [(".feature_space", s.feature_space), (".stack", s.stack)], _build_sequence),
    spaces.Graph: SpaceForm(lambda s: [(".node_space", s.node_space), (".edge_space", s.edge_space)], _build_graph),
}


class DescribedSpace(NamedTuple):
    """The description of a space whose class, or that of a space within it, is not one of the above."""

    text: str

    def __str__(self) -> str:
        return self.text


def is_known(space: Any) -> bool:
    """Return whether the space, and each within it, is of one of the classes above."""
    return type(space) in KINDS and all(map(is_known, _within(space)))


def portable(space: Any) -> Any:
    """Return the space if it can be sent, else its description."""
    return describe(space) if isinstance(space, Space) and not is_known(space) else space


def describe(space: Any) -> DescribedSpace:
    """Return a text that is the same for equal spaces in every process: class names, and their str if defined."""
    name = f"{type(space).__module__}.{type(space).__qualname__}"
    inner = _within(space)
    if inner and type(space) in KINDS:
        keys = list(getattr(space, "spaces", ())) if isinstance(space, spaces.Dict) else [""] * len(inner)
        parts = [f"{key}{': ' * bool(key)}{describe(part)}" for key, part in zip(keys, inner, strict=True)]
        return DescribedSpace(f"{type(space).__name__}({', '.join(parts)})")
    if type(space) in KINDS:
        return DescribedSpace(f"{space}")
    # The default text holds an address, which differs between processes.
    has_text = any(name in vars(kind) for kind in type(space).__mro__[:-1] for name in ("__repr__", "__str__"))
    return DescribedSpace(f"{name} {space}" if has_text else name)


def _within(space: Any) -> list[Any]:
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        return list(space.spaces)
    if isinstance(space, spaces.Sequence):
        return [space.feature_space]
    if isinstance(space, spaces.Graph):
        return [space.node_space] if space.edge_space is None else [space.node_space, space.edge_space]
    return []
