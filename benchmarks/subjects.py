"""Measure one subject once: `PYTHONPATH=. python benchmarks/subjects.py SUBJECT ENV_ID --seconds S`.

Enters: a subject, an environment id and a size, by the command line. Leaves: one line of JSON on stdout. The runner
starts this file with the interpreter of the peer's own virtual environment, so peers are imported where they are used,
and the project only by its own subjects. Only true transitions count: reset rows of a NEXT_STEP autoreset are left out,
for every subject.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

BEGIN = time.perf_counter()
ACTION_ROWS = 1000
START_TIMEOUT_S = 60


@dataclass(frozen=True)
class Job:
    env_id: str
    num_envs: int
    workers: int
    seconds: float
    warmup_s: float
    in_turns: bool = False
    """Measure only when a line on stdin asks for it, so that two subjects can take turns."""


class Window(NamedTuple):
    """The transitions that one process counted while the clock ran."""

    transitions: int
    elapsed_s: float
    begin: float = 0.0
    """End of the warm-up, by `time.perf_counter`."""


Advance = Callable[[], int]
"""Advances the environments, and returns the number of true transitions."""

Subject = Callable[[Job], list[Window]]
"""One window for each process that counted; their rates add up."""


def make(env_id: str) -> gym.Env[Any, Any]:
    register(env_id)
    return gym.make(env_id, disable_env_checker=True)


def register(env_id: str) -> None:
    if env_id.startswith("bench/"):
        importlib.import_module("benchmarks.synthetic")


def makers(job: Job, count: int) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [partial(make, job.env_id)] * count


def draw_actions(space: gym.Space[Any], num_envs: int) -> np.ndarray:  # [ACTION_ROWS, num_envs]
    """Return random actions, drawn before the clock starts, the same for every subject."""
    if not isinstance(space, gym.spaces.Discrete):
        raise TypeError(f"{space}: only Discrete actions are drawn here")
    return np.random.default_rng(0).integers(space.n, size=(ACTION_ROWS, num_envs), dtype=space.dtype)


def count(advance: Advance, seconds: float) -> Window:
    transitions = 0
    begin = time.perf_counter()
    until = begin + seconds
    while (now := time.perf_counter()) < until:
        transitions += advance()
    return Window(transitions, now - begin, begin)


def warm_and_count(advance: Advance, job: Job) -> list[Window]:
    count(advance, job.warmup_s)
    if not job.in_turns:
        return [count(advance, job.seconds)]
    begin, windows = time.perf_counter(), []
    print("ready", flush=True)
    for _ in sys.stdin:
        windows.append(count(advance, job.seconds))
        print("done", flush=True)
    return [Window(sum(w.transitions for w in windows), sum(w.elapsed_s for w in windows), begin)]


def lockstep(step: Callable[[np.ndarray], tuple[Any, ...]], actions: np.ndarray) -> Advance:
    """Return a function that steps all environments at once, under NEXT_STEP autoreset: a reset follows each done."""
    rows = itertools.cycle(actions)
    was_done = np.zeros(actions.shape[1], bool)

    def advance() -> int:
        nonlocal was_done
        _, _, terminations, truncations, _ = step(next(rows))
        counted = len(was_done) - int(np.count_nonzero(was_done))
        was_done = terminations | truncations
        return counted

    return advance


def limit(job: Job) -> list[Window]:
    """Measure the limit of the cores: one process each, a bare loop over its share, nothing recorded or sent."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(job.workers)
    receivers = []
    for share in shares(job):
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=bare_loop, args=(job, share, barrier, sender), daemon=True).start()
        sender.close()  # so that a child's death raises EOFError here instead of blocking for ever
        receivers.append(receiver)
    return [receiver.recv() for receiver in receivers]


def shares(job: Job) -> list[slice]:
    bounds = np.linspace(0, job.num_envs, job.workers + 1).astype(int)
    return [slice(int(start), int(stop)) for start, stop in itertools.pairwise(bounds)]


def bare_loop(job: Job, share: slice, barrier: Any, sender: Any) -> None:
    envs = [make(job.env_id) for _ in range(share.start, share.stop)]
    for seed, env in enumerate(envs, start=share.start):
        env.reset(seed=seed)
    steps = [env.step for env in envs]
    resets = [env.reset for env in envs]
    # Lists of numpy scalars, as a space would sample, without the cost of indexing an array in the loop.
    rows = itertools.cycle([list(row) for row in draw_actions(envs[0].action_space, job.num_envs)[:, share]])

    def sweep() -> int:
        for step, reset, action in zip(steps, resets, next(rows), strict=True):
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                reset()
        return len(envs)

    count(sweep, job.warmup_s)
    barrier.wait(START_TIMEOUT_S)
    sender.send(count(sweep, job.seconds))


def gymnasium_vector(job: Job, envs: gym.vector.VectorEnv[Any, Any, Any]) -> list[Window]:
    with closing(envs):
        envs.reset(seed=0)
        return warm_and_count(lockstep(envs.step, draw_actions(envs.single_action_space, job.num_envs)), job)


def sync_vector(job: Job) -> list[Window]:
    return gymnasium_vector(job, SyncVectorEnv(makers(job, job.num_envs)))


def async_vector(job: Job) -> list[Window]:
    return gymnasium_vector(job, AsyncVectorEnv(makers(job, job.num_envs), shared_memory=True))


def cluster(job: Job, env: Any, network: bool = False) -> Any:
    """Make a `ClusterEnv`; over a network: with a node agent per worker, on loopback, encrypted as always."""
    import clusterenv

    if not network:
        backend: Any = clusterenv.Local(workers=job.workers)
    elif hasattr(clusterenv, "Loopback"):
        backend = clusterenv.Loopback(nodes=job.workers)
    else:  # 0.1, which `benchmarks.versus` measures too
        older: Any = clusterenv.Local
        backend = older(workers=job.workers, network=True, nodes=job.workers)
    return clusterenv.ClusterEnv(env, num_envs=job.num_envs, backend=backend)


def clusterenv_step(job: Job) -> list[Window]:
    register(job.env_id)
    return gymnasium_vector(job, cluster(job, job.env_id))


def clusterenv_network(job: Job) -> list[Window]:
    return gymnasium_vector(job, cluster(job, job.env_id, network=True))


def clusterenv_recv(job: Job) -> list[Window]:
    """Step environments as they become ready, as soon as a quarter of them is."""
    register(job.env_id)
    with closing(cluster(job, job.env_id)) as envs:
        actions = draw_actions(envs.single_action_space, job.num_envs)
        rows = itertools.cycle(actions)
        was_done = np.zeros(job.num_envs, bool)

        def advance() -> int:
            _, _, terminations, truncations, infos = envs.recv(min_envs=max(1, job.num_envs // 4))
            slots = infos["slot"]
            counted = len(slots) - int(np.count_nonzero(was_done[slots]))
            was_done[slots] = terminations | truncations
            envs.send(next(rows)[slots], slots)
            return counted

        envs.reset(seed=0)
        envs.send(actions[0])
        return warm_and_count(advance, job)


def clusterenv_envpool(job: Job) -> list[Window]:
    from clusterenv.integrations.envpool import envpool

    return gymnasium_vector(job, cluster(job, envpool(job.env_id)))


def envpool_alone(job: Job) -> list[Window]:
    import envpool

    envs = envpool.make_gymnasium(job.env_id, num_envs=job.num_envs, num_threads=job.workers, seed=0)
    with closing(envs):
        envs.reset()  # seeds are fixed by make; reset(seed=...) warns and ignores them
        actions = draw_actions(envs.single_action_space, job.num_envs)
        # EnvPool's C++ side takes int32 and would convert every batch of anything else.
        return warm_and_count(lockstep(envs.step, actions.astype(np.int32)), job)


def subproc(job: Job) -> list[Window]:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # SB3's default (forkserver) imports torch in every process: minutes of start-up, the same speed.
    with closing(SubprocVecEnv(makers(job, job.num_envs), start_method="fork")) as envs:
        envs.seed(0)
        envs.reset()
        rows = itertools.cycle(draw_actions(envs.action_space, job.num_envs))

        def advance() -> int:
            envs.step(next(rows))
            return job.num_envs  # resets happen within the step, so every row is a transition

        return warm_and_count(advance, job)


@contextmanager
def ray_running(job: Job) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster of one machine with a CPU per worker."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray authenticates by default; without a token in the environment it writes one into the home directory.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    ray.init(num_cpus=job.workers, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        yield ray
    finally:
        ray.shutdown()


def ray_actors(job: Job) -> list[Window]:
    """Step one actor per worker, with a SyncVectorEnv in each; the head joins their results."""

    class Share:
        def __init__(self, size: int, first_seed: int) -> None:
            self.envs = SyncVectorEnv(makers(job, size))
            self.envs.reset(seed=first_seed)

        def step(self, actions: np.ndarray) -> tuple[Any, ...]:
            return self.envs.step(actions)

    with ray_running(job) as ray:
        parts = shares(job)
        actors = [ray.remote(Share).options(num_cpus=1).remote(p.stop - p.start, p.start) for p in parts]

        def step(actions: np.ndarray) -> tuple[Any, ...]:
            pending = [actor.step.remote(actions[part]) for actor, part in zip(actors, parts, strict=True)]
            *arrays, infos = zip(*ray.get(pending), strict=True)
            return *(np.concatenate(array) for array in arrays), infos

        with closing(make(job.env_id)) as env:
            actions = draw_actions(env.action_space, job.num_envs)
        return warm_and_count(lockstep(step, actions), job)


SUBJECTS: dict[str, Subject] = {
    "limit": limit,
    "clusterenv": clusterenv_step,
    "clusterenv-network": clusterenv_network,
    "clusterenv-recv": clusterenv_recv,
    "clusterenv-envpool": clusterenv_envpool,
    "sync": sync_vector,
    "async": async_vector,
    "subproc": subproc,
    "ray": ray_actors,
    "envpool": envpool_alone,
}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the measured packages that this process has loaded."""
    known = ("clusterenv", "envpool", "gymnasium", "numpy", "ray", "stable_baselines3", "torch", "torchrl")
    loaded = {name: importlib.metadata.version(name) for name in known if name in sys.modules}
    return {"python": platform.python_version(), **loaded}


def main(subjects: dict[str, Subject]) -> None:
    parser = argparse.ArgumentParser(description="Measure one subject once; the result is the last line on stdout.")
    parser.add_argument("subject", choices=subjects)
    parser.add_argument("env_id")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warmup", type=float, default=0.5, dest="warmup_s")
    parser.add_argument("--in-turns", action="store_true", help="measure once for each line on stdin")
    args = parser.parse_args()
    job = Job(args.env_id, args.num_envs, args.workers, args.seconds, args.warmup_s, args.in_turns)
    windows = subjects[args.subject](job)
    rate = sum(window.transitions / window.elapsed_s for window in windows)
    outcome = {
        "steps_per_s": rate,
        "start_s": min(window.begin for window in windows) - BEGIN - job.warmup_s,
        "head_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "windows": windows,
        "versions": versions(),
    }
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(SUBJECTS)
