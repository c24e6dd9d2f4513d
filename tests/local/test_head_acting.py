"""`collector(act="head")`: the policy acts in the script's process, and rollouts are those that workers collect."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv as ce
from clusterenv.engine.collecting.placement import Placement
from clusterenv.errors import PolicyError, UsageError
from clusterenv.policy.acting.torch_head import TorchHeadActor
from clusterenv.spec import Vector
from rollouts import ARRAYS, assert_equal

WEIGHTS = np.array([[0, 0], [0, 1], [0, 2], [0, 1]], np.float32)


def policy() -> ce.NumpyPolicy:
    return ce.NumpyPolicy(lambda w, obs: obs @ w["w"], {"w": WEIGHTS.copy()})


class Fails(gym.Wrapper):
    """CartPole that is killed, or raises, in its 30th step, once: then `marker` exists."""

    def __init__(self, how: str, marker: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.how, self.marker, self.steps = how, Path(marker), 0

    def step(self, action):
        self.steps += 1
        if self.steps == 30 and not self.marker.exists():
            self.marker.touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("as planned")
        return super().step(action)


def collect(env: Any = "CartPole-v1", act: str = "head", rollouts: int = 4, backend: Any = None, **kwargs: Any) -> Any:
    backend = backend or ce.Local(workers=2)
    recovery = ce.Recovery(backoff_s=(0.0, 0.0))
    with ce.ClusterEnv(env, num_envs=6, backend=backend, recovery=recovery, **kwargs) as envs:
        agent = policy()
        collector = envs.collector(agent, seed=4, act=act)
        batches = []
        for i in range(rollouts):
            agent.values = {"w": WEIGHTS * (1 + i)}
            batches.append(collector.rollout(20))
        return batches


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_rollouts_equal_those_that_the_workers_collect(mode: str) -> None:
    expected = collect(act="workers", autoreset_mode=mode)
    assert sum(len(batch.episodes) for batch in expected) > 5
    for left, right in zip(expected, collect(autoreset_mode=mode), strict=True):
        assert_equal(left, right, [name for name in ARRAYS if name != "sequence"])
        assert {receipt.version for receipt in right.receipts} == set(right.versions.ravel().tolist())


def test_rollouts_over_vector_environments_and_a_network_are_the_same() -> None:
    def make(num_envs: int, seeds: list[int]) -> Any:
        return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    expected = collect(act="workers")
    remote = ce.Loopback(nodes=2, workers_per_node=1)
    for found in (collect(Vector(make)), collect(Vector(make), backend=remote), collect(backend=remote)):
        for left, right in zip(expected, found, strict=True):
            assert_equal(left, right, [name for name in ARRAYS if name != "sequence"])


def test_a_next_step_vector_environment_steps_as_a_whole() -> None:
    batches = collect(simulator="vector_entry_point")
    for batch in batches:
        assert (batch.valid[1:] <= batch.valid[:-1]).all() and batch.valid.sum() > 90
        ended = (batch.terminations | batch.truncations) & batch.valid
        assert len(batch.final_at) == ended.sum()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_lost_environment_costs_the_rest_of_its_column(how: str, mode: str, tmp_path: Path) -> None:
    thunks: list[Any] = [functools.partial(gym.make, "CartPole-v1")] * 6
    thunks[4] = functools.partial(Fails, how, str(tmp_path / "marker"))
    batches = collect(thunks, autoreset_mode=mode)
    columns = [3, 4, 5] if how == "kill" else [4]
    batch = batches[1]
    for column in range(6):
        rows = int(batch.valid[:, column].sum())
        assert (rows < 20) == (column in columns), (column, rows)
        assert batch.valid[:rows, column].all()
        if rows < 20:
            assert batch.truncations[rows, column] and not batch.rewards[rows:, column].any()
            assert not batch.terminations[rows:, column].any()
    assert batches[2].valid.all() and batches[3].valid.all()
    assert batches[2].incarnations.tolist() == [int(column in columns) for column in range(6)]
    assert batches[2].episode_starts[0][columns].all()


def test_resets_and_steps_of_the_user_between_rollouts_are_noticed() -> None:
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2)) as envs:
        collector = envs.collector(policy(), seed=4, act="head")
        collector.rollout(5)
        obs, _ = envs.reset(seed=9)
        batch = collector.rollout(5)
        assert np.array_equal(batch.obs[0], obs) and batch.episode_starts[0].all()
        obs, *_ = envs.step(np.ones(4, dtype=np.int64))
        batch = collector.rollout(300)
        assert np.array_equal(batch.obs[0], obs) and not batch.episode_starts[0].any()
        first = {slot: t for t, slot in reversed(list(zip(batch.episodes.t, batch.episodes.slots, strict=True)))}
        for slot in range(4):  # of its first episode only the rest was collected
            ends = np.flatnonzero((batch.terminations | batch.truncations)[:, slot])
            assert first[slot] == ends[1]


def test_a_stream_yields_batches_of_all_environments_with_the_newest_weights() -> None:
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2)) as envs:
        agent = policy()
        collector = envs.collector(agent, seed=4, act="head")
        for i, batch in enumerate(collector.stream(8)):
            assert batch.slots.tolist() == [0, 1, 2, 3] and (batch.versions == i).all()
            if i == 3:
                break
            agent.values = {"w": WEIGHTS * (2 + i)}
            collector.publish()


def test_a_policy_that_fails_is_raised_and_a_reset_goes_on() -> None:
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2)) as envs:
        agent = policy()
        collector = envs.collector(agent, seed=4, act="head")
        collector.rollout(5)
        agent.values = {"w": np.full((4, 2), np.nan, np.float32)}
        with pytest.raises(PolicyError, match="not finite"):
            collector.rollout(5)
        agent.values = {"w": WEIGHTS}
        with pytest.raises(UsageError, match="interrupted"):
            collector.rollout(5)
        envs.reset(seed=1)
        assert collector.rollout(5).valid.all()


def test_a_module_on_its_own_device_acts_with_the_weights_it_has_now() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))

    class OnDevice(ce.TorchPolicy):
        def head_actor(self) -> Any:  # as with a module on a GPU
            return TorchHeadActor(self.module, self._forward, None, self._travels)

    def collect_with(act: str) -> list[Any]:
        torch.manual_seed(1)
        for layer in (module[0], module[2]):
            layer.reset_parameters()
        with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2)) as envs:
            collector = envs.collector(OnDevice(module, dist="categorical", runtime="torch"), seed=4, act=act)
            batches = [collector.rollout(10)]
            with torch.no_grad():
                module[2].bias += torch.tensor([3.0, 0.0])
            return [*batches, collector.rollout(10)]

    for left, right in zip(collect_with("workers"), collect_with("head"), strict=True):
        assert_equal(left, right, ["actions", "versions", "obs"])
        assert np.allclose(left.logprobs, right.logprobs, atol=1e-6)
    assert module.training, "the user's module stays as it is"


def test_auto_measures_both_places_and_then_uses_the_faster_one() -> None:
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2)) as envs:
        collector = envs.collector(policy(), seed=4, act="auto")
        for _ in range(7):
            assert collector.rollout(8).valid.all()
        acts = collector.stats()["acts"]
        assert acts["place"] in ("workers", "head") and acts["reason"].startswith("measured: ")
        before = acts["place"]
        collector.rollout(8)
        assert collector.stats()["acts"]["place"] == before


def test_the_faster_place_is_chosen() -> None:
    for rates, expected in (((100, 20, 50, 60, 50, 60), "head"), ((10, 200, 50, 60, 70, 5), "workers")):
        placement = Placement("auto")
        for rate in rates:
            placement.measured(placement.next, 1000, 1000 / rate)
        assert placement.next == expected


def test_what_does_not_go_with_acting_at_the_head_is_refused() -> None:
    with ce.ClusterEnv("CartPole-v1", num_envs=2, backend=ce.Local(workers=1)) as envs:
        for kwargs in ({"prefetch": True}, {"sync": ce.APS()}):
            with pytest.raises(UsageError, match="does not go with"):
                envs.collector(policy(), act="head", **kwargs)
        with pytest.raises(UsageError, match="deadline_s"):
            envs.collector(policy(), act="head").rollout(4, deadline_s=1.0)
    envs = ce.ClusterEnv("CartPole-v1", num_envs=2, autoreset_mode="Disabled", backend=ce.Local(workers=1))
    with envs, pytest.raises(UsageError, match="reset by themselves"):
        envs.collector(policy(), act="head")
