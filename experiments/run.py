"""One arm with one seed, on the virtual cluster: a record leaves. The same each time on one machine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import clusterenv as ce
from clusterenv.policy import codec
from clusterenv.testing import Virtual
from experiments.arms import Arm, rule_of
from experiments.learners import LEARNERS

__all__ = ["run_arm"]


def run_arm(arm: Arm, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with ce.ClusterEnv(arm.env, arm.num_envs, backend=Virtual(arm.nodes)) as cluster:
        learner = LEARNERS[arm.learner](cluster.single_observation_space, cluster.single_action_space, arm.total_steps)
        collector = cluster.collector(learner.policy, sync=rule_of(arm.rule), seed=seed)
        curve: list[tuple[int, float]] = []
        steps = 0
        if learner.streams:
            batches = collector.stream(learner.num_steps, queue=1)
        else:
            batches = (collector.rollout(learner.num_steps) for _ in iter(int, 1))
        for batch in batches:
            steps += int(batch.valid.sum())
            learner.learn(batch, collector.publish)
            curve.append((steps, collector.summary()["charts/episodic_return"]))
            if steps >= arm.total_steps:
                break
        batches.close()
        stats = collector.stats()
        size = len(codec.encode(learner.policy.weights()))
        final = collector.evaluate(episodes=64, seed=10_000).mean
    kappas, lags = np.array(learner.kappas), np.zeros(0)
    for node in stats["nodes"]:
        lags = np.concatenate([lags, *(np.full(count, lag) for lag, count in node["lags"].items())])
    returns = np.array([value for _, value in curve if np.isfinite(value)])
    return {
        "env": arm.env,
        "learner": arm.learner,
        "rule": arm.rule,
        "seed": seed,
        "nodes": arm.nodes,
        "num_envs": arm.num_envs,
        "steps": steps,
        "versions": stats["version"] + 1,
        "pulls": stats["pulls"],
        "policy_bytes": size,
        **{name: stats[name] for name in ("weight_bytes", "drift_bytes", "fragment_bytes")},
        "kappa": {str(q): float(np.quantile(kappas, q / 100)) for q in (10, 50, 90)} | {"mean": float(kappas.mean())},
        "ess_10": float(np.quantile(learner.ess, 0.1)) if learner.ess else None,
        "lag_mean": float(lags.mean()),
        "final_return": final,
        "mean_return": float(returns.mean()) if len(returns) else None,
        "seconds": round(time.perf_counter() - begin, 1),
    }
