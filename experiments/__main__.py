"""`python -m experiments TABLE`: run the arms that are missing, write one JSON line each, show the table.

Runs are independent processes, as many as there are cores; what is in the file already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import TABLES, Arm
from experiments.run import run_arm

DATA = Path(__file__).parent / "data"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=float, default=1.0, help="share of each arm's steps, for a quick look")
    parser.add_argument("--only", default="", help="arms whose name contains this")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="default: experiments/data/TABLE.jsonl")
    args = parser.parse_args()
    path = args.out or DATA / f"{args.table}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    arms = [arm for arm in TABLES[args.table] if args.only in arm.name]
    if args.steps != 1.0:
        arms = [Arm(*astuple(arm)[:3], int(arm.total_steps * args.steps), *astuple(arm)[4:]) for arm in arms]
    done = {(r["env"], r["learner"], r["rule"], r["seed"]) for r in read(path)}
    jobs = [(arm, seed) for seed in range(1, args.seeds + 1) for arm in arms]
    jobs = [(arm, seed) for arm, seed in jobs if (arm.env, arm.learner, arm.rule, seed) not in done]
    stamp = about()
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as processes, path.open("a") as file:
        futures = {processes.submit(run_arm, arm, seed): (arm, seed) for arm, seed in jobs}
        for count, future in enumerate(as_completed(futures), 1):
            record = future.result()
            file.write(json.dumps(record | stamp) + "\n")
            file.flush()
            arm, seed = futures[future]
            print(f"{count} of {len(jobs)}: {arm.name} seed {seed}: {record['seconds']} s", file=sys.stderr, flush=True)
    print(table(read(path)))
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def about() -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=DATA.parent)
    packages = {name: version(name) for name in ("clusterenv", "gymnasium", "numpy", "torch")}
    return {"commit": git.stdout.strip(), "python": sys.version.split()[0], **packages}


def table(records: list[dict[str, Any]]) -> str:
    """Means over seeds. "Fewer" is against every node pulling every version."""
    titles = ["task", "rule", "seeds", "κ, median (10 % to 90 %)", "versions", "pulls per node", "fewer by"]
    titles += ["weights sent", "returns"]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    keys = dict.fromkeys((r["env"], r["learner"], r["rule"]) for r in records)
    for key in sorted(keys, key=lambda key: (key[:2], _order(key[2]))):
        runs = [r for r in records if (r["env"], r["learner"], r["rule"]) == key]

        def mean(name: str, runs: list[dict[str, Any]] = runs) -> float:
            return float(np.mean([r[name] for r in runs]))

        low, middle, high = (np.mean([r["kappa"][q] for r in runs]) for q in ("10", "50", "90"))
        per_node = mean("pulls") / runs[0]["nodes"]
        returns = " ".join(f"{r['final_return']:.0f}" for r in sorted(runs, key=lambda r: r["seed"]))
        cells = [
            f"{key[0]} {key[1]}",
            key[2],
            str(len(runs)),
            f"{middle:.2g} ({low:.1g} to {high:.1g})",
            f"{mean('versions'):.0f}",
            f"{per_node:.1f}",
            f"{mean('versions') / per_node:.1f}",
            f"{mean('weight_bytes') / 1e6:.2f} MB",
            returns,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _order(rule: str) -> tuple[int, float]:
    name, _, rest = rule.partition("(")
    return ("Always", "Every", "APS", "Never").index(name), float(rest.rstrip(")") or 0)


if __name__ == "__main__":
    sys.exit(main())
