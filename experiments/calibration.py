"""Is the drift what it says? A PPO run under APS, with everything that was decided recorded and computed again.

    python -m experiments.calibration --plot docs/drift.png

Two questions. (1) Recomputed in float64 from the recorded samples, does the rule say what was done? (2) Against the
true drift, over 4096 other states that the same version visited, how good is the estimate?
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

import clusterenv as ce
from clusterenv.policy.acting.distributions import family_for
from clusterenv.policy.sync.divergence import divergence
from clusterenv.policy.sync.drift import DriftTable
from clusterenv.policy.sync.exchange import Exchange
from clusterenv.policy.sync.rules import Decision, Standing, decide
from clusterenv.policy.weights import encoding
from clusterenv.testing import Virtual
from experiments.hooks import watch_decisions
from experiments.ppo import PPO

HELD_OUT = 4096


class Noted(NamedTuple):
    version: int
    rows: Any
    params: Any


class Asked(NamedTuple):
    node: int
    standing: Standing
    pulls: bool


class Record(NamedTuple):
    rule: ce.APS
    happened: list[Noted | Asked]
    weights: dict[int, Any]  # version → its module, in float64
    states: dict[int, list[Any]]  # version → states that it acted on, [n, ...] each
    action_space: gym.Space[Any]


def record(env: str, rule: ce.APS, total_steps: int, num_envs: int, nodes: int, seed: int) -> Record:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    happened: list[Noted | Asked] = []
    weights: dict[int, Any] = {}
    states: dict[int, list[Any]] = {}
    with ce.ClusterEnv(env, num_envs, backend=Virtual(nodes)) as cluster:
        learner = PPO(cluster.single_observation_space, cluster.single_action_space, total_steps)
        collector = cluster.collector(learner.policy, sync=rule, seed=seed)
        listen(collector._sync.exchange, happened, weights, learner.actor)
        steps = 0
        while steps < total_steps:
            batch = collector.rollout(learner.num_steps)
            steps += batch.valid.size
            for version in {receipt.version for receipt in batch.receipts}:
                columns = [slot for receipt in batch.receipts if receipt.version == version for slot in receipt.slots]
                states.setdefault(version, []).append(batch.obs[:, columns].reshape(-1, *batch.obs.shape[2:]))
            learner.learn(batch, collector.publish)
        return Record(rule, happened, weights, states, cluster.single_action_space)


def listen(exchange: Exchange, happened: list[Noted | Asked], weights: dict[int, Any], module: Any) -> None:
    """Write down what is sampled and what is decided, as it happens."""
    note = exchange.publisher.note

    def noted(version: int, rows: Any, params: Any) -> None:
        happened.append(Noted(version, rows, params))
        note(version, rows, params)

    def decided(node: int, standing: Standing, decision: Decision) -> None:
        latest = exchange.publisher.snapshot()
        if latest not in weights:
            weights[latest] = _float64(module, exchange.publisher.data)
        happened.append(Asked(node, standing, decision.pull))

    watch_decisions(exchange, decided)
    exchange.publisher.note = noted  # type: ignore[assignment, method-assign]


def _float64(module: Any, data: bytes) -> Any:
    clone = copy.deepcopy(module).double()
    clone.load_state_dict({name: torch.from_numpy(np.array(v)).double() for name, v in encoding.decode(data).items()})
    return clone


def run_in_float64(module: Any, obs: Any) -> Any:
    with torch.no_grad():
        return module(torch.from_numpy(np.asarray(obs)).double()).numpy()


class Agreement(NamedTuple):
    decisions: int
    pulls: int
    near: int
    """Within 1e-5 of the threshold: float32 and float64 may differ there."""
    different: int


def decide_again(run: Record) -> Agreement:
    """Every decision once more, from the recorded samples, in float64."""
    latest = -1
    table = DriftTable(
        divergence(family_for("categorical", run.action_space)),
        lambda rows: run_in_float64(run.weights[latest], rows["obs"]),
        lambda version, rows: run_in_float64(run.weights[version], rows["obs"]),
    )
    held: dict[int, int] = {}
    decisions = pulls = near = different = 0
    for item in run.happened:
        if isinstance(item, Noted):
            acted = run_in_float64(run.weights[item.version], item.rows["obs"])
            table.add(item.version, item.rows, acted)
            continue
        version, latest = item.standing.version, item.standing.latest
        drift = table.drift(version, latest, {}) if 0 <= version < latest else None
        mean, se = (None, None) if drift is None else drift[:2]
        standing = Standing(version, latest, mean, se, item.standing.fragments)
        again = decide(run.rule, standing).pull
        decisions += 1
        pulls += bool(item.pulls)
        if drift is not None and abs(drift.mean + run.rule.z * drift.se - run.rule.delta) < 1e-5:
            near += 1
        else:
            different += bool(again) != item.pulls
        if item.pulls:
            held[item.node] = latest
            table.keep(set(held.values()))
    return Agreement(decisions, pulls, near, different)


def compare(run: Record, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """(estimate, its standard error, true drift) for each pair of versions that was asked about."""
    measure = divergence(family_for("categorical", run.action_space))
    sampled: dict[int, set[bytes]] = {}
    seen: dict[int, int] = {}  # version → how many blocks of its states had come by then
    points, done = [], set()
    for item in run.happened:
        if isinstance(item, Noted):
            sampled.setdefault(item.version, set()).update(row.tobytes() for row in item.rows["obs"])
            seen[item.version] = seen.get(item.version, 0) + 1
            continue
        version, latest, drift, se, _ = item.standing
        if drift is None or version == latest or version not in seen or (version, latest) in done:
            continue
        done.add((version, latest))
        states = np.concatenate(run.states[version][: seen[version]])
        states = states[[row.tobytes() not in sampled[version] for row in states]]
        states = states[rng.permutation(len(states))[:HELD_OUT]]
        old, new = run_in_float64(run.weights[version], states), run_in_float64(run.weights[latest], states)
        points.append((drift, se or 0.0, float(measure(old, new, {}).mean())))
    return points


def summarise(points: list[tuple[float, float, float]]) -> dict[str, float]:
    estimate, se, true = np.array(points).T
    ranks = np.array([np.argsort(np.argsort(values)) for values in (estimate, true)])
    return {
        "points": len(points),
        "median_ratio": float(np.median(estimate / true)),
        "rank_correlation": float(np.corrcoef(ranks)[0, 1]),
        "coverage_2se": float(np.mean(np.abs(estimate - true) <= 2 * se)),
    }


def plot(points: list[tuple[float, float, float]], delta: float, path: Path) -> None:
    import matplotlib
    import matplotlib.ticker

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    estimate, se, true = np.array(points).T
    figure, axes = plt.subplots(figsize=(5.5, 5), layout="constrained")
    axes.errorbar(true, estimate, yerr=2 * se, fmt="o", markersize=3, elinewidth=0.8, alpha=0.7, label="± 2 se")
    low, high = min(true.min(), estimate.min()) * 0.8, max(true.max(), estimate.max()) * 1.25
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    axes.axhline(delta, color="C1", linestyle="--", linewidth=1, label=f"threshold {delta:g}")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    ticks = [tick for tick in (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1) if low < tick < high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
        axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set(xlabel="true drift (4096 held-out states, float64)", ylabel="drift as the head estimates it")
    axes.set_title("PPO on LunarLander-v3 under APS")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="LunarLander-v3")
    parser.add_argument("--total-steps", type=int, default=400_000)
    parser.add_argument("--threshold", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rule = ce.APS(threshold=args.threshold)
    run = record(args.env_id, rule, args.total_steps, num_envs=64, nodes=8, seed=args.seed)
    points = compare(run, np.random.default_rng(args.seed))
    print(json.dumps(decide_again(run)._asdict() | summarise(points)))
    if args.plot:
        plot(points, rule.delta, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
