"""Replace the `time` module by virtual time in every module of the head and the workers that uses it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Clock", "virtual_time"]

_MODULES = (
    "driver",
    "collection",
    "collector",
    "executors.building",
    "executors.remote",
    "cluster.head",
    "system.interrupts",
    "worker.envs",
    "worker.act_and_step",
    "worker.pace",
)


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """Make every module of the package use this clock within the block."""
    modules: list[Any] = [importlib.import_module(f"clusterenv.{name}") for name in _MODULES]
    before = [module.time for module in modules]
    for module in modules:
        module.time = clock
    try:
        yield
    finally:
        for module, real in zip(modules, before, strict=True):
            module.time = real
