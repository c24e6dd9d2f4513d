"""Write docs/guarantees.md from test results: `python -m tools.guarantees [RESULTS ...] [--soak F] [--hostile F]`.

Results are the lines that test runs with CLUSTERENV_GUARANTEES=FILE have appended. They are merged into
docs/guarantees/results.json, where those of another test or place stay; then the tables of the page are made anew.
`--soak` and `--hostile` name the folders of reports of `make soak`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "guarantees.md"
PROMISES = DOCS / "guarantees" / "promises.toml"
RESULTS = DOCS / "guarantees" / "results.json"
SOAK = DOCS / "guarantees"
BEGIN, END = "<!-- made by `make guarantees`: begin -->", "<!-- end -->"

PLACES = ("local", "namespaces", "SLURM", "Grid Engine", "Kubernetes", "Ray")
FIGURES = {
    "detected_s": "detected, s: {}",
    "back_s": "back, s: {}",
    "gone_s": "nothing runs after, s: {}",
    "closed_s": "closed, s: {}",
    "first_s": "first fragment, s: {}",
    "lost_steps": "lost steps: {}",
    "throughput": "throughput, of the undisturbed: {}",
    "head_cpu": "head's CPU for 100 a second, of a core: {}",
    "memory_mib": "head memory, MiB more: {}",
    "minutes": "minutes: {}",
    "difference": "difference of scores: {}",
    "difference_low": "lower end of its 95 % interval: {}",
}


@dataclass
class Result:
    """What the last run of one test in one place gave, for cases with the same guarantees."""

    test: str
    place: str
    guarantees: list[int]
    passed: int = 0
    """Number of its cases."""
    failed: int = 0
    skipped: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)
    """Name → smallest and largest."""


def read_lines(lines: Iterable[str]) -> list[Result]:
    """Return one result per test, place and guarantees."""
    found: dict[Any, Result] = {}
    for line in lines:
        row = json.loads(line)
        new = Result(row["test"], row["place"], row["guarantees"])
        result = found.setdefault(_key(new), new)
        setattr(result, row["outcome"], getattr(result, row["outcome"]) + 1)
        for name, value in row["figures"].items():
            low, high = result.figures.get(name, [value, value])
            result.figures[name] = [min(low, value), max(high, value)]
    return list(found.values())


def read_soak(folder: Path) -> Result:
    """Return the result of `make soak`; its report and plot go to the page."""
    report = json.loads((folder / "report.json").read_text())
    (SOAK / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    shutil.copy(folder / "soak.png", SOAK / "soak.png")
    figures = {"minutes": [report["minutes"]] * 2}
    return _of_report("tools.soak", report, 29, figures)


def read_hostile(folder: Path) -> Result:
    """Return the result of `make soak SOAK="--hostile"`."""
    report = json.loads((folder / "hostile.json").read_text())
    figures = {"throughput": [report["share"]] * 2, "memory_mib": [report["head_mib"]] * 2}
    return _of_report("tools.soak --hostile", report, 22, figures)


def _of_report(name: str, report: dict[str, Any], number: int, figures: dict[str, list[float]]) -> Result:
    is_good = not report["problems"]
    place = "namespaces" if "namespace" in report["where"] else "local"
    return Result(name, place, [number], passed=int(is_good), failed=int(not is_good), figures=figures)


def merge(old: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Replace the results of tests that ran again in the same place; keep the others."""
    again = {(result.test, result.place) for result in new}
    return sorted([*new, *(result for result in old if (result.test, result.place) not in again)], key=_key)


def _key(result: Result) -> Any:
    return result.test, result.place, tuple(result.guarantees)


def read_results() -> list[Result]:
    return [Result(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def read_promises() -> dict[int, dict[str, Any]]:
    return {int(number): entry for number, entry in tomllib.loads(PROMISES.read_text()).items()}


def tables(promises: dict[int, dict[str, Any]], results: Sequence[Result]) -> str:
    """Return the generated part of the page."""
    of = defaultdict[int, list[Result]](list)
    for result in results:
        for number in result.guarantees:
            of[number].append(result)
    lines = ["| # | fault | what holds | " + " | ".join(PLACES) + " | measured |", "|---" * (4 + len(PLACES)) + "|"]
    for number, promise in promises.items():
        cells = [_cell([r for r in of[number] if r.place == place]) for place in PLACES]
        measured = _figures(of[number], promise.get("figures", ()))
        lines.append(" | ".join([f"| {number}", promise["fault"], promise["holds"], *cells, measured]) + " |")
    lines += ["", "| # | tests |", "|---|---|"]
    for number in promises:
        names = ", ".join(f"`{name}`" for name in sorted({_short(result.test) for result in of[number]}))
        lines.append(f"| {number} | {names or '*none*'} |")
    return "\n".join(lines)


def _short(test: str) -> str:
    """Return the name without its class: the contract of backends has one for each."""
    path, *_, name = test.split("::") if "::" in test else (test, "")
    return f"{path}::{name}" if name else path


def _cell(results: Sequence[Result]) -> str:
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    return "" if not passed + failed else f"{passed} of {passed + failed}" if failed else str(passed)


def _figures(results: Sequence[Result], names: Sequence[str]) -> str:
    """Return the range of each of these figures, over the tests of each place."""
    said = []
    for name in names:
        ranges = []
        for place in PLACES:
            found = [r.figures[name] for r in results if r.place == place and name in r.figures]
            if found:
                low, high = min(low for low, _ in found), max(high for _, high in found)
                ranges.append(f"{_number(low)} to {_number(high)}" if _number(low) != _number(high) else _number(high))
                ranges[-1] += f" ({place})"
        if ranges:
            said.append(FIGURES[name].format(", ".join(ranges)))
    return "; ".join(said)


def _number(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) and abs(value) < 10 else f"{value:.0f}"


def render(page: str, promises: dict[int, dict[str, Any]], results: Sequence[Result]) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(promises, results)}\n{soak_text()}{END}{after}"


def soak_text() -> str:
    """Return the summary of the last soak."""
    if not (SOAK / "soak.json").exists():
        return ""
    report = json.loads((SOAK / "soak.json").read_text())
    balance, rows, growth = (report[name] for name in ("balance", "rows", "growth"))
    faults = sum(report["faults"].values())
    text = [
        f"{report['minutes']:g} minutes on {report['where']}, seed {report['seed']}: {faults} faults of "
        f"{len(report['faults'])} kinds ({report['missed']} more found their process gone).",
        f"Transitions: {', '.join(f'{name} {number:,}' for name, number in balance.items())}.",
        f"Rows by {', '.join(f'`{name}` {number:,}' for name, number in rows.items())}.",
        "Longest call, s: " + ", ".join(f"`{name}` {s:.1f}" for name, s in report["longest_call_s"].items()) + ".",
        "Growth from the second eighth to the last: "
        + ", ".join(f"{name} {by:g}" for name, by in growth.items())
        + ".",
        f"Problems: {'; '.join(report['problems']) or 'none'}.",
    ]
    lines = "\n".join(f"- {line}" for line in text)
    return f"\n## The last soak\n\n{lines}\n\n![Memory, descriptors and threads during the soak](guarantees/soak.png)\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.guarantees", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--soak", type=Path, default=None)
    parser.add_argument("--hostile", type=Path, default=None)
    options = parser.parse_args()
    new = read_lines(line for path in options.files for line in path.read_text().splitlines())
    new += [read_soak(options.soak)] if options.soak else []
    new += [read_hostile(options.hostile)] if options.hostile else []
    results = merge(read_results(), new)
    RESULTS.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    PAGE.write_text(render(PAGE.read_text(), read_promises(), results))
    failed = [f"{result.test} ({result.place})" for result in results if result.failed]
    print(f"{len(results)} results, {len(failed)} with failures", *failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
