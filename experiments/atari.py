"""Learning curves of an Atari game: `python -m experiments.atari --setting gpu` runs three seeds, then draws them.

The seeds run side by side, each with its share of the cores, so that one simulates while another learns. Every run is
`examples/ppo_atari.py`; its results are appended to `data/atari.jsonl` with its options.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.__main__ import DATA, about

ROOT = Path(__file__).resolve().parents[1]
PATH = DATA / "atari.jsonl"
PLOT = ROOT / "docs" / "evidence" / "atari.png"
SETTINGS: dict[str, dict[str, Any]] = {
    # 16 cores and a GPU: ten minutes.
    "gpu": {
        "num-envs": 60,
        "num-steps": 32,
        "minibatches": 8,
        "learning-rate": 5e-4,
        "prefetch": 1,
        "seconds": 530,
        "target": 19,
    },
    # 2 cores, no GPU.
    "cpu": {
        "num-envs": 16,
        "num-steps": 128,
        "minibatches": 8,
        "learning-rate": 5e-4,
        "network": "small",
        "epochs": 3,
        "seconds": 1200,
    },
}


def run(setting: str, seeds: list[int], overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the example once for each seed, all at the same time. Return their results."""
    options = {"game": "Pong", "workers": max(1, (os.cpu_count() or 1) // len(seeds)), **SETTINGS[setting], **overrides}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for seed in seeds:
            out = Path(folder) / f"{seed}.json"
            command = [sys.executable, "examples/ppo_atari.py", *given, "--seed", str(seed), "--json", str(out)]
            runs.append((out, subprocess.Popen(command, cwd=ROOT)))
        failed = [process.args for _, process in runs if process.wait() != 0]
        if failed:
            raise SystemExit(f"failed: {failed}")
        results = [json.loads(out.read_text()) for out, _ in runs]
    print(f"{len(seeds)} seeds in {time.time() - begin:.0f} s, start and evaluation included")
    return [{"setting": setting, "options": options, "machine": about(), **result} for result in results]


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = [name for name in SETTINGS if any(line["setting"] == name for line in lines)]
    figure, panels = plt.subplots(1, len(settings), figsize=(4.5 * len(settings), 3.4), squeeze=False, sharey=True)
    for axes, setting in zip(panels[0], settings, strict=True):
        its = [line for line in lines if line["setting"] == setting]
        for line in its:
            minutes = [seconds / 60 for seconds, _, _ in line["curve"]]
            axes.plot(minutes, [mean for _, _, mean in line["curve"]], label=f"seed {line['seed']}")
        axes.set(xlabel="minutes", title=f"{its[0]['game']}, {its[0]['machine']['cores']} cores, {its[0]['device']}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    panels[0][0].set_ylabel("mean return of the last 100 episodes")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, help="default: draw what has been run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", type=Path, default=PATH)
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("OPTION", "VALUE"))
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args()
    if options.setting is not None:
        for line in run(options.setting, options.seeds, dict(options.set)):
            with options.data.open("a") as file:
                file.write(json.dumps(line) + "\n")
            mean = sum(line["evaluation"]) / len(line["evaluation"])
            print(f"seed {line['seed']}: {line['return']:.1f} after {line['seconds']:.0f} s, evaluation {mean:.1f}")
    else:
        draw([json.loads(text) for text in options.data.read_text().splitlines()], options.plot)


if __name__ == "__main__":
    main()
