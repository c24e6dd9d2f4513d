"""Measure one collector over a vector simulator once; the command line and the output are those of `subjects.py`.

The policy is a 64-64 tanh network, or for Atari games the Nature CNN. Every subject samples actions, computes their
log-probabilities, and records rollouts of 128 steps (for Atari 32, or 4 with many environments). Only true transitions
count.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from benchmarks.collectors import Agent, layer_init
from benchmarks.subjects import Job, Subject, Window, cluster, main, warm_and_count

RUNTIMES = ("torch", "onnx")

SWEEP_S = 0.7
"""How long each setting of the bare loop is tried."""


class Pixels(nn.Module):
    """The agent of CleanRL's ppo_atari.py, without its critic."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3, stride=1)]
        layers: list[nn.Module] = [part for layer in convolutions for part in (layer_init(layer), nn.ReLU())]  # type: ignore[arg-type]
        self.network = nn.Sequential(*layers, nn.Flatten(), layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU())
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.actor(self.network(x / 255.0))


def is_atari(env_id: str) -> bool:
    return env_id.startswith(("ALE/", "Pong"))


def steps_of(job: Job) -> int:
    if not is_atari(job.env_id):
        return 128
    return 32 if job.num_envs <= 64 else 4


def module_for(envs: Any, job: Job) -> nn.Module:
    if is_atari(job.env_id):
        return Pixels(int(envs.single_action_space.n))
    return Agent(envs.single_observation_space, envs.single_action_space).actor


# -- ours -------------------------------------------------------------------------------------------------------


def collect(job: Job, simulator: str, network: bool = False) -> list[Window]:
    import clusterenv

    env: Any = job.env_id
    if simulator == "envpool":
        from clusterenv.integrations.envpool import envpool

        env = envpool(job.env_id)
    else:
        env = native_vector(job.env_id)
    with closing(cluster(job, env, network)) as envs:
        policy = clusterenv.TorchPolicy(module_for(envs, job), dist="categorical")
        collector = envs.collector(policy, seed=1)

        def rollout() -> int:
            return int(np.count_nonzero(collector.rollout(steps_of(job)).valid))

        return warm_and_count(rollout, job)


def native_vector(env_id: str) -> Any:
    import ale_py
    import gymnasium

    from clusterenv.simulators.native import native

    gymnasium.register_envs(ale_py)
    return native(env_id, "vector_entry_point", None)


# -- the best bare loop -----------------------------------------------------------------------------------------


def bare_envpool(job: Job) -> list[Window]:
    """Measure EnvPool in a bare loop that acts and records, in the fastest of its settings."""
    import envpool

    def make(threads: int, batch: int) -> Any:
        options = {"batch_size": batch} if batch < job.num_envs else {}
        return envpool.make_gymnasium(job.env_id, num_envs=job.num_envs, num_threads=threads, seed=0, **options)

    if is_atari(job.env_id) and job.num_envs > 64:  # EnvPool makes ten games a second: one pool for all settings
        envs, loop = envpool_loop(make(job.workers, job.num_envs), job.num_envs, job)
        with closing(envs):
            forwards = [forward_of(envs, job, runtime) for runtime in RUNTIMES]
            return warm_and_count(loop(max(forwards, key=lambda forward: rate_of(loop(forward)))), job)
    settings = itertools.product((1, job.workers), (job.num_envs, job.num_envs // 2), RUNTIMES)
    return bare_loop(job, list(settings), lambda threads, batch: envpool_loop(make(threads, batch), batch, job))


def bare_atari(job: Job) -> list[Window]:
    """Measure ale-py's vector environment in a bare loop, in the fastest of its settings."""
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    def make(threads: int) -> Any:
        game = job.env_id.removeprefix("ALE/").partition("-")[0].lower()
        same = AutoresetMode.SAME_STEP
        return AtariVectorEnv(game, job.num_envs, num_threads=threads, autoreset_mode=same)

    settings = list(itertools.product((1, job.workers), (job.num_envs,), RUNTIMES))
    return bare_loop(job, settings, lambda threads, batch: same_step_loop(make(threads), job))


Loop = Callable[[Callable[[Any], Any]], Callable[[], int]]
"""Takes a forward pass, and returns a function that collects a rollout and counts its transitions."""


def bare_loop(job: Job, settings: list[tuple[int, int, str]], loop_of: Callable[[int, int], tuple[Any, Loop]]) -> Any:
    """Measure the fastest of these numbers of threads, sizes of batches and runtimes of the policy."""
    rates = {}
    for threads, batch, runtime in settings:
        envs, loop = loop_of(threads, batch)
        with closing(envs):
            rates[threads, batch, runtime] = rate_of(loop(forward_of(envs, job, runtime)))
    threads, batch, runtime = max(rates, key=lambda setting: rates[setting])
    print({f"{t} threads, batch {b}, {r}": round(rate) for (t, b, r), rate in rates.items()}, file=sys.stderr)
    envs, loop = loop_of(threads, batch)
    with closing(envs):
        return warm_and_count(loop(forward_of(envs, job, runtime)), job)


def rate_of(advance: Callable[[], int]) -> float:
    advance()
    begin, transitions = time.perf_counter(), 0
    while time.perf_counter() - begin < SWEEP_S:
        transitions += advance()
    return transitions / (time.perf_counter() - begin)


def forward_of(envs: Any, job: Job, runtime: str) -> Callable[[Any], Any]:
    """Return the forward pass of the policy, in torch or in ONNX Runtime, each on one thread."""
    torch.set_num_threads(1)
    module = module_for(envs, job).eval()
    if runtime == "torch":

        def forward(obs: Any) -> Any:
            with torch.inference_mode():
                return module(torch.from_numpy(obs).float()).numpy()

        return forward
    from clusterenv import TorchPolicy

    policy: Any = TorchPolicy(module, dist="categorical", runtime="onnx")
    actor = policy.prepare(envs.single_observation_space, envs.single_action_space).recipe.build()
    actor.load(policy.weights())
    return lambda obs: actor.forward(obs, None, None)[0]


def sample(params: Any, random: np.random.Generator) -> tuple[Any, Any]:
    """Return sampled actions and their log-probabilities, as cheaply as numpy can."""
    noise = random.standard_exponential(params.shape, dtype=np.float32)
    actions = (params - np.log(noise)).argmax(axis=1)
    shifted = params - params.max(axis=1, keepdims=True)
    logprobs = shifted[np.arange(len(params)), actions] - np.log(np.exp(shifted).sum(axis=1))
    return actions, logprobs


def recorder(envs: Any, job: Job, rows: int) -> list[Any]:
    """Return arrays for a rollout: observations, actions, log-probabilities, rewards, ends."""
    space = envs.single_observation_space
    shape = (steps_of(job), rows)
    return [np.empty((*shape, *space.shape), space.dtype), *(np.empty(shape, d) for d in ("i8", "f4", "f8", "?"))]


def envpool_loop(envs: Any, batch: int, job: Job) -> tuple[Any, Loop]:
    """A loop over `recv` and `send`; with whole batches that is a lockstep."""

    def loop(forward: Callable[[Any], Any]) -> Callable[[], int]:
        random, arrays = np.random.default_rng(0), recorder(envs, job, batch)
        _ = envs.single_observation_space, envs.action_space
        over = np.zeros(job.num_envs, dtype=np.bool_)
        envs.async_reset()
        obs, *_, infos = envs.recv()
        ids = infos["env_id"]

        def rollout() -> int:
            nonlocal obs, ids
            counted = 0
            for t in range(steps_of(job) * (job.num_envs // batch)):
                actions, logprobs = sample(forward(obs), random)
                row = t % steps_of(job)
                arrays[0][row], arrays[1][row], arrays[2][row] = obs, actions, logprobs
                envs.send(actions, ids)
                obs, rewards, ends, cuts, infos = envs.recv()
                ids = infos["env_id"]
                counted += len(ids) - int(np.count_nonzero(over[ids]))
                over[ids] = ended = ends | cuts
                arrays[3][row], arrays[4][row] = rewards, ended
            return counted

        return rollout

    return envs, loop


def same_step_loop(envs: Any, job: Job) -> tuple[Any, Loop]:
    def loop(forward: Callable[[Any], Any]) -> Callable[[], int]:
        random, arrays = np.random.default_rng(0), recorder(envs, job, job.num_envs)
        obs, _ = envs.reset(seed=np.arange(job.num_envs))

        def rollout() -> int:
            nonlocal obs
            for t in range(steps_of(job)):
                actions, logprobs = sample(forward(obs), random)
                arrays[0][t], arrays[1][t], arrays[2][t] = obs, actions, logprobs
                obs, rewards, ends, cuts, _ = envs.step(actions)
                arrays[3][t], arrays[4][t] = rewards, ends | cuts
            return steps_of(job) * job.num_envs

        return rollout

    return envs, loop


# -- peers ------------------------------------------------------------------------------------------------------


def torchrl_envpool(job: Job) -> list[Window]:
    """TorchRL over its own EnvPool wrapper, with a thread per worker."""
    import gymnasium

    # The wrapper looks for spaces of the package gym, while EnvPool has those of gymnasium.
    sys.modules.setdefault("gym", gymnasium)
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import MultiThreadedEnv
    from torchrl.modules import ProbabilisticActor

    envs = MultiThreadedEnv(
        num_workers=job.num_envs, env_name=job.env_id, create_env_kwargs={"num_threads": job.workers}
    )
    torch.set_num_threads(1)
    with closing(gymnasium.make(job.env_id)) as env:
        actor = Agent(env.observation_space, env.action_space).actor
    policy = ProbabilisticActor(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    collector = Collector(envs, policy, frames_per_batch=steps_of(job) * job.num_envs, total_frames=-1)
    try:
        batches = iter(collector)
        return warm_and_count(lambda: next(batches).numel(), job)
    finally:
        collector.shutdown()


SIMULATORS: dict[str, Subject] = {
    "collect-envpool": partial(collect, simulator="envpool"),
    "collect-envpool-network": partial(collect, simulator="envpool", network=True),
    "collect-atari": partial(collect, simulator="native"),
    "bare-envpool": bare_envpool,
    "bare-atari": bare_atari,
    "torchrl-envpool": torchrl_envpool,
}

if __name__ == "__main__":
    main(SIMULATORS)
