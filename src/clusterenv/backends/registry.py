"""Find backends by name: those of this package, and those that other packages register as entry points.

A package registers its class in the group `clusterenv.backends`. `clusterenv script NAME`, the notes that `clusterenv
gc` reads, and hints in errors use that name.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from clusterenv.errors import SpecError

GROUP = "clusterenv.backends"

OWN = {
    "local": "clusterenv.backends.local:Local",
    "loopback": "clusterenv.backends.loopback:Loopback",
    "manual": "clusterenv.backends.manual:Manual",
    "slurm": "clusterenv.backends.slurm:Slurm",
    "kubernetes": "clusterenv.backends.kubernetes:Kubernetes",
    "ray": "clusterenv.backends.ray:Ray",
    "command": "clusterenv.backends.command:Command",
}
"""Not entry points: they must also be found in a source tree, and no other package may replace them."""


def names() -> list[str]:
    """Return the names of all installed backends."""
    from importlib.metadata import entry_points  # takes 10 ms, and only errors and the command line need it

    return list(dict.fromkeys([*OWN, *sorted(entry_points(group=GROUP).names)]))


def find(name: str) -> type[Any]:
    """Return the class of the backend with this name. Raises SpecError if there is none, or several."""
    from importlib.metadata import EntryPoint, entry_points

    if name in OWN:
        found = [EntryPoint(name, OWN[name], GROUP)]
    else:
        found = list(dict.fromkeys(entry_points(group=GROUP, name=name)))
    if not found:
        raise SpecError(
            f"there is no backend {name!r}, only {', '.join(names())}. If another package provides it, install that "
            f"package here: it must have an entry point {name!r} in the group {GROUP!r}"
        )
    if len(found) > 1:
        values = " and ".join(entry.value for entry in found)
        raise SpecError(f"several packages have a backend {name!r}: {values}. Uninstall all but one")
    try:
        backend = found[0].load()
    except Exception as error:  # importing another package may raise anything
        raise SpecError(f"the backend {name!r} ({found[0].value}) cannot be loaded: {error!r}") from error
    if not isinstance(backend, type):
        raise SpecError(f"the backend {name!r} ({found[0].value}) is no class")
    return backend


def required(backend: type[Any]) -> list[str]:
    """Return the arguments of a backend that have no default."""
    if not is_dataclass(backend):
        return []
    return [
        one.name for one in fields(backend) if one.init and one.default is MISSING and one.default_factory is MISSING
    ]


def written(backend: type[Any]) -> str:
    """Return the call that creates a backend of this class, as a user writes it: `Slurm(nodes=...)`."""
    return f"{backend.__name__}({', '.join(f'{name}=...' for name in required(backend))})"
