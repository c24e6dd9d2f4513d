"""Begin to watch a run, as `ClusterEnv` does for each; imported by the head only."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from clusterenv.arguments import expect
from clusterenv.driver import Driver
from clusterenv.errors import SpecError
from clusterenv.monitor.monitor import Monitor, is_wanted

__all__ = ["check", "watch"]


def check(name: str | None, dashboard: bool) -> None:
    """Raise SpecError if a run cannot be watched as these arguments of `ClusterEnv` say."""
    expect("ClusterEnv", "name", name, str | None)
    expect("ClusterEnv", "dashboard", dashboard, bool)
    missing = [module for module in ("starlette", "uvicorn") if importlib.util.find_spec(module) is None]
    if dashboard and missing:
        raise SpecError(f"ClusterEnv(dashboard=True) needs {missing[0]}: pip install clusterenv[dashboard]")


def watch(
    driver: Driver, close: Callable[[], None], env: Any, backend: Any, name: str | None, dashboard: bool
) -> Callable[[], None]:
    """Start a monitor of this run. Return a function that closes both."""
    if not is_wanted() and not dashboard:
        return close
    described = getattr(env, "id", None) or getattr(env, "__qualname__", None) or type(env).__name__
    what = env if isinstance(env, str) else str(described)
    try:
        monitor = Monitor(driver, what, type(backend).__name__, name, dashboard)
    except BaseException:
        close()
        raise

    def close_both() -> None:
        try:
            monitor.end()
        finally:
            close()
        monitor.join()

    return close_both
