"""Kill `examples/ppo_detach.py --resume` again and again, and compare its result with that of an undisturbed run.

    python -m tools.restarts --kills 20

The script is killed with SIGKILL at random moments, half of them while it starts, and restarted each time. At the end
its greedy evaluation must be at most `--margin` below that of the undisturbed run, and no seed of a training
environment may have been used twice: the environments record them in a file that the script does not know of. Seeds of
the evaluation are excluded: it plays the same 64 episodes each time.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.seed_ledger import VARIABLE, read, repeated

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_SEED, _EVALUATION = 1, 1_000_000
"""Seed of the script, and the offset from it of the evaluation's first seed."""


class Script:
    """The example, with its own folder."""

    def __init__(self, folder: Path, total_steps: int) -> None:
        folder.mkdir()
        self.ledger, self.checkpoint = folder / "seeds", folder / "checkpoint.pt"
        # fmt: off
        self._command = [
            sys.executable, str(_ROOT / "examples" / "ppo_detach.py"), "--resume", str(folder),
            "--env-id", "tools.seed_ledger:LedgerCartPole-v1", "--num-envs", "16", "--workers", "2",
            "--total-steps", str(total_steps), "--target", "inf", "--seed", str(_SEED),
        ]
        # fmt: on
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        self._env = {**os.environ, VARIABLE: str(self.ledger), "PYTHONPATH": path}

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._env, cwd=_ROOT
        )

    def training_seeds(self) -> list[int]:
        evaluation = range(_SEED + _EVALUATION, _SEED + _EVALUATION + 64)
        return [seed for seed in read(self.ledger) if seed not in evaluation]


def undisturbed(script: Script) -> tuple[float, float, float]:
    """Return the evaluation, the seconds until the first update was done, and the seconds per update."""
    began = time.monotonic()
    process = script.start()
    assert process.stdout is not None
    first = process.stdout.readline()
    first_s = time.monotonic() - began
    rest, _ = process.communicate()
    output = first + rest
    if process.returncode:
        raise SystemExit(f"the undisturbed run failed:\n{output}")
    updates = int(re.findall(r"^versions +(\d+)", output, re.MULTILINE)[0])
    seconds = float(re.findall(r"^seconds +([\d.]+)", output, re.MULTILINE)[0])
    return _evaluation(output), first_s, seconds / updates


def disturbed(script: Script, kills: int, first_s: float, update_s: float, dice: random.Random) -> tuple[float, int]:
    """Return the evaluation, and the number of kills before the script finished."""
    killed = 0
    while True:
        process = script.start()
        if killed < kills:
            if dice.random() < 0.5:  # while it starts
                moment_s, updates, more_s = dice.uniform(0.0, first_s), 1, 0.0
            else:  # in or after one of its next updates
                moment_s, updates, more_s = math.inf, dice.choice((1, 2)), dice.uniform(0.0, update_s)
            if _waited(process, script.checkpoint, moment_s, updates, more_s):
                process.kill()
                process.communicate()
                killed += 1
                continue
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"the restarted script failed, after {killed} kills:\n{output}")
        return _evaluation(output), killed


def _waited(process: subprocess.Popen[str], checkpoint: Path, moment_s: float, updates: int, more_s: float) -> bool:
    """Wait for `moment_s`, or for `updates` checkpoints and `more_s`; return False if the script ended by itself."""
    began, written = time.monotonic(), _written(checkpoint)
    while process.poll() is None:
        if time.monotonic() - began >= moment_s:
            return True
        if written != (now := _written(checkpoint)):
            written, updates = now, updates - 1
            if not updates:
                time.sleep(more_s)
                return process.poll() is None
        time.sleep(0.005)
    return False


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _evaluation(output: str) -> float:
    return float(re.findall(r"^evaluation +(-?[\d.]+)", output, re.MULTILINE)[0])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill and restart a training script")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--total-steps", type=int, default=160_000)
    parser.add_argument("--margin", type=float, default=25.0, help="allowed difference below the undisturbed run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments of the kills")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = (Script(Path(folder, name), args.total_steps) for name in ("alone", "killed"))
        began = time.monotonic()
        expected, first_s, update_s = undisturbed(alone)
        print(f"undisturbed  {expected:.1f} after {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        found, kills = disturbed(killed, args.kills, first_s, update_s, random.Random(args.seed))
        print(f"killed       {found:.1f} after {time.monotonic() - began:.0f} s and {kills} kills")
        seeds = killed.training_seeds()
        twice = repeated(seeds)
        print(f"seeds        {len(seeds)}, of which {len(twice)} were used twice")
        left = sorted(path.name for path in killed.ledger.parent.iterdir())
        print(f"left         {', '.join(left)}")
    is_good = found >= expected - args.margin and not twice and kills == args.kills
    is_good = is_good and left == ["checkpoint.pt", "seeds"]
    print("passed" if is_good else "FAILED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
