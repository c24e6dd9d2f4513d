"""Measure where a policy should act: `python -m benchmarks.inference [--device cuda] [--workers N] ...`.

Frames of 84 x 84 x 4 from `bench/Pixels-v0`, three policies of different size; rollouts with `act="head"` (on the
device), `act="workers"` (on their CPUs) and `act="auto"`, and TorchRL's `AsyncBatchedCollector` with its inference
server on the same device, if TorchRL is installed. Subjects take turns; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import gymnasium as gym
import torch
from torch import nn

import benchmarks.synthetic  # noqa: F401  registers the environment
import clusterenv as ce

ENV_ID, ACTIONS, STEPS = "bench/Pixels-v0", 6, 16
OURS = ("head", "workers", "auto")
AUTO_TRIES = 7
"""Rollouts until `act="auto"` has decided."""


class Frames(nn.Module):
    """Frames as Gymnasium returns them, as floats with the channels first."""

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return frames.float().permute(0, 3, 1, 2) / 255.0


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(torch.relu(x))))


def small() -> nn.Module:
    convolutions = [nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 16, 4, 4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(Frames(), *convolutions, nn.Linear(16 * 5 * 5, ACTIONS))


def nature() -> nn.Module:
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU()]
    return nn.Sequential(Frames(), *layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, ACTIONS))


def resnet() -> nn.Module:
    """The network of IMPALA, twice as wide and with a larger last layer: 5 million parameters."""
    layers: list[nn.Module] = []
    before = 4
    for width in (32, 64, 64):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.MaxPool2d(3, 2, 1), Residual(width), Residual(width)]
        before = width
    return nn.Sequential(
        Frames(), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(64 * 11 * 11, 600), nn.ReLU(), nn.Linear(600, ACTIONS)
    )


POLICIES: dict[str, Callable[[], nn.Module]] = {"small": small, "Nature CNN": nature, "ResNet": resnet}


def ours(act: Any, make: Callable[[], nn.Module], options: argparse.Namespace) -> float:
    """Return transitions per second."""
    torch.manual_seed(0)
    agent = ce.TorchPolicy(make().to(options.device), dist="categorical")
    with ce.ClusterEnv(ENV_ID, options.envs, backend=ce.Local(workers=options.workers)) as envs:
        collector = envs.collector(agent, seed=0, act=act)
        for _ in range(AUTO_TRIES if act == "auto" else 2):
            collector.rollout(STEPS)
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < options.seconds:
            collector.rollout(STEPS)
            done += STEPS * options.envs
        elapsed = time.perf_counter() - begin
        if act == "auto":
            print(f"    auto: {collector.stats()['acts']}", flush=True)
    return done / elapsed


def torchrl_env() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(gym.make(ENV_ID), categorical_action_encoding=True)


def torchrl_policy(make: Callable[[], nn.Module], device: str) -> Any:
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor

    torch.manual_seed(0)
    logits = TensorDictModule(make().to(device), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )


def torchrl(make: Callable[[], nn.Module], options: argparse.Namespace) -> float:
    from torchrl.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        [torchrl_env] * options.envs,
        policy_factory=functools.partial(torchrl_policy, make, options.device),
        frames_per_batch=STEPS * options.envs,
        max_batch_size=options.envs,
        device=options.device,
        env_backend="multiprocessing",
        transport="auto",
    )
    try:
        batches = iter(collector)
        for _ in range(2):
            next(batches)
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < options.seconds:
            done += next(batches).numel()
        return done / (time.perf_counter() - begin)
    finally:
        collector.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--workers", type=int, default=None, help="default: one per CPU")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torchrl-rounds", type=int, default=3, help="starting its processes takes long")
    parser.add_argument("--only", nargs="+", choices=POLICIES, default=list(POLICIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    subjects = [*OURS, *(["TorchRL"] if importlib.util.find_spec("torchrl") else [])]
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        for name in options.only:
            for subject in subjects:
                if subject == "TorchRL" and number >= options.torchrl_rounds:
                    continue
                measure = torchrl if subject == "TorchRL" else functools.partial(ours, subject)
                rate = measure(POLICIES[name], options)
                rates.setdefault((name, subject), []).append(rate)
                print(f"round {number + 1}/{options.rounds}  {name}  {subject}: {rate:,.0f} steps/s", flush=True)
    print(f"\n{options.envs} environments, acting at the head on {options.device}; steps/s\n")
    print(f"| policy | parameters | {' | '.join(subjects)} | auto of the better |")
    print("|---|---|" + "---|" * (len(subjects) + 1))
    for name in options.only:
        size = sum(weight.numel() for weight in POLICIES[name]().parameters())
        medians = {subject: median(rates[name, subject]) for subject in subjects}
        better = medians["auto"] / max(medians["head"], medians["workers"])
        cells = " | ".join(f"{rate:,.0f}" for rate in medians.values())
        print(f"| {name} | {size:,} | {cells} | {better:.2f} |")


if __name__ == "__main__":
    main()
