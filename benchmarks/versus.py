"""Compare the speed of this checkout with that of another commit: `python -m benchmarks.versus COMMIT`.

Enters: a commit. Leaves: a Markdown table on stdout, the raw figures in `runs/bench`. The commit is installed into a
separate virtual environment, which shares all other packages with this one. In each round both are started, by the
same script, and take turns of half a second, so that other load on the machine affects both; the ratio of a round is
that of the sums of its turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.__main__ import OUTPUT, kill_group, say, start
from benchmarks.tables import Table
from benchmarks.venvs import HOME, ROOT

CASES = {
    "step CartPole-v1": ("clusterenv", "CartPole-v1"),
    "step LunarLander-v3": ("clusterenv", "LunarLander-v3"),
    "rollout CartPole-v1": ("clusterenv-collect", "CartPole-v1"),
    "rollout LunarLander-v3": ("clusterenv-collect", "LunarLander-v3"),
    "network-step CartPole-v1": ("clusterenv-network", "CartPole-v1"),
    "network-step LunarLander-v3": ("clusterenv-network", "LunarLander-v3"),
    "network-collect CartPole-v1": ("clusterenv-collect-network", "CartPole-v1"),
    "network-collect LunarLander-v3": ("clusterenv-collect-network", "LunarLander-v3"),
}
FIGURES = ("steps_per_s", "start_s", "head_mb")
NUM_ENVS = 64
GOAL = 0.95

Outcomes = dict[str, dict[str, list[dict[str, float]]]]
"""By case and by version, in the order of the rounds."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the older version")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4, help="of each version in a round")
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of a turn")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"any of {', '.join(CASES)}")
    parser.add_argument("--old-python", type=Path, help="an interpreter that already has that commit installed")
    parser.add_argument("--output", type=Path, default=OUTPUT / "versus.json", help="file for the raw figures")
    args = parser.parse_args()
    pythons = {"old": args.old_python or install(args.commit), "new": Path(sys.executable)}
    outcomes: Outcomes = {case: {"old": [], "new": []} for case in args.only or CASES}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for round_ in range(args.rounds):
        for case, series in outcomes.items():
            subject, env_id = CASES[case]
            table = Table(case, env_id, NUM_ENVS, (subject,))
            order = ("old", "new") if round_ % 2 else ("new", "old")  # neither is always first
            outcome = take_turns({which: pythons[which] for which in order}, subject, table, args)
            for which, figures in outcome.items():
                series[which].append(figures)
            ratio = series["new"][-1]["steps_per_s"] / series["old"][-1]["steps_per_s"]
            say(f"round {round_ + 1}/{args.rounds}  {case}: {ratio:.3f}")
        args.output.write_text(json.dumps({"commit": args.commit, "outcomes": outcomes}, indent=2) + "\n")
    print(markdown(outcomes, args.commit))


def take_turns(pythons: dict[str, Path], subject: str, table: Table, args: Any) -> dict[str, dict[str, float]]:
    """Start the versions one after the other, let them run in turn, and return the figures of each."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for which, python in pythons.items():
            running[which] = start(python, subject, table, args.workers, args.seconds, "--in-turns")
            await_line(running[which], "ready")
        for turn in range(args.turns):
            for which in running if turn % 2 else reversed(running):
                print("go", file=running[which].stdin, flush=True)
                await_line(running[which], "done")
        outcomes = {which: json.loads(process.communicate()[0]) for which, process in running.items()}
    except BaseException:
        for process in running.values():
            kill_group(process)
        raise
    return {which: {figure: outcome[figure] for figure in FIGURES} for which, outcome in outcomes.items()}


def await_line(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline().strip() != expected:
        raise SystemExit(process.stderr.read())


def install(commit: str) -> Path:
    """Return the interpreter of a virtual environment with that commit's package."""
    name = subprocess.check_output(["git", "rev-parse", "--short", f"{commit}^{{commit}}"], cwd=ROOT, text=True).strip()
    home = HOME / f"commit-{name}"
    python = home / "bin" / "python"
    if (home / ".ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True)
    ours, theirs = (
        Path(sysconfig.get_path("purelib")),
        home / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix),
    )
    (theirs / "shared.pth").write_text(f"{ours}\n")  # after its own packages, and without our editable install
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "source.tar"
        subprocess.run(["git", "archive", "-o", str(archive), commit], cwd=ROOT, check=True)
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(theirs), folder]
        subprocess.run(pip, check=True)
    (home / ".ready").touch()
    return python


def lower_bound(ratios: np.ndarray) -> float:
    """Return the 95 % lower bound of the median ratio, by bootstrap."""
    draws = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
    return float(np.quantile(np.median(draws, axis=1), 0.05))


def markdown(outcomes: Outcomes, commit: str) -> str:
    lines = [
        f"| new / {commit} | steps/s, median | 95 % lower bound | pairs | start-up time | peak memory of the head |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case, series in outcomes.items():
        steps, start, memory = (
            np.array([new[figure] / old[figure] for new, old in zip(series["new"], series["old"], strict=True)])
            for figure in FIGURES
        )
        bound = lower_bound(steps)
        mark = "" if bound >= GOAL else f" (below {GOAL})"
        others = f"{np.median(start):.3f} | {np.median(memory):.3f}"
        lines.append(f"| {case} | {np.median(steps):.3f} | {bound:.3f}{mark} | {len(steps)} | {others} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
