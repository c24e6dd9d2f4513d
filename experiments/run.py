"""One arm with one seed, on the virtual cluster: a record leaves. The same each time on one machine."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import clusterenv as ce
from clusterenv.policy.acting.distributions import family_for
from clusterenv.policy.sync.divergence import divergence
from clusterenv.policy.sync.drift import DriftTable
from clusterenv.policy.sync.exchange import Exchange
from clusterenv.policy.sync.rules import Decision, Rule, Standing, decide
from clusterenv.policy.weights import encoding
from clusterenv.testing import Virtual
from experiments.arms import PAPER_DELTAS, TASKS, Arm, Task
from experiments.hooks import sampling_every, watch_decisions
from experiments.offpolicy import DQN, SAC
from experiments.parts import Learner
from experiments.ppo import PPO

__all__ = ["run_arm", "schedule"]

LEARNERS: dict[str, Callable[..., Learner]] = {"PPO": PPO, "DQN": DQN, "SAC": SAC}
CURVE_POINTS = 25
LATE = 0.9
"""Late is what ends after this share of the steps."""


def run_arm(
    arm: Arm, seed: int, parent_pulls: Sequence[int] = (), steps_share: float = 1.0, backend: Any = None
) -> dict[str, Any]:
    """
    Args:
        parent_pulls: the versions that the APS run pulled, for arms that permute them.
        backend: a real one, to see whether it does the same; None: the virtual cluster.
    """
    task = TASKS[arm.task]
    total_steps = int(task.total_steps * steps_share)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    settings, options = _variant(arm.variant)
    rule = rule_of(arm.rule, seed, parent_pulls, options)
    every = int(options["sample_every"]) if "sample_every" in options else None
    with (
        sampling_every(every),
        ce.ClusterEnv(task.env, task.num_envs, backend=backend or Virtual(task.nodes)) as cluster,
    ):
        spaces = cluster.single_observation_space, cluster.single_action_space
        learner = LEARNERS[task.learner](*spaces, total_steps, **{**task.settings, **settings})
        collector = cluster.collector(learner.policy, sync=rule, seed=seed, codec=arm.codec)  # type: ignore[arg-type]
        watch = _Watch(collector._sync.exchange)
        if "quantile" in options:
            _measure_quantile(collector._sync.publisher._table, options["quantile"])
        published = Published(task, learner, cluster.single_action_space) if arm.task.startswith("paper") else None
        steps = 0
        ends: list[tuple[int, float]] = []  # (steps so far, return) of each episode
        batches = _batches(collector, learner)
        for batch in batches:
            steps += int(batch.valid.sum())
            ends += [(steps, float(value)) for value in batch.episodes.returns]
            if published is not None:
                published.take(batch)
            learner.learn(batch, collector.publish)
            if steps >= total_steps:
                break
        batches.close()
        stats, sent = collector.stats(), sum(cluster.stats()["sent_bytes"])
        size = len(encoding.encode(learner.policy.weights()))
        final = collector.evaluate(episodes=32, seed=10_000).mean
    returns = np.array([value for _, value in ends])
    when = np.array([at for at, _ in ends])
    late = returns[when > LATE * steps]
    lags = np.concatenate([np.repeat(list(node["lags"]), list(node["lags"].values())) for node in stats["nodes"]])
    return {
        **arm._asdict(),
        "seed": seed,
        "setting": asdict(task),
        "steps": steps,
        "device": learner.device,
        "nodes": len(stats["nodes"]),
        "versions": stats["version"] + 1,
        "pulls": stats["pulls"],
        "pulled": watch.pulled,
        "forms": dict(sum((Counter(node["forms"]) for node in stats["nodes"]), Counter())),
        "policy_bytes": size,
        "sent_bytes": sent,
        **{name: stats[name] for name in ("weight_bytes", "drift_bytes", "fragment_bytes")},
        "kappa": _quantiles(learner.kappas),
        "drift": _quantiles(watch.drifts),
        "drift_at_pull": _quantiles(watch.at_pull),
        "ess": _quantiles(learner.ess),
        "lag_mean": round(float(lags.mean()), 3),
        "curve": _curve(when, returns, steps),
        "late_return": round(float(late.mean()), 3) if len(late) else None,
        "mean_return": round(float(returns.mean()), 3) if len(returns) else None,
        "final_return": round(final, 3),
        **({} if published is None else {"published": published.triggers()}),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _batches(collector: ce.Collector, learner: Learner) -> Generator[ce.Rollout, None, None]:
    if learner.streams:
        return collector.stream(learner.num_steps, queue=1)
    return (collector.rollout(learner.num_steps) for _ in iter(int, 1))


def rule_of(text: str, seed: int, parent_pulls: Sequence[int], options: dict[str, float]) -> Any:
    """Other rules than APS come as functions, so that their drift is measured too."""
    name, _, rest = text.partition("(")
    number = float(rest.rstrip(")") or "nan")
    if name == "APS":
        return ce.APS(threshold=number, z=options.get("z", 1.0))
    if name in ("Shuffled", "Random"):
        versions = schedule(parent_pulls, seed, is_shuffled=name == "Shuffled")
        return lambda standing: bisect_right(versions, standing.latest) > bisect_right(versions, standing.version)
    fixed: dict[str, Rule] = {"Always": ce.Always(), "Never": ce.Never()}
    rule = ce.Every(int(number)) if name == "Every" else fixed[name]
    return lambda standing: decide(rule, standing).pull


def schedule(pulled: Sequence[int], seed: int, is_shuffled: bool = True) -> list[int]:
    """Versions at which to pull: the same intervals in another order, or as many pulls anywhere.

    >>> schedule([0, 1, 2, 10, 20], seed=1)
    [10, 11, 19, 20]
    """
    rng = np.random.default_rng([seed, 7])
    if is_shuffled:
        return [int(version) for version in np.cumsum(rng.permutation(np.diff(pulled)))]
    return sorted(rng.choice(np.arange(1, pulled[-1] + 1), len(pulled) - 1, replace=False).tolist())


class _Watch:
    """What is decided for the first node, as it happens."""

    def __init__(self, exchange: Exchange) -> None:
        self.pulled: list[int] = []
        self.drifts: list[float] = []
        self.at_pull: list[float] = []
        watch_decisions(exchange, self._decided)

    def _decided(self, node: int, standing: Standing, decision: Decision) -> None:
        if node:
            return
        if standing.drift is not None and standing.lag:
            self.drifts.append(0.0 if decision.pull else standing.drift)
        if decision.pull:
            self.pulled.append(standing.latest)
            if standing.drift is not None and standing.lag:
                self.at_pull.append(standing.drift)


def _measure_quantile(table: DriftTable, share: float) -> None:
    """Drift is a quantile over states from now on, instead of their mean."""
    measure = table._measure
    table._measure = lambda *args: np.full(len(args[0]), np.quantile(measure(*args), share))


class Published:
    """How often the published code's own trigger would have fired in these rollouts, with the weights as they were.

    It sums the KL over a node's environments, between what the policy gives for the state before and for this one: with
    unchanged weights it is the policy's own variation from step to step.
    """

    def __init__(self, task: Task, learner: Any, action_space: Any) -> None:
        self._per_node = task.num_envs // task.nodes
        self._learner = learner
        self._measure = divergence(family_for(learner.family_name, action_space))
        self._fired = np.zeros(len(PAPER_DELTAS), dtype=np.int64)
        self._steps = 0

    def take(self, batch: ce.Rollout) -> None:
        obs = torch.as_tensor(np.ascontiguousarray(batch.obs[:, : self._per_node]))
        params = self._learner.params(obs)
        before, now = params[:-1].reshape(-1, params.shape[2]), params[1:].reshape(-1, params.shape[2])
        sums = self._measure(before, now, {}).reshape(len(params) - 1, -1).sum(axis=1)
        self._fired += (sums[:, None] > np.array(PAPER_DELTAS)).sum(axis=0)
        self._steps += len(sums)

    def triggers(self) -> dict[str, Any]:
        return {"steps": self._steps, **{str(d): int(n) for d, n in zip(PAPER_DELTAS, self._fired, strict=True)}}


def _variant(text: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Settings of the learner, and of the rule."""
    if not text:
        return {}, {}
    name, value = re.fullmatch(r"(\w+)=(.+)", text).groups()  # type: ignore[union-attr]
    if name in ("z", "sample_every", "quantile"):
        return {}, {name: float(value)}
    return {name: {"True": True, "False": False}[value]}, {}


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    named = {str(q): float(np.quantile(array, q / 100)) for q in (10, 50, 90)} | {"mean": float(array.mean())}
    return {name: float(f"{value:.4g}") for name, value in named.items()}


def _curve(when: Any, returns: Any, steps: int) -> list[float | None]:
    """Mean return of the episodes that ended in each of 25 equal parts of the run."""
    part = np.minimum((when * CURVE_POINTS - 1) // steps, CURVE_POINTS - 1) if len(when) else when
    means = [returns[part == i].mean() if (part == i).any() else None for i in range(CURVE_POINTS)]
    return [None if mean is None else round(float(mean), 1) for mean in means]
