"""`python -m experiments TABLE`: run what is missing of a table of arms, one JSON line per run.

Runs are independent processes, as many as there are cores; what is in the file already is not run again, so that an
interrupted table goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from clusterenv.system.cpus import usable_cores
from experiments.arms import TABLES, Arm, Job
from experiments.records import read
from experiments.run import run_arm

DATA = Path(__file__).parent / "data"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("table", choices=sorted(TABLES), nargs="+")
    parser.add_argument("--only", default="", help='arms whose "task rule codec" contains this')
    parser.add_argument("--seeds", type=int, help="no more than so many of each arm")
    parser.add_argument("--steps", type=float, default=1.0, help="share of each task's steps, for a quick look")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--until", type=float, help="begin nothing that is likely to end after so many seconds")
    parser.add_argument("--data", type=Path, default=DATA / "runs.jsonl")
    args = parser.parse_args()
    if args.steps != 1.0 and args.data == DATA / "runs.jsonl":
        parser.error("--steps: shortened runs are no evidence; give --data FILE too")
    args.data.parent.mkdir(parents=True, exist_ok=True)
    jobs = list(dict.fromkeys(job for name in args.table for job in TABLES[name]))
    jobs = [job for job in jobs if args.only in f"{job.arm.task} {job.arm.name}" and job.seed <= (args.seeds or 1000)]
    run(jobs, args.data, args.processes, args.steps, args.until)
    return 0


def run(jobs: list[Job], path: Path, processes: int, steps_share: float = 1.0, until_s: float | None = None) -> None:
    """Whatever of these is not in the file yet, side by side; a run that permutes another's pulls waits for it."""
    done = {(Arm.of(record), record["seed"]): record for record in read(path)}
    waiting = [job for job in jobs if (job.arm, job.seed) not in done]
    total, count, begin, stamp = len(waiting), 0, time.monotonic(), about()
    running: dict[Future[dict[str, Any]], Job] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as driver, path.open("a") as file:
        while waiting or running:
            for job in list(_ready(waiting, done))[: processes - len(running)]:
                waiting.remove(job)
                parent = parent_of(job.arm)
                pulled = done[parent, job.seed]["pulled"] if parent else ()
                running[driver.submit(run_arm, *job, pulled, steps_share)] = job
            if not running:
                names = sorted({job.arm.name for job in waiting})
                print(f"not run: {', '.join(names)} permute runs that are missing", file=sys.stderr)
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, record = running.pop(future), future.result()
                done[job.arm, job.seed] = record
                file.write(json.dumps(record | stamp) + "\n")
                file.flush()
                count, spent = count + 1, time.monotonic() - begin
                print(
                    f"{count} of {total} after {spent:.0f} s: {job.arm.task}, "
                    f"{job.arm.name}, seed {job.seed}: {record['seconds']} s, return {record['late_return']}",
                    file=sys.stderr,
                    flush=True,
                )
            if until_s is not None:
                left = until_s - (time.monotonic() - begin)
                waiting = [job for job in waiting if _cost_s(job, done) < left]


def _ready(waiting: list[Job], done: dict[Any, Any]) -> Iterator[Job]:
    for job in waiting:
        parent = parent_of(job.arm)
        if parent is None or (parent, job.seed) in done:
            yield job


def parent_of(arm: Arm) -> Arm | None:
    """The arm whose pulls this one permutes."""
    name, _, rest = arm.rule.partition("(")
    return arm._replace(rule=f"APS({rest}") if name in ("Shuffled", "Random") else None


def _cost_s(job: Job, done: dict[Any, Any]) -> float:
    known = [record["seconds"] for (arm, _), record in done.items() if arm.task == job.arm.task]
    return max(known, default=0.0)


def about() -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=DATA.parent)
    commit = os.environ.get("EXPERIMENTS_COMMIT") or git.stdout.strip()
    packages = {name: version(name) for name in ("gymnasium", "numpy", "torch")}
    return {"commit": commit, "python": sys.version.split()[0], "cores": os.cpu_count(), **packages}


if __name__ == "__main__":
    sys.exit(main())
