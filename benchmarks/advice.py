"""Judge what `clusterenv bench` recommends: `python -m benchmarks.advice [--seconds S] [--sweep S] [--json FILE]`.

For environments of different cost: run the command, then measure a sweep over workers and environments per worker, with
the recommended points in it, in interleaved rounds. The figure is the median over the rounds of the rate of the
recommended point divided by that of the best point of the sweep, which is the one with the largest median: by chance it
is a little better than it really is, so a perfect recommendation scores a little below 1. "Taken by others" is the
share of the time in which a bare loop waited for a core that others used: past a tenth, the figures mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from clusterenv.bench.command import run
from clusterenv.bench.data import Mode, Point, Rates, Report
from clusterenv.bench.measure import Setting, Subjects
from clusterenv.bench.target import find_target

TARGETS = ("CartPole-v1", "LunarLander-v3", "benchmarks.synthetic:Burn")
ENVS = (1, 4, 16, 64)
GOAL = 0.9
WINDOW_S = 0.2
LARGEST_STEP_S = 0.1
"""Of the sweep's points: environments of one worker that take longer for one step are left out."""


def swept(report: Report, beyond: bool) -> list[Point]:
    """Return the points of the sweep, up to one worker per core; `beyond`: two."""
    cores = report.bare.cores
    workers = {1, max(1, cores // 2), cores, *([2 * cores] if beyond else [])}
    envs = [number for number in ENVS if number == 1 or number * report.bare.row_s <= LARGEST_STEP_S]
    points = {Point(count, number) for count in workers for number in envs}
    return sorted(points | {choice.point for choice in report.choices})


def verdict(mode: Mode, recommended: Point, rates: tuple[Rates, ...]) -> dict[str, Any]:
    """Compare the recommended point with the best of the sweep."""
    found = {r.point: r.of(mode) for r in rates}
    best = max(found, key=lambda point: median(found[point]))
    ratios = [ours / theirs for ours, theirs in zip(found[recommended], found[best], strict=True)]
    return {
        "mode": mode,
        "recommended": [recommended.workers, recommended.num_envs],
        "best": [best.workers, best.num_envs],
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "rounds": len(ratios),
        "rates": {f"{point.workers}x{point.envs}": median(values) for point, values in found.items()},
    }


def judge(name: str, seconds: float, sweep_s: float, beyond: bool) -> list[dict[str, Any]]:
    target = find_target(name)
    report = run(target, seconds, None, lambda text: None)
    points = swept(report, beyond)
    setting = Setting(target, report.rollout_steps, WINDOW_S)
    with Subjects(setting) as subjects:
        for point in points:
            subjects[point]  # all are open before the clock starts
        rates = subjects.measure({"rollout": points, "step": points}, time.monotonic() + sweep_s, least=3)
    taken = report.bare.taken_share
    return [{"env": name, "taken": taken, **verdict(choice.mode, choice.point, rates)} for choice in report.choices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run of the command")
    parser.add_argument("--sweep", type=float, default=40.0, help="seconds of each sweep, about")
    beyond = "also with two workers per core: on a busy machine these take time from its other processes"
    parser.add_argument("--beyond", action="store_true", help=beyond)
    parser.add_argument("--only", nargs="+", default=TARGETS, metavar="TARGET", help="environments to judge")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results = []
    print("| environment | mode | recommended | best of the sweep | ratio | min-max | taken by others | goal |")
    print("|---|---|---|---|---:|---:|---:|---|", flush=True)
    for name in options.only:
        for row in judge(name, options.seconds, options.sweep, options.beyond):
            row["load"] = os.getloadavg()[0]
            results.append(row)
            ours, best = ("{} workers, {} environments".format(*row[key]) for key in ("recommended", "best"))
            spread = f"{row['lowest']:.2f}-{row['highest']:.2f}"
            met = "PASS" if row["ratio"] >= GOAL else "FALLS SHORT"
            figures = f"{row['ratio']:.2f} | {spread} | {row['taken']:.0%}"
            print(f"| {name} | {row['mode']} | {ours} | {best} | {figures} | {met} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
