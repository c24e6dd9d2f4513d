"""Pickle the user's code for other processes and machines, with the source files that they may lack.

`cloudpickle` pickles objects of importable modules by name, and objects of the script itself by value. `packages.py`
decides whether a machine can import the module.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Collection
from typing import Any

import cloudpickle

from clusterenv.code import packages as sources

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def dumps(value: Any) -> bytes:
    return bytes(cloudpickle.dumps(value))


def dumps_with_words(value: Any) -> tuple[bytes, set[str]]:
    """Pickle `value`, and collect every string in it: names of modules, of functions' imports, of entry points."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.words


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.words: set[str] = set()

    def persistent_id(self, obj: Any) -> None:
        """Collect strings: pickle calls this for every object, and None means to pickle it as usual."""
        if type(obj) is str:
            self.words.add(obj)


def carry(value: Any, known: Collection[str]) -> bytes:
    """Pickle for any machine, with the files of the user's own packages, except those `known` from an earlier check."""
    data, words = dumps_with_words(value)
    packages = [package for package in sources.collect(words, known) if not package.unsendable]
    if not packages:
        return data
    wanted = [package.wanted for package in packages]
    return pickle.dumps(_Carried(wanted, {package.wanted.name: sources.pack([package]) for package in packages}, data))


class _Carried:
    """Unpickle as `data`, after installing the modules that the process lacks."""

    def __init__(self, wanted: list[sources.Wanted], archives: dict[str, bytes], data: bytes) -> None:
        self._parts = wanted, archives, data

    def __reduce__(self) -> Any:
        return _unpack, self._parts


def _unpack(wanted: list[sources.Wanted], archives: dict[str, bytes], data: bytes) -> Any:
    # Modules that this process has already imported are not replaced.
    comparison = sources.compare([package for package in wanted if package.name not in sys.modules])
    for name in comparison.lacking:
        sources.install({}, archives[name])
    if comparison.folders:
        sources.install(comparison.folders, b"")
    return pickle.loads(data)


def why(error: BaseException) -> str:
    """Return the reason why something could not be pickled."""
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return "it refers to objects that are nested too deeply for pickle"
    return f"{error}" or repr(error)


def missing_package(text: str, where: str) -> str:
    """Return advice for a remote traceback of a missing module; "" for any other traceback."""
    found = _MISSING.search(text)
    if found is None:
        return ""
    module, package = found[1], sources.top_level(found[1])
    if module != package:
        return f"{package!r} on {where} has no module {module!r}: install the same version there as here"
    own = sources.find_own(package)
    if own is None:
        here = ", as it is installed here" if sources.is_importable(package) else ". It cannot be imported here, either"
        return f"package {package!r} is missing on {where}: install it there{here}"
    advice = f"module {package!r} is missing on {where}; here it is in {own.wanted.folder}"
    if own.unsendable:
        return f"{advice}. It was not sent because {own.unsendable}: put that folder on the nodes' PYTHONPATH"
    return (
        f"{advice}. It was not sent because no code that was sent imports it by name (or because of "
        "allow_pickle=False): import it at the top of the script, or put that folder on the nodes' PYTHONPATH"
    )
