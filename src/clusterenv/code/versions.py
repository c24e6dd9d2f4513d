"""Compare the versions of packages on two machines. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping

import cloudpickle  # noqa: F401  both are imported anyway, and have no metadata if they come from PYTHONPATH
import numpy  # noqa: F401

FOR_PICKLES = ("cloudpickle", "numpy")
"""Packages whose versions must match wherever code is pickled."""

_PARTS = {"cloudpickle": 2, "numpy": 1, "onnxruntime": 2, "torch": 2}
"""How many parts of a version number must be equal. numpy reads arrays pickled by the same major version;
cloudpickle and torch do not promise compatibility between minor versions, and ONNX Runtime may round differently."""

_UNKNOWN = "of an unknown version"


def installed() -> dict[str, str]:
    """Return the versions of the packages to compare, without those that are not installed."""
    return {name: version for name in _PARTS if (version := _version(name)) is not None}


def _version(name: str) -> str | None:
    imported = getattr(sys.modules.get(name), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _UNKNOWN if importlib.util.find_spec(name) else None


def differences(
    theirs: Mapping[str, str], ours: Mapping[str, str], names: Iterable[str], is_pickled: bool = True
) -> list[str]:
    """Return a text for each of these packages whose versions do not match.

    Without pickled code, they only have to be installed.
    """
    wrong = []
    for name in sorted(names):
        there, here = theirs.get(name), ours.get(name, _UNKNOWN)
        if there is None:
            wrong.append(f"{name} is not installed there, {here} is here")
        elif is_pickled and _UNKNOWN not in (there, here) and _parts(name, there) != _parts(name, here):
            wrong.append(f"{name} {there} there, {here} here")
    return wrong


def _parts(name: str, version: str) -> list[str]:
    return version.partition("+")[0].split(".")[: _PARTS[name]]
