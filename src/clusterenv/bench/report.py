"""Print a run's results: as text, with tables of rich if it is installed, or as JSON."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator
from typing import IO

import msgspec
import numpy as np

from clusterenv.bench.data import Bare, Point, Report, middle
from clusterenv.bench.notes import duration

__all__ = ["as_json", "as_text", "print_report"]

_COLUMNS = ("workers", "num_envs", "per worker", "rollout steps/s", "of limit", "step steps/s", "of limit")
_WIDTH = 100


def as_json(report: Report) -> str:
    """Return everything as JSON; single step times only as quantiles."""
    data = msgspec.to_builtins(report)
    times = np.array(data["bare"].pop("step_s"))
    data["bare"]["step_s"] = {
        "mean": float(times.mean()),
        **{f"p{q}": float(np.quantile(times, q / 100)) for q in (5, 50, 95, 99)},
    }
    data["bare"]["slowdown"] = report.bare.slowdown
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def as_text(report: Report) -> str:
    """Return the report as plain text."""
    rows = [_COLUMNS, *table_rows(report)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*_before(report), *(f"  {line}" for line in table), *_after(report)]) + "\n"


def print_report(report: Report, file: IO[str]) -> None:
    """Print the report on a terminal with rich, if it is installed, and as plain text otherwise."""
    if not file.isatty() or importlib.util.find_spec("rich") is None:
        file.write(as_text(report))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file, highlight=False)
    table = Table(*_COLUMNS)
    for column in table.columns:
        column.justify = "right"
    chosen = {choice.point for choice in report.choices}
    for rates, row in zip(report.candidates, table_rows(report), strict=True):
        table.add_row(*row, style="bold" if rates.point in chosen else None)
    for part in ("\n".join(_before(report)), table, "\n".join(_after(report))):
        console.print(part, markup=False, soft_wrap=True) if isinstance(part, str) else console.print(part)


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """Return one row for each candidate; an asterisk marks the recommended rates."""
    chosen = {(choice.mode, choice.point) for choice in report.choices}
    limit = report.bare.all_rate
    rows = []
    for rates in report.candidates:
        point = rates.point
        cells = [str(point.workers), str(point.num_envs), str(point.envs)]
        for mode in ("rollout", "step"):
            rate = middle(rates.of(mode))
            mark = " *" if (mode, point) in chosen else "  "
            cells += [f"{rate:,.0f}{mark}", f"{rate / limit:.2f}"] if rate else ["-  ", "-"]
        rows.append(tuple(cells))
    return rows


def _before(report: Report) -> Iterator[str]:
    bare = report.bare
    yield f"{report.target}: {bare.cores} usable cores, measured for {report.seconds:.0f} s"
    yield ""
    yield "The environment alone, in a bare loop with random actions:"
    yield f"  {'step':10} {_step_times(bare)}"
    yield f"  {'reset':10} {_resets(bare)}"
    yield f"  {'one core':10} {bare.rate:,.0f} steps/s"
    if bare.processes > 1:
        times = bare.all_rate / bare.rate
        yield f"  {f'{bare.processes} at once':10} {bare.all_rate:,.0f} steps/s, {times:.2f} times one: the limit"
    yield ""
    rounds = max(len(rates.of(mode)) for rates in report.candidates for mode in ("rollout", "step"))
    yield (
        f"With a 64-64 policy, rollouts of {report.rollout_steps} steps (medians of {rounds} interleaved rounds; "
        "* recommended):"
    )


def _after(report: Report) -> Iterator[str]:
    shares = report.shares
    rollout, step = report.choices
    yield ""
    yield (
        f"Time of the workers in rollouts ({_described(rollout.point)}): environment {shares.environment:.0%}, policy "
        f"{shares.policy:.0%}, overhead of the head {shares.overhead:.0%}, waiting {shares.waiting:.0%}"
    )
    yield ""
    yield "Recommended:"
    yield from (f"  {line}" for line in report.code)
    yield f"  # rollout: {rollout.rate:,.0f} steps/s, {rollout.of_limit:.2f} of the limit"
    if step.point != rollout.point:
        yield f"  # if the head acts with step(): {_described(step.point)}, {step.rate:,.0f} steps/s"
    else:
        yield f"  # if the head acts with step(): {step.rate:,.0f} steps/s"
    if report.notes:
        yield ""
        for note in report.notes:
            yield from textwrap.wrap(note.text, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _described(point: Point) -> str:
    return f"{point.workers} worker{'s' * (point.workers > 1)}, num_envs={point.num_envs}"


def _step_times(bare: Bare) -> str:
    low, high = np.quantile(bare.step_s, [0.5, 0.99])
    return f"{duration(float(np.mean(bare.step_s)))} (median {duration(low)}, 99th percentile {duration(high)})"


def _resets(bare: Bare) -> str:
    if bare.episode_steps is None:
        return "no episode ended"
    text = f"{duration(bare.reset_s)}, once in {bare.episode_steps:.0f} steps"
    return f"{text}: {bare.reset_share:.0%} of the environment's time"
