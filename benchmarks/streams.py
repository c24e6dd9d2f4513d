"""Measure streaming once: `PYTHONPATH=. python benchmarks/streams.py SUBJECT ENV_ID --seconds S`.

Two comparisons within this project. First, a learner that takes as long as collecting: in turn with collecting
(`rollout-learn`), or while the worker continues (`stream-learn`). Second, workers of which one is five times slower:
the rate of a stream (`stream-uneven`) against the sum of each worker's rate alone (`stream-alone`).
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import clusterenv as ce
from benchmarks.collectors import ROLLOUT_STEPS, Agent
from benchmarks.subjects import Job, Subject, Window, cluster, count, main, make, warm_and_count

SHORT_STEPS = 16
STEP_S = 1e-3
SLOWER_BY = 5


class Work:
    """Runs gradient steps that take as long as the rollout did, calibrated while nothing else runs."""

    def __init__(self, agent: Agent, batch: ce.Rollout, seconds: float) -> None:
        torch.set_num_threads(1)
        self._agent = agent
        self._optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
        begin = time.thread_time()
        for _ in range(20):
            self._step(batch)
        self._repeats = max(1, round(20 * seconds / (time.thread_time() - begin)))

    def __call__(self, batch: ce.Rollout) -> int:
        for _ in range(self._repeats):
            self._step(batch)
        return int(np.count_nonzero(batch.valid))

    def _step(self, batch: ce.Rollout) -> None:
        obs = torch.from_numpy(batch.obs[:16].reshape(-1, batch.obs.shape[-1]))
        actions = torch.from_numpy(batch.actions[:16].reshape(-1))
        _, logprob, entropy, value = self._agent.get_action_and_value(obs, actions)
        loss = (logprob + entropy + value.squeeze(-1)).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def learn(job: Job, streaming: bool) -> list[Window]:
    with closing(cluster(job, job.env_id)) as envs:
        agent = Agent(envs.single_observation_space, envs.single_action_space)
        collector = envs.collector(agent)
        for _ in range(3):
            begin = time.perf_counter()
            batch = collector.rollout(ROLLOUT_STEPS)
            seconds = time.perf_counter() - begin
        work = Work(agent, batch, seconds)
        if not streaming:
            return warm_and_count(lambda: work(collector.rollout(ROLLOUT_STEPS)), job)
        with closing(collector.stream(ROLLOUT_STEPS)) as batches:
            return warm_and_count(lambda: work(next(batches)), job)


class Napping(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps before each step: time passes, and no core is needed."""

    def __init__(self, env: gym.Env[Any, Any], nap_s: float) -> None:
        super().__init__(env)
        self._nap_s = nap_s

    def step(self, action: Any) -> Any:
        time.sleep(self._nap_s)
        return self.env.step(action)


def napping(env_id: str, nap_s: float) -> gym.Env[Any, Any]:
    return Napping(make(env_id), nap_s)


def uneven(job: Job, workers: list[int]) -> list[Window]:
    """Measure a stream of these workers; worker 0 is slow."""
    share = job.num_envs // job.workers
    naps = [STEP_S * SLOWER_BY if worker == 0 else STEP_S for worker in workers for _ in range(share)]
    thunks = [partial(napping, job.env_id, nap_s) for nap_s in naps]
    with closing(ce.ClusterEnv(thunks, backend=ce.Local(workers=len(workers)))) as envs:
        collector = envs.collector(Agent(envs.single_observation_space, envs.single_action_space))
        collector.rollout(SHORT_STEPS)  # so that all workers have imported torch
        with closing(collector.stream(SHORT_STEPS)) as batches:

            def advance() -> int:
                return int(np.count_nonzero(next(batches).valid))

            count(advance, job.warmup_s)
            return [count(advance, job.seconds)]


def stream_alone(job: Job) -> list[Window]:
    return [window for worker in range(job.workers) for window in uneven(job, [worker])]


STREAMS: dict[str, Subject] = {
    "rollout-learn": partial(learn, streaming=False),
    "stream-learn": partial(learn, streaming=True),
    "stream-uneven": lambda job: uneven(job, list(range(job.workers))),
    "stream-alone": stream_alone,
}

if __name__ == "__main__":
    main(STREAMS)
