"""Copy Gymnasium's registry to processes that make environments by id.

A worker has imported Gymnasium, but lacks what the script, or a package that the script imported, has registered. The
head sends that with the environments' code (`pack`), and the worker registers it (`install`).
"""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, registry

from clusterenv.code.missing import why
from clusterenv.errors import SpecError

_ATOMS = (str, int, float, bool, bytes, type(None))


class Registered(NamedTuple):
    plain: bytes
    """A pickled list of the specs made of plain data, compressed: Gymnasium's own specs make it large."""
    others: dict[str, bytes | str]
    """Id → its spec, pickled separately because that may fail; a str says why it could not be pickled."""


def pack(dumps: Callable[[Any], bytes]) -> Registered:
    """Pack everything that is registered in this process."""
    plain, others = [], dict[str, bytes | str]()
    for name, spec in list(registry.items()):
        if _is_plain(spec):
            plain.append(spec)
        else:
            try:
                others[name] = dumps(spec)
            except Exception as error:  # pickling runs user code (__reduce__), which may raise anything
                others[name] = why(error)
    return Registered(zlib.compress(dumps(plain)), others)


def install(registered: Registered) -> None:
    """Register these specs here. Making an environment from a spec that could not be sent raises an error."""
    changed = False
    for spec in pickle.loads(zlib.decompress(registered.plain)):
        if registry.get(spec.id) != spec:
            registry[spec.id] = spec
            changed = True
    for name, data in registered.others.items():
        registry[name] = _load(name, data)
        changed = True
    if changed:
        # A package that is imported here registers its ids again, and Gymnasium would warn about each.
        warnings.filterwarnings("ignore", message=".*Overriding environment .* already in registry")


def _load(name: str, data: bytes | str) -> EnvSpec:
    if isinstance(data, str):
        return _missing(name, f"cannot be sent to a worker: {data}")
    try:
        spec: EnvSpec = pickle.loads(data)
    except Exception as error:  # unpickling runs user code
        return _missing(name, f"could not be loaded in a worker: {type(error).__name__}: {error}")
    return spec


def _missing(name: str, reason: str) -> EnvSpec:
    """Return a spec that raises SpecError when an environment is made from it."""

    def entry_point(**kwargs: Any) -> gym.Env[Any, Any]:
        raise SpecError(
            f"{name!r} is registered in the script, but its entry point or arguments {reason}. "
            "Register it with an entry point 'module:Class', or make it without gymnasium.make"
        )

    return EnvSpec(name, entry_point=entry_point)


def _is_plain(value: Any) -> bool:
    if isinstance(value, EnvSpec):
        own = (value.kwargs, value.entry_point, value.vector_entry_point)
        return all(map(_is_plain, own)) and not value.additional_wrappers
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    # Gymnasium itself registers a few functions, which every worker can import.
    return type(value) in _ATOMS or getattr(value, "__module__", "") == "gymnasium.envs"
