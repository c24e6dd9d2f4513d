"""Measure how long a policy takes to its first batch, and the memory of its workers: `python -m benchmarks.start`.

Time runs from `ClusterEnv(...)` to the end of the first rollout, with torch already imported, as in a training script.
Memory is the workers' proportional set size after it (`Pss` in `/proc/PID/smaps_rollup`): pages that workers share
count once. Each measurement is a separate process; policies take turns, and figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.venvs import ROOT

Figures = dict[tuple[str, int], list[dict[str, float]]]
"""(policy, workers) → the figures of each round."""

POLICIES = ("random", "onnx", "torch")
LABELS = {"random": "`RandomPolicy`", "onnx": "64-64 network, exported", "torch": "64-64 network in torch"}


def measure(policy: str, workers: int) -> dict[str, float]:
    import clusterenv as ce

    agent: Any = ce.RandomPolicy()
    if policy != "random":  # which is measured without torch, so that the fork server does not import ONNX Runtime
        from torch import nn

        net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        agent = ce.TorchPolicy(net, dist="categorical", runtime="onnx" if policy == "onnx" else "torch")
    begin = time.perf_counter()
    with ce.ClusterEnv("CartPole-v1", 4 * workers, backend=ce.Local(workers=workers)) as envs:
        made_s = time.perf_counter() - begin
        collector = envs.collector(agent, seed=0)
        attached_s = time.perf_counter() - begin
        collector.rollout(16)
        start_s = time.perf_counter() - begin
        sizes = [pss_mb(pid) for pid in worker_pids()]
    assert len(sizes) == workers
    return {"start_s": start_s, "made_s": made_s, "export_s": attached_s - made_s, "pss_mb": median(sizes)}


def worker_pids() -> list[int]:
    """Return the processes that the fork servers of this process have forked."""
    return [worker for server in children(os.getpid()) for worker in children(server)]


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} reports no Pss")


def markdown(figures: Figures, counts: Sequence[int], policies: Sequence[str] = POLICIES) -> str:
    lines = ["# Start to the first batch", "", "| workers | policy | seconds | over the first | MB (PSS) of a worker |"]
    lines.append("|---|---|---|---|---|")
    for workers in counts:
        base = median(figure["start_s"] for figure in figures[policies[0], workers])
        for policy in policies:
            rounds = figures[policy, workers]
            seconds = median(figure["start_s"] for figure in rounds)
            memory = median(figure["pss_mb"] for figure in rounds)
            lines.append(f"| {workers} | {LABELS[policy]} | {seconds:.2f} | {seconds / base:.2f} | {memory:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--one", choices=POLICIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args.workers[0])))
        return
    print(markdown(measure_all(args.rounds, args.workers, args.policies), args.workers, args.policies))


def measure_all(rounds: int, counts: Sequence[int], policies: Sequence[str] = POLICIES) -> Figures:
    """Measure every policy with every number of workers, in turns."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else a source tree would be compiled at every start
    figures: Figures = {}
    for _ in range(rounds):
        for workers in counts:
            for policy in policies:
                command = [sys.executable, "-m", "benchmarks.start", "--one", policy, "--workers", str(workers)]
                done = subprocess.run(
                    command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
                )
                figure = json.loads(done.stdout.splitlines()[-1])
                figures.setdefault((policy, workers), []).append(figure)
                print(policy, workers, {name: round(value, 3) for name, value in figure.items()}, file=sys.stderr)
    return figures


if __name__ == "__main__":
    main()
