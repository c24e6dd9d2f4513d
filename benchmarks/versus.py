"""Compare the speed of this checkout with that of another commit: `python -m benchmarks.versus COMMIT`.

Enters: a commit. Leaves: a Markdown table on stdout, the raw figures in `runs/bench`. The commit is installed into a
separate virtual environment, which shares all other packages with this one. Both are measured in turn, by the same
script, so that other load on the machine affects both; a ratio is that of a pair of neighbouring measurements.
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

import numpy as np

from benchmarks.__main__ import OUTPUT, measure, say
from benchmarks.tables import Table
from benchmarks.venvs import HOME, ROOT, Missing

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
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement, after the warm-up")
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
            for which in ("old", "new") if round_ % 2 else ("new", "old"):  # neither is always first
                outcome = measure(pythons[which], subject, table, args.workers, args.seconds)
                if isinstance(outcome, Missing):
                    raise SystemExit(f"{case}, {which}: {outcome.reason}")
                series[which].append({figure: outcome[figure] for figure in FIGURES})
            ratio = series["new"][-1]["steps_per_s"] / series["old"][-1]["steps_per_s"]
            say(f"round {round_ + 1}/{args.rounds}  {case}: {ratio:.3f}")
        args.output.write_text(json.dumps({"commit": args.commit, "outcomes": outcomes}, indent=2) + "\n")
    print(markdown(outcomes, args.commit))


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
