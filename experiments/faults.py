"""Learning under faults: `python -m experiments.faults [--seeds 30]` runs what is missing, then prints the verdict.

PPO on CartPole, on two nodes of real processes: once without faults, once with environments that raise, return NaN,
are slow, hang, or kill their worker or their node, one fault in about 2,000 steps. Both learn from the same number of
valid rows. The policy is evaluated ten times on environments without faults, because faults end long episodes of the
run itself more often than short ones. Non-inferior: the lower end of the 95 % interval of the difference of scores is
above -0.05, as in docs/evidence.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

import clusterenv as ce
from clusterenv.testing.envs import agent_process
from experiments.__main__ import DATA, about
from experiments.arms import TASKS
from experiments.ppo import PPO
from experiments.records import score
from experiments.stats import MARGIN, Interval, difference, pass_rate

TASK = "CartPole PPO"
PATH = DATA / "faults.jsonl"
EVERY = 2000
"""Mean number of steps between faults, over all environments."""
EVALUATIONS = 10
KINDS = {"raise": 0.4, "nan": 0.2, "kill worker": 0.15, "slow": 0.15, "hang": 0.05, "kill node": 0.05}
_MADE = itertools.count()
RECOVERY = ce.Recovery(step_timeout_s=5.0, max_restarts=1000, backoff_s=(0.05, 1.0))


class Faulty(gym.Wrapper[Any, Any, Any, Any]):
    """Fails at random steps, in random ways; its own random numbers leave those of the environment alone."""

    def __init__(self, env: gym.Env[Any, Any], slot: int, seed: int) -> None:
        super().__init__(env)
        # Not the same fault in each incarnation, whether in a new process or not.
        self._rng = np.random.default_rng([seed, slot, os.getpid(), next(_MADE)])

    def step(self, action: Any) -> Any:
        if self._rng.random() >= 1 / EVERY:
            return self.env.step(action)
        kind = self._rng.choice(list(KINDS), p=list(KINDS.values()))
        if kind == "raise":
            raise RuntimeError("planned")
        if kind == "kill worker":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "kill node":
            os.kill(agent_process(), signal.SIGKILL)
        time.sleep({"hang": 60.0, "slow": 0.2}.get(kind, 0.0))
        obs, *rest = self.env.step(action)
        return (np.full_like(obs, np.nan) if kind == "nan" else obs, *rest)


def run(seed: int, has_faults: bool, steps_share: float = 1.0) -> dict[str, Any]:
    """Train once; return its record."""
    task, begin = TASKS[TASK], time.perf_counter()
    logging.getLogger("clusterenv").setLevel(logging.CRITICAL)  # the faults cause warnings that are expected
    total_steps = int(task.total_steps * steps_share)
    torch.manual_seed(seed)
    torch.set_num_threads(1)

    def make(slot: int) -> gym.Env[Any, Any]:
        env = gym.make(task.env)
        return Faulty(env, slot, seed) if has_faults else env

    thunks = [lambda slot=slot: make(slot) for slot in range(task.num_envs)]
    backend = ce.Loopback(nodes=2, workers_per_node=2, heartbeat_s=(0.5, 5.0, 20.0))
    with ce.ClusterEnv(thunks, backend=backend, recovery=RECOVERY) as envs:
        learner = PPO(envs.single_observation_space, envs.single_action_space, total_steps, **task.settings)
        collector = envs.collector(learner.policy, seed=seed)
        evaluated: list[float] = []
        steps = 0
        while steps < total_steps:
            batch = collector.rollout(learner.num_steps)
            steps += int(batch.valid.sum())
            learner.learn(batch, collector.publish)
            if steps >= total_steps * (len(evaluated) + 1) / EVALUATIONS:
                evaluated.append(evaluate(learner.actor, seed))
        stats, events = collector.stats(), Counter(event.kind for event in envs.events())
    return {
        "task": TASK,
        "seed": seed,
        "has_faults": has_faults,
        "steps": steps,
        "invalid_rows": stats["invalid_rows"],
        "events": dict(events),
        "curve": evaluated,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def evaluate(actor: torch.nn.Module, seed: int) -> float:
    """Return the mean return of 16 episodes, with actions drawn as in training."""
    rng = np.random.default_rng(seed)
    with contextlib.closing(gym.make_vec(TASKS[TASK].env, 16, vectorization_mode="sync")) as envs:
        obs, _ = envs.reset(seed=100_000)
        returns, is_running = np.zeros(16), np.ones(16, bool)
        while is_running.any():
            with torch.no_grad():
                chances = torch.softmax(actor(torch.from_numpy(obs)), -1).numpy()
            actions = (rng.random((16, 1)) > chances.cumsum(-1)[:, :-1]).sum(-1)
            obs, rewards, terminations, truncations, _ = envs.step(actions)
            returns += rewards * is_running
            is_running &= ~(terminations | truncations)
    return float(returns.mean())


class Verdict(NamedTuple):
    seeds: int
    difference: Interval
    """Of the scores, with faults minus without. A score is the mean of the evaluations, from 0 to 1."""
    power: float
    """How often a learner that is no different would pass with so many seeds."""

    @property
    def is_non_inferior(self) -> bool:
        return self.difference.low > -MARGIN


def verdict(records: list[dict[str, Any]]) -> Verdict:
    of = {(record["seed"], record["has_faults"]): record for record in records}
    seeds = [seed for seed, has_faults in sorted(of) if not has_faults and (seed, True) in of]

    disturbed, undisturbed = ([score(of[seed, has_faults]) for seed in seeds] for has_faults in (True, False))
    return Verdict(len(seeds), difference(disturbed, undisturbed), pass_rate(undisturbed, len(seeds)))


def read_records(path: Path = PATH) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", type=Path, default=PATH)
    options = parser.parse_args()
    done = {(record["seed"], record["has_faults"]) for record in read_records(options.data)}
    jobs = [(seed, faults) for seed in range(1, options.seeds + 1) for faults in (False, True)]
    jobs, stamp = [job for job in jobs if job not in done], about()
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool, options.data.open("a") as file:
        futures = [pool.submit(run, *job) for job in jobs]
        for count, future in enumerate(as_completed(futures), 1):
            try:
                record = future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            file.write(json.dumps(record | stamp) + "\n")
            file.flush()
            print(f"{count} of {len(jobs)}: {record}", file=sys.stderr, flush=True)
    found = verdict(read_records(options.data))
    print(found, "non-inferior" if found.is_non_inferior else "not shown to be non-inferior", sep="\n")
    return 0


if __name__ == "__main__":
    from experiments import faults  # workers import what is pickled by this name, not from `__main__`

    sys.exit(faults.main())
