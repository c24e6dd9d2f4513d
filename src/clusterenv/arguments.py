"""Check the types of the arguments that a user passes, with the same error text for all. Pure.

`expect` checks one argument against an annotation (`int`, `float | None`, `Literal["a", "b"]`, `Sequence[str]`, a
class); `check_fields` checks every field of a config dataclass. Both raise a `SpecError` that names the argument, what
was given, what was expected and, where it can be guessed, what to write instead.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
import os
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, is_dataclass
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import numpy as np

from clusterenv.errors import SpecError

_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    type(None): "None",
}
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def expect(call: str, name: str, value: Any, kind: Any, *, least: float | None = None, hint: str = "") -> None:
    """Raise SpecError unless `value` is of this kind and, where it is a number, at least `least`."""
    if not fits(value, kind):
        raise refused(call, name, value, describe(kind), hint or _guess(name, value, kind))
    if least is not None and value is not None and not value >= least:
        raise refused(call, name, value, f"{least} or more")


def check_fields(config: Any) -> None:
    """Raise SpecError for the first field of a dataclass whose value does not match its annotation."""
    for field, kind in field_kinds(type(config)).items():
        expect(type(config).__name__, field, getattr(config, field), kind)


def field_kinds(config: type) -> dict[str, Any]:
    """Return the evaluated annotation of each field and `InitVar`, unless only a type checker can evaluate it."""
    kinds: dict[str, Any] = {}
    for field in config.__dataclass_fields__.values():  # type: ignore[attr-defined]  # `fields()` leaves InitVars out
        owner = next(base for base in config.__mro__ if field.name in inspect.get_annotations(base))
        kind: Any = field.type
        if isinstance(kind, str):  # typing.get_type_hints would fail for all fields if it fails for one
            try:
                kind = eval(kind, vars(sys.modules[owner.__module__]))
            except Exception:  # a user's subclass may be annotated with anything
                continue
        if get_origin(kind) is not ClassVar:
            kinds[field.name] = kind.type if isinstance(kind, InitVar) else kind
    return kinds


def refused(call: str, name: str, value: Any, wanted: str, hint: str = "") -> SpecError:
    """Return the error for a refused argument; the caller raises it."""
    return SpecError(f"{call}({name}={shown(value)}): expected {wanted}{f'; {hint}' if hint else ''}")


def closest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` of which `word` is probably a misspelling, or None."""
    by_lower = {known.lower(): known for known in words}
    found = difflib.get_close_matches(word.lower(), by_lower, 1, cutoff=0.75)
    return by_lower[found[0]] if found else None


def fits(value: Any, kind: Any) -> bool:
    """Return whether `value` is of this kind. numpy's numbers count as numbers, True and False do not."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if kind is type(None) or kind is None:
        return value is None
    if kind is bool:
        return isinstance(value, (bool, np.bool_))
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if origin in (tuple, list, Sequence):
        return _is_row(value) and _items_fit(value, origin, inner)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            fits(key, inner[0]) and fits(item, inner[1]) for key, item in value.items()
        )
    if origin is Callable or kind is Callable:
        return callable(value)
    # Passing a class instead of its instance is the most common mistake, and it has the same attributes.
    return not isinstance(value, type) and isinstance(value, origin or kind)


def _is_row(value: Any) -> bool:
    """Return whether this is a list, a tuple or an array, but not a string."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def _items_fit(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is tuple and Ellipsis not in inner:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(item, inner[0]) for item in value)


def describe(kind: Any) -> str:
    """Return a description of this kind for error messages."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(describe(one) for one in inner))
        return f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is Literal:
        return " or ".join(f'"{one}"' if isinstance(one, str) else repr(one) for one in inner)
    if kind is None or kind in _PLAIN:
        return _PLAIN[type(None) if kind is None else kind]
    if origin in (tuple, list, Sequence):
        many = f"{describe(inner[0]).removeprefix('a ')}s" if inner[0] in _PLAIN else "values"
        return f"{len(inner)} {many}" if origin is tuple and Ellipsis not in inner else f"a list of {many}"
    if origin is Mapping:
        return "a dict"
    if origin is Callable or kind is Callable:
        return "a function"
    if origin is os.PathLike:
        return "a path"
    return f"a {kind.__name__}"


def shown(value: Any) -> str:
    """Return a short repr."""
    return f"<class {value.__name__}>" if isinstance(value, type) else _short.repr(value)


def _guess(name: str, value: Any, kind: Any) -> str:
    """Return a hint at what the user probably meant, or ""."""
    for one in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        origin = get_origin(one)
        if isinstance(value, type) and isinstance(one, type) and issubclass(value, one):
            return f"this is the class, write {name}={value.__name__}()"
        if isinstance(value, str) and one in (int, float):
            number = _number(value)
            if fits(number, one):
                return f"write {name}={number}, without quotes"
        if one is int and isinstance(value, float) and value.is_integer():
            return f"write {name}={int(value)}"
        if one is str and isinstance(value, os.PathLike):
            return f"write {name}=str(...)"
        if isinstance(value, str) and origin in (tuple, list, Sequence) and get_args(one)[0] is str:
            return f"write {name}=[{value!r}]"
        if isinstance(value, str) and origin is Literal:
            near = closest(value, [word for word in get_args(one) if isinstance(word, str)])
            return f'did you mean "{near}"?' if near else ""
        if isinstance(value, Mapping) and isinstance(one, type) and is_dataclass(one):
            inside = ", ".join(f"{key}={_short.repr(item)}" for key, item in value.items())
            return f"write {name}={one.__name__}({inside})"
    return ""


def _number(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return None
