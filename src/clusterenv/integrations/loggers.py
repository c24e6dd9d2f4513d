"""Write the summary of a collector to the logger of an experiment, in one line: `clusterenv.log_to(collector, writer)`.

A writer is recognised by what it can do: TensorBoard's `SummaryWriter` (`add_scalar`), MLflow (`log_metrics`), W&B and
what has its interface (`log` with a `step`). None of these is imported here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from clusterenv.arguments import expect, refused
from clusterenv.collector import Collector

__all__ = ["log_to"]


def log_to(collector: Collector, writer: Any, step: int | None = None) -> dict[str, float]:
    """Write `collector.summary()` to a logger, without what is not known yet (NaN). Return what was written.

    Args:
        writer: a `SummaryWriter` of TensorBoard, a run of W&B or the module `wandb`, or the module `mlflow`.
        step: the position on the horizontal axis; None: the number of environment steps that the collector has
            collected.
    """
    expect("log_to", "collector", collector, Collector)
    expect("log_to", "step", step, int | None, least=0)
    write = _find_call(writer)
    numbers = {name: value for name, value in collector.summary().items() if not math.isnan(value)}
    write(numbers, int(numbers["collect/steps"] if step is None else step))
    return numbers


def _find_call(writer: Any) -> Callable[[dict[str, float], int], None]:
    """Return a function that writes named numbers at a step; raise SpecError if the writer is not recognised."""
    wanted = "TensorBoard's SummaryWriter, a run of W&B or the module wandb, or the module mlflow"
    if isinstance(writer, type):
        raise refused("log_to", "writer", writer, wanted, f"this is the class, write {writer.__name__}(...)")
    if callable(getattr(writer, "add_scalar", None)):

        def add_scalars(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        return add_scalars
    for name in ("log_metrics", "log"):
        call = getattr(writer, name, None)
        if callable(call) and _takes_step(call):
            return lambda numbers, step: call(numbers, step=step)
    raise refused("log_to", "writer", writer, wanted, "for another logger, pass collector.summary() to it yourself")


def _takes_step(call: Callable[..., Any]) -> bool:
    """Return whether this function has a parameter `step`, unlike `logging.Logger.log` and `math.log`."""
    try:
        return "step" in inspect.signature(call).parameters
    except (TypeError, ValueError):  # a builtin function without a signature
        return False
