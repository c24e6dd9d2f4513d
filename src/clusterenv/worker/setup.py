"""The configuration of worker processes: chosen by a backend, sent to the fork server once, inherited by workers."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass, field
from typing import Literal

from gymnasium.vector import AutoresetMode

from clusterenv.spec import Blueprint, Delivered

__all__ = ["ForkServerSetup", "WorkerConfig"]


@dataclass(frozen=True)
class WorkerConfig:
    """How workers run their environments, on any machine."""

    mode: AutoresetMode | None
    check: bool
    """Whether to check what environments return against their spaces."""
    threads: int | None = 1
    """Threads that numerical libraries in a worker may use; None: not set."""
    preload: tuple[str, ...] = ()
    """Modules to import before workers are forked."""
    plain: Literal["refuse", "repr"] | None = None
    """Answer in plain data, for the network, and refuse other values or send their repr. None: pickle answers."""
    spin_s: float = 0.0
    """How long a worker spins for its next request before it sleeps."""
    compress: Literal["auto", "always", "never"] = "auto"
    """Whether to pack the observations of fragments, if answers are for the network."""
    codecs: tuple[str, ...] = ()
    """Compressors that this machine and the head have."""


@dataclass(frozen=True)
class ForkServerSetup:
    """What the fork server imports and passes to every worker."""

    modules: tuple[str, ...]
    payload: bytes
    num_envs: int
    is_named: bool
    delivered: Delivered | None
    config: WorkerConfig
    sys_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    imports_onnx: bool = field(default_factory=lambda: "torch" in sys.modules)
    """Whether to import ONNX Runtime before workers are forked, if it is installed: once, instead of in each worker. A
    head that uses torch will probably attach a torch module."""
    authkey: bytes = field(default_factory=lambda: bytes(multiprocessing.current_process().authkey))
    """Of `multiprocessing`: lets workers connect to managers of the process that starts them."""

    @staticmethod
    def of(blueprint: Blueprint, config: WorkerConfig) -> ForkServerSetup:
        """Return the setup for these environments."""
        entry = blueprint.spec.entry_point if blueprint.spec is not None else None
        modules = (*config.preload, *([entry.split(":")[0]] if isinstance(entry, str) else []))
        return ForkServerSetup(
            modules, blueprint.payload, blueprint.num_envs, blueprint.is_named, blueprint.delivered, config
        )
