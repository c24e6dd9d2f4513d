"""Search for schedules that break a rule: `python -m tools.search [--minutes N] [--schedules N] [--seed S] ...`.

Runs the simulation of tests/support/simulation with one seed after the other. Failing seeds are shortened and printed
as regression cases, together with how often each entry of the transition tables was taken.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from simulation.coverage import LEAST, Coverage, counted  # type: ignore[import-not-found]
from simulation.schedule import Outcome, run, shortest  # type: ignore[import-not-found]

_BLOCK = 50
"""Schedules between two reports of a process."""


def report(outcome: Outcome, attempts: int = 400) -> str:
    """Return a failing schedule as a short regression case."""
    short = shortest(outcome, attempts)
    where = "\n".join(f"    # {line}" for line in short.trace[-40:])
    return f"seed {outcome.seed}: {outcome.failure}\n{where}\n    assert run(recorded={short.choices}).failure is None"


def _search(seeds: range, until_s: float, out: Any) -> None:
    coverage, left, done = Coverage(), iter(seeds), 0
    failed: list[tuple[int, str]] = []
    begin = time.process_time()
    while done < len(seeds) and time.monotonic() < until_s:
        with counted(coverage):
            for seed in itertools.islice(left, _BLOCK):
                outcome = run(seed)
                done += 1
                if outcome.failure is not None:
                    failed.append((seed, outcome.failure))
    out.put((done, time.process_time() - begin, failed, coverage.counts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; default: from the clock")
    parser.add_argument("--schedules", type=int, default=1 << 40, help="end after this many, or when the time is up")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--show", type=int, default=3, help="number of failing seeds to shorten and print")
    parser.add_argument("--complete", action="store_true", help=f"fail if an entry is taken less than {LEAST} times")
    options = parser.parse_args()
    first = int(time.time()) * 1000 if options.seed is None else options.seed
    until_s = time.monotonic() + 60.0 * options.minutes
    out: Any = multiprocessing.Queue()
    seeds = range(first, first + options.schedules)
    shares = [seeds[i :: options.processes] for i in range(options.processes)]
    searches = [multiprocessing.Process(target=_search, args=(share, until_s, out)) for share in shares]
    for search in searches:
        search.start()
    results = [out.get() for _ in searches]
    for search in searches:
        search.join()
    coverage, kinds = Coverage(), Counter[str]()
    done, cpu_s = sum(result[0] for result in results), sum(result[1] for result in results)
    failed = sorted(entry for result in results for entry in result[2])
    for result in results:
        coverage.merge(result[3])
    print(f"{done} schedules from seed {first} on, {60 * done / cpu_s:.0f} a minute of one core, {len(failed)} failed")
    print("\n".join(coverage.lines()))
    for seed, failure in failed:  # all of them first: shortening takes long, and may be cut off
        print(f"seed {seed}: {failure.splitlines()[0][:200]}", flush=True)
    for seed, failure in failed:
        kind = "".join(c for c in failure if not c.isdigit())[:70]
        kinds[kind] += 1
        if kinds[kind] == 1 and len(kinds) <= options.show:
            print(report(run(seed)), flush=True)
    rare = coverage.rare() if options.complete else []
    for line in rare:
        print(line)
    return 1 if failed or rare else 0


if __name__ == "__main__":
    sys.exit(main())
