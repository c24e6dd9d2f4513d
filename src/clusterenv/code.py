"""The user's code on its way to machines that may not have their files: by value where it is not installed.

What `cloudpickle` finds in an importable module it sends by name. A module beside the training script can be imported
here, but not there; such modules are sent whole.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

__all__ = ["dumps", "is_own", "missing_package"]

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def dumps(value: Any, by_value: bool) -> bytes:
    """Pickled; with `by_value` the user's own modules travel along."""
    with _own_by_value() if by_value else contextlib.nullcontext():
        return bytes(cloudpickle.dumps(value))


@contextlib.contextmanager
def _own_by_value() -> Iterator[None]:
    registered: list[ModuleType] = []
    for module in list(sys.modules.values()):
        if is_own(module) and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            with contextlib.suppress(Exception):  # what it cannot register it would not pickle by value either
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def missing_package(text: str, where: str) -> str:
    """What to do about a traceback from elsewhere that ends for want of a package; else nothing."""
    found = _MISSING.search(text)
    if found is None:
        return ""
    package = found[1].split(".")[0]
    return f"package {package!r} is missing on {where}: install it there, as it is installed here"


def is_own(module: ModuleType | None) -> bool:
    """Whether a module is a file of the user's project: beside the script, or in the folder where it was started."""
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str) or module.__name__.split(".")[0] in ("clusterenv", "__main__"):
        return False
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(Path(sys.prefix).resolve()):
        return False
    return any(path.is_relative_to(folder) for folder in _project())


def _project() -> list[Path]:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path.cwd(), *([Path(script).resolve().parent] if isinstance(script, str) else [])]
    return [folder for folder in folders if folder != Path(folder.anchor)]
