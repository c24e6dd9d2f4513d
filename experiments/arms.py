"""What is compared, as data: tasks, the arms that each is run with, and how many seeds.

An arm is written as it is called: "APS(0.02) auto" is the rule `APS(threshold=0.02)` with `codec="auto"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["HALF", "MAIN", "PACKED", "PAPER_DELTAS", "TABLES", "TASKS", "Arm", "Job", "Task"]


@dataclass(frozen=True)
class Task:
    env: str
    learner: str
    total_steps: int
    num_envs: int
    nodes: int
    worst: float
    """Return of a random policy, and of one that has solved it: scores of 0 and 1. Stated before the comparisons."""
    best: float
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the learner, where they are not its defaults."""


# Paper: 5 M steps with rollouts of 1024 make 20 updates. Its grid is that of arXiv 2507.10990; its delta was a sum.
_PAPER = {
    "num_steps": 1024,
    "epochs": 30,
    "minibatch": 32768,
    "rate": 5e-4,
    "gamma": 0.99,
    "lam": 0.95,
    "entropy": 0.01,
}
_QUICK = {"rate": 1e-3, "minibatch": 256, "gamma": 0.99, "lam": 0.95, "entropy": 0.01}
# The best of six settings, one seed each. A node's fragment makes 64 versions.
_APPO = {
    "streams": True,
    "publishes_minibatches": True,
    "num_steps": 128,
    "epochs": 8,
    "minibatch": 256,
    "rate": 5e-4,
    "entropy": 0.01,
}

TASKS = {
    "CartPole PPO": Task(
        "CartPole-v1", "PPO", 100_000, 64, 8, 20.0, 500.0, {**_QUICK, "num_steps": 32, "reward_scale": 0.1}
    ),
    "Acrobot PPO": Task(
        "Acrobot-v1", "PPO", 300_000, 64, 8, -500.0, -80.0, {**_QUICK, "num_steps": 32, "reward_scale": 0.1}
    ),
    "LunarLander PPO": Task(
        "LunarLander-v3",
        "PPO",
        600_000,
        64,
        8,
        -180.0,
        250.0,
        {"epochs": 8, "minibatch": 256, "gamma": 0.995, "entropy": 0.01},  # of four settings that with the least spread
    ),
    "HalfCheetah PPO": Task(
        "HalfCheetah-v5",
        "PPO",
        1_000_000,
        32,
        4,
        -280.0,
        4000.0,
        {"rate": 1e-3, "minibatch": 256, "gamma": 0.99, "lam": 0.95, "entropy": 0.0, "reward_scale": 0.1, "epochs": 5},
    ),
    "Pendulum SAC": Task("Pendulum-v1", "SAC", 20_000, 8, 4, -1200.0, -150.0),
    "CartPole DQN": Task("CartPole-v1", "DQN", 50_000, 16, 4, 20.0, 500.0),
    "LunarLander APPO": Task("LunarLander-v3", "PPO", 600_000, 64, 4, -180.0, 250.0, _APPO),
    "LunarLander PPO, quick": Task(
        "LunarLander-v3", "PPO", 200_000, 64, 4, -180.0, 250.0, {"epochs": 8, "minibatch": 256, "gamma": 0.995}
    ),
    "paper": Task("LunarLander-v3", "PPO", 5_000_000, 256, 4, -180.0, 250.0, _PAPER),
    "paper, shorter rollouts": Task(
        "LunarLander-v3",
        "PPO",
        1_500_000,
        256,
        4,
        -180.0,
        250.0,
        {**_PAPER, "num_steps": 64, "minibatch": 2048, "epochs": 20},
    ),
}
"""By name, in the order in which they are shown."""


class Arm(NamedTuple):
    task: str
    rule: str
    """As it is written: "Every(4)", "APS(0.02)". "Shuffled(0.02)" pulls after the same intervals as APS(0.02) with this
    seed, in another order; "Random(0.02)" as often, at any time."""
    codec: str = "fp32"
    variant: str = ""
    """A setting of the learner or the drift estimate that differs: "is_decoupled=False", "sample_every=16"."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> Arm:
        """The arm of a raw line."""
        return cls(*(record[name] for name in cls._fields))

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.rule, "" if self.codec == "fp32" else self.codec, self.variant) if part)


class Job(NamedTuple):
    arm: Arm
    seed: int


def _jobs(task: str, seeds: int, rules: Sequence[str], variant: str = "") -> list[Job]:
    arms = []
    for text in rules:
        rule, _, codec = text.partition(" ")
        arms.append(Arm(task, rule, codec or "fp32", variant))
    return [Job(arm, seed) for seed in range(1, seeds + 1) for arm in arms]


MAIN = ("Always", "APS(0.02)", "APS(0.02) auto", "Shuffled(0.02)")
"""The comparisons that were stated before the runs."""
PACKED = "Always auto"
"""Added last, to tell what the codec saves without a rule from what the rule saves; few seeds, where they take long."""
HALF = ("APS(0.01)", "APS(0.01) auto")
"""Added after the first ten seeds of LunarLander, where 0.02 seemed to cost return."""

GRID = ("Every(2)", "Every(4)", "Every(8)", "Every(16)", "APS(0.005)", "APS(0.01)", "APS(0.05)", "APS(0.1)", "APS(0.2)")
PAPER_DELTAS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
PAPER_GRID = ("Always", *(f"APS({delta})" for delta in PAPER_DELTAS))
_LOSSES = ("Always", "APS(0.005)", "APS(0.01)", "APS(0.02)", "APS(0.2)")

TABLES: dict[str, list[Job]] = {
    "pilot": [job for task in list(TASKS)[:7] for job in _jobs(task, 2, ("Always",))],
    "main": [
        *_jobs("LunarLander PPO", 10, ("APS(0.02)", "APS(0.01)", "Shuffled(0.02)")),
        *_jobs("LunarLander PPO", 46, ("Always", "APS(0.02) auto")),
        *_jobs("LunarLander PPO", 22, ("APS(0.01) auto",)),
        *_jobs("LunarLander PPO", 5, (PACKED,)),
        *_jobs("Acrobot PPO", 20, (*MAIN, HALF[1])),
        *_jobs("Acrobot PPO", 5, (PACKED,)),
        *_jobs("CartPole PPO", 30, (*MAIN, HALF[1], PACKED)),
        *_jobs("Pendulum SAC", 10, (*MAIN, HALF[1])),
        *_jobs("Pendulum SAC", 5, (PACKED,)),
        *_jobs("CartPole DQN", 10, MAIN),
        *_jobs("CartPole DQN", 5, (PACKED,)),
        *_jobs("LunarLander APPO", 10, ("Always", "APS(0.02) auto", "APS(0.01) auto")),
        *_jobs("LunarLander APPO", 5, (PACKED,)),
    ],
    "cheetah": [
        *_jobs("HalfCheetah PPO", 10, ("Always",)),
        *_jobs("HalfCheetah PPO", 3, ("APS(0.02) auto",)),
    ],
    "grid": [
        *_jobs("CartPole PPO", 10, (*GRID, "Never", "Random(0.02)", "Shuffled(0.2)")),
        *_jobs("Acrobot PPO", 3, (*GRID, "Shuffled(0.2)")),
        *_jobs("LunarLander PPO", 3, [rule for rule in GRID if rule != "APS(0.01)"]),
        *_jobs("Pendulum SAC", 3, GRID[4:]),
    ],
    "ablations": [
        *_jobs("Acrobot PPO", 3, ("APS(0.01)", "APS(0.02)"), "is_decoupled=False"),
        *_jobs("CartPole PPO", 10, _LOSSES, "is_decoupled=False"),
        *_jobs("CartPole PPO", 10, ("APS(0.02)",), "sample_every=16"),
        *_jobs("CartPole PPO", 10, ("APS(0.02)",), "sample_every=512"),
        *_jobs("CartPole PPO", 10, ("APS(0.02)",), "z=0"),
        *_jobs("CartPole PPO", 10, ("APS(0.02)",), "z=3"),
        *_jobs("CartPole PPO", 10, ("APS(0.05)",), "quantile=0.9"),  # about as many pulls as APS(0.02)
        *_jobs("CartPole PPO", 10, ("APS(0.02) fp16", "APS(0.02) int8", "APS(0.02) int4", "APS(0.02) int2")),
    ],
    "paper": [*_jobs("paper", 2, PAPER_GRID), *_jobs("paper, shorter rollouts", 2, PAPER_GRID)],
    "quick": [
        *_jobs("LunarLander PPO, quick", 3, ("Always", "APS(0.01)", "APS(0.05)", "APS(0.2)")),
        *_jobs("CartPole PPO", 3, (*MAIN, "Every(8)", "APS(0.05)")),
    ],
}
