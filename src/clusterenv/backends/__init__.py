"""Backends: the places where environments run.

The classes are imported on first use, through `clusterenv`, which maps each name to its module.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterenv import Command, Kubernetes, Local, Loopback, Manual, Ray, Slurm

__all__ = ["Command", "Kubernetes", "Local", "Loopback", "Manual", "Ray", "Slurm"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import clusterenv

        return getattr(clusterenv, name)
