"""Cases of lost workers beside rollouts and interrupted calls that simulated runs have found, each on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import clusterenv as ce
from clusterenv.errors import DeadlineError, UsageError, WorkerLostError
from clusterenv.wire.requests import RunFragment
from simulation.environment import SimulatedEnv
from simulation.ledger import logits
from simulation.schedule import opened, step_interrupted

ZEROS = np.zeros(2, np.int64)


def policy() -> Any:
    return ce.NumpyPolicy(lambda w, obs: logits(float(w["w"][0]), obs), {"w": np.ones(1, np.float32)})


def kill_before_its_fragment(executor: Any, worker: int) -> None:
    """End this worker's process when it would begin its next fragment."""
    run = executor.run

    def kill_or_run(index: int) -> None:
        inbox = executor.by_index[index].inbox
        if index == worker and inbox and isinstance(inbox[0], RunFragment):
            executor.run = run
            executor.kill(index)
        else:
            run(index)

    executor.run = kill_or_run


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_rollout_that_does_not_wait_for_a_lost_worker_reports_the_loss(mode: AutoresetMode) -> None:
    with opened(2, 2, mode) as (_, envs):
        collector = envs.collector(policy(), seed=1)
        collector.rollout(1)
        kill_before_its_fragment(envs._driver.executor, 0)
        batch = collector.rollout(1, deadline_s=0.0)
        assert batch.valid[0].tolist() == [False, True]
        assert batch.truncations[0, 0], "a step may follow, with the first row of another episode"


def test_the_loss_of_a_late_fragment_is_reported_by_the_next_rollout() -> None:
    with opened(2, 2) as (world, envs):
        collector = envs.collector(policy(), seed=1)
        collector.rollout(1)
        hangs = iter([True])
        world.planned = lambda fault: fault == "hang" and world.at == (0, "step") and next(hangs, False)
        batch = collector.rollout(1, deadline_s=0.5)
        assert not batch.valid[0, 0] and not batch.truncations[0, 0], "it is late"
        envs._driver.executor.kill(0)
        collector.evaluate(episodes=2)  # its environments are made again meanwhile
        with pytest.raises(UsageError, match="rollout"):
            envs.step(ZEROS)
        assert collector.rollout(1).truncations[0, 0]


def test_the_final_observation_of_a_lost_episode_is_the_last_that_was_delivered() -> None:
    with opened(2, 2, AutoresetMode.SAME_STEP, ce.Recovery(backoff_s=(20.0, 20.0))) as (world, envs):
        envs.reset()
        obs, *_ = envs.step(ZEROS)
        executor = envs._driver.executor
        executor.kill(0)
        kill_before_its_fragment(executor, 0)  # which would begin with the first row of a new episode
        with pytest.raises(DeadlineError):  # the fragment of the other worker alone is not enough
            next(envs.collector(policy(), seed=1).stream(1, min_envs=2, timeout_s=1.5))
        failures = iter([True])
        world.planned = lambda fault: fault == "raise" and world.at == (0, "reset") and next(failures, False)
        *_, infos = envs.step(ZEROS)  # its environment fails once more while it is rebuilt, so the row reports a loss
        assert not infos["transition_valid"][0]
        assert infos["final_obs"][0].tolist() == obs[0].tolist()


def test_a_reset_of_some_slots_after_an_interrupted_step_is_refused() -> None:
    with opened(2, 1) as (_, envs):
        envs.reset()
        step_interrupted(envs)
        envs.call_async("identify")  # does not change that the rows of the step are unknown
        some = np.array([True, False])
        with pytest.raises(UsageError, match="leave reset_mask out"):
            envs.reset(options={"reset_mask": some})
        envs.reset(options={"reset_mask": np.array([True, True])})
        envs.step(ZEROS)
        envs.reset(options={"reset_mask": some})


def test_a_row_that_an_exception_replaces_leaves_no_infos_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SimulatedEnv.step
    monkeypatch.setattr(SimulatedEnv, "step", lambda self, action: (*step(self, action)[:4], {"number": self.last}))
    with opened(2, 1, AutoresetMode.NEXT_STEP, ce.Recovery(backoff_s=(1.0, 1.0))) as (world, envs):
        envs.reset()
        failures = iter([False, True])
        world.planned = lambda fault: fault == "raise" and world.at == (0, "step") and next(failures, False)
        for _ in range(2):
            envs.send(ZEROS[:1], [0])
            envs.recv(1)
        executor = envs._driver.executor
        run = executor.run

        def run_and_kill(index: int) -> None:
            process = executor.by_index[index]
            if len(process.inbox) > 1:  # slot 0 is to be rebuilt after the first step of slot 1
                executor.run = run
                run(index)
                process.end("was killed by SIGSEGV")

        executor.run = run_and_kill
        envs.send(ZEROS, [0, 1])
        with pytest.raises(WorkerLostError, match="before its first successful step"):
            envs.recv(2)
        envs.send(ZEROS[1:], [1])
        obs, *_, infos = envs.recv(2)
        assert infos["slot"].tolist() == [0, 1]
        assert "number" not in infos or infos["number"][1] == obs[1, 0]
