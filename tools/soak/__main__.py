"""Run a soak; exit with 1 and print the seed if the ledger is not exact, a call hangs or memory grows."""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import sys
from dataclasses import asdict
from pathlib import Path

from tools.soak import hostile
from tools.soak.run import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="seed of the faults; default: random, and printed")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--every", type=float, default=5.0, help="mean number of seconds between faults")
    parser.add_argument("--loopback", action="store_true", help="use local processes, not network namespaces")
    parser.add_argument("--hostile", action="store_true", help="run a node that lies and floods beside three good ones")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="for the report, the samples, the plot")
    arguments = parser.parse_args()
    logging.getLogger("clusterenv").setLevel(logging.CRITICAL)  # the faults cause thousands of expected warnings
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    if arguments.hostile:
        found = hostile.run(arguments.minutes, arguments.folder, seed)
        print(json.dumps(asdict(found), indent=1))
        return bool(found.problems)
    print(f"soak: {arguments.minutes:g} minutes, seed {seed}", flush=True)
    try:
        report = soak(
            seed,
            arguments.minutes,
            arguments.folder,
            workers=arguments.workers,
            nodes=arguments.nodes,
            every_s=arguments.every,
            use_namespaces=False if arguments.loopback else None,
        )
    except Exception as error:
        print(f"soak: seed {seed}: {error}", file=sys.stderr)
        raise
    print(json.dumps({name: value for name, value in asdict(report).items() if name != "recovery"}, indent=1))
    if report.problems:
        print(f"soak: seed {seed}: {'; '.join(report.problems)}", file=sys.stderr)
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
