"""Collectors over vector environments: rollouts equal those over the same environments one by one."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

import clusterenv as ce
from clusterenv.learning import gae
from clusterenv.spec import Vector
from rollouts import assert_equal

MODES = list(AutoresetMode)
ACTIONS = 3


class Counting(gym.Env):
    """Episodes whose length follows from the seed; observations, rewards, infos and masks from the step.

    `fault`: what happens once in the 17th step of slot 1 ("kill", "raise", "nan"), which then creates `marker`.
    """

    action_space = spaces.Discrete(ACTIONS)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, slot: int = 0, fault: str | None = None, marker: str | None = None) -> None:
        self.observation_space = spaces.Dict({"x": spaces.Box(-1e6, 1e6, (2,), np.float32), "n": spaces.Discrete(1000)})
        self.slot, self.fault, self.marker = slot, fault, marker
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(2, 9))
        return self._obs(), self._info()

    def step(self, action):
        self.t += 1
        self.steps += 1
        fault = None
        if self.fault and self.slot == 1 and self.steps == 17 and not Path(self.marker).exists():
            Path(self.marker).touch()
            fault = self.fault
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise RuntimeError("as planned")
        obs = self._obs()
        if fault == "nan":
            obs["x"][0] = np.nan
        is_odd = self.length % 2 == 1
        over = self.t >= self.length
        return obs, float(self.t * 10 + action), over and is_odd, over and not is_odd, self._info()

    def render(self):
        return np.full((2, 2, 3), self.t, np.uint8)

    def _obs(self):
        return {"x": np.array([self.t, self.length], np.float32), "n": np.int64(self.t)}

    def _info(self):
        allowed = np.ones(ACTIONS, dtype=np.bool_)
        allowed[self.t % ACTIONS] = False
        return {"mask": allowed, "left": self.length - self.t} if self.t % 2 == 0 else {"mask": allowed}


class NextStep(VectorEnv):
    """A NEXT_STEP vector environment that cannot reset some of its environments."""

    def __init__(self, envs: list[Any]) -> None:
        self._sync = SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=AutoresetMode.NEXT_STEP)
        self.num_envs = len(envs)
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = None

    def reset(self, *, seed=None, options=None):
        assert "reset_mask" not in (options or {})
        return self._sync.reset(seed=seed)

    def step(self, actions):
        return self._sync.step(actions)


def policy(**kwargs: Any) -> ce.NumpyPolicy:
    def forward(weights: Any, obs: Any) -> Any:
        return np.stack([obs["x"][:, 0], obs["n"] % 3, obs["x"][:, 1]], axis=1) * weights["w"]

    return ce.NumpyPolicy(forward, {"w": np.full(1, 0.2, np.float32)}, **kwargs)


def one_by_one(num_envs: int, **kwargs: Any) -> list[Any]:
    return [functools.partial(Counting, slot, **kwargs) for slot in range(num_envs)]


def vector(mode: AutoresetMode, **kwargs: Any) -> Vector:
    """Make the same environments as `one_by_one`: all slots of one worker, from slot 0 or from slot 3 on."""

    def make(num_envs: int, seeds: list[int]) -> Any:
        envs = [functools.partial(Counting, slot, **kwargs) for slot in range(num_envs)]
        return SyncVectorEnv(envs, autoreset_mode=mode)

    return Vector(make)


def collect(env: Any, agent: Any, rollouts: int = 4, backend: Any = None, **kwargs: Any) -> list[Any]:
    recovery = ce.Recovery(backoff_s=(0.0, 0.0))
    with ce.ClusterEnv(env, num_envs=3, backend=backend or ce.Local(workers=1), recovery=recovery) as envs:
        collector = envs.collector(agent, seed=5, **kwargs)
        return [collector.rollout(11) for _ in range(rollouts)]


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_equal_those_of_the_same_environments_one_by_one(mode: AutoresetMode) -> None:
    options = {"info_keys": ["left"]}
    agent = policy(action_mask="mask")
    expected, found = collect(one_by_one(3), agent, **options), collect(vector(mode), agent, **options)
    assert sum(len(batch.episodes) for batch in expected) > 10
    for left, right in zip(expected, found, strict=True):
        assert_equal(left, right)
        assert np.array_equal(left.action_masks, right.action_masks)
        assert right.valid.all()


@pytest.mark.parametrize("on_loss", ["rerun", "mask"])
@pytest.mark.parametrize("mode", MODES)
def test_rollouts_equal_those_one_by_one_if_the_worker_is_killed_in_between(
    mode: AutoresetMode, on_loss: str, tmp_path: Path
) -> None:
    fault = {"fault": "kill", "marker": str(tmp_path / "one")}
    expected = collect(one_by_one(3, **fault), policy(), on_loss=on_loss)
    found = collect(vector(mode, **{**fault, "marker": str(tmp_path / "vector")}), policy(), on_loss=on_loss)
    assert expected[-1].incarnations.tolist() == [1, 1, 1]
    for left, right in zip(expected, found, strict=True):
        assert np.array_equal(left.valid, right.valid)
        if left.valid.all():  # the observations of a lost fragment are whatever its worker had written
            assert_equal(left, right)


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_environment_that_raises_loses_the_rest_of_its_fragment(mode: AutoresetMode, tmp_path: Path) -> None:
    batches = collect(vector(mode, fault="raise", marker=str(tmp_path / "marker")), policy(), rollouts=3)
    first = batches[1]
    lost_at = first.valid.sum(axis=0)
    assert lost_at.tolist() == [5, 5, 5]
    for column, t in enumerate(lost_at.tolist()):
        assert not first.valid[t:, column].any() and not first.rewards[t:, column].any()
        assert first.truncations[t, column] and not first.truncations[t + 1 :, column].any()
        assert not first.terminations[t:, column].any()
    assert batches[2].incarnations.tolist() == [1, 1, 1]
    assert batches[2].valid.all() and batches[2].episode_starts[0].all()


@pytest.mark.parametrize("survives", [True, False])
def test_a_value_that_is_not_finite_loses_its_column_and_ends_the_others(tmp_path: Path, survives: bool) -> None:
    agent = policy()
    if survives:  # then it is noticed at the end of the fragment
        forward = agent.forward
        agent.forward = lambda weights, obs: np.nan_to_num(forward(weights, obs))
    env = vector(AutoresetMode.SAME_STEP, fault="nan", marker=str(tmp_path / "marker"))
    batch = collect(env, agent, rollouts=2)[1]
    last = 10 if survives else 6  # the policy fails in the row after the value
    assert batch.valid.sum(axis=0).tolist() == [last + survives, 5, last + survives]
    assert (batch.truncations | batch.terminations)[last, [0, 2]].all()
    assert {(last, 0), (5, 1), (last, 2)} <= {tuple(at) for at in batch.final_at.tolist()}
    assert np.isfinite(batch.obs["x"]).all() and np.isfinite(batch.final_obs["x"]).all()


def test_without_a_reset_of_some_slots_each_reset_leaves_a_row_at_the_end_of_its_column() -> None:
    """NEXT_STEP, all slots in lockstep: nothing that happened is left out, and no row is a reset."""

    def make(num_envs: int, seeds: list[int]) -> Any:
        return NextStep([Counting(slot) for slot in range(num_envs)])

    batches = collect(Vector(make), policy(), rollouts=6)
    expected = collect(one_by_one(3), policy(), rollouts=6)
    for column in range(3):
        found_t = np.concatenate([b.rewards[b.valid[:, column], column] for b in batches])
        all_t = np.concatenate([b.rewards[:, column] for b in expected])
        starts = np.concatenate([b.episode_starts[b.valid[:, column], column] for b in batches])
        every_start = np.concatenate([b.episode_starts[:, column] for b in expected])
        assert len(found_t) < len(all_t)
        # Actions differ where a fragment is shorter (random numbers belong to its rows), steps and episodes do not.
        assert (found_t // 10).tolist() == (all_t // 10)[: len(found_t)].tolist()
        assert starts.tolist() == every_start[: len(found_t)].tolist()
    for batch in batches:
        ended = batch.terminations | batch.truncations
        assert not (ended & ~batch.valid).any()
        assert {tuple(at) for at in batch.final_at.tolist()} == {tuple(at) for at in np.argwhere(ended).tolist()}
        assert (batch.valid[1:] <= batch.valid[:-1]).all()
        advantages = gae(batch, lambda obs: obs["x"][:, 0])
        assert (advantages.advantages[~batch.valid] == 0).all()


def test_streams_and_networks_give_the_same_rows() -> None:
    backend = ce.Loopback(nodes=1, workers_per_node=1)
    local = collect(vector(AutoresetMode.SAME_STEP), policy())
    for left, right in zip(local, collect(vector(AutoresetMode.SAME_STEP), policy(), backend=backend), strict=True):
        assert_equal(left, right)
    with ce.ClusterEnv(vector(AutoresetMode.SAME_STEP), num_envs=3, backend=ce.Local(workers=1)) as envs:
        stream = envs.collector(policy(), seed=5).stream(11, queue=2)
        for left in local:
            assert_equal(left, next(stream))
        stream.close()


class Tensors(SyncVectorEnv):
    """A vector environment whose observations, rewards and flags are tensors."""

    def reset(self, *, seed=None, options=None):
        obs, infos = super().reset(seed=seed, options=options)
        return {key: torch.from_numpy(value) for key, value in obs.items()}, infos

    def step(self, actions):
        obs, *values, infos = super().step(actions)
        tensors = [torch.from_numpy(np.array(value)) for value in values]
        return {key: torch.from_numpy(value) for key, value in obs.items()}, *tensors, infos


def test_tensors_become_arrays() -> None:
    def make(num_envs: int, seeds: list[int]) -> Any:
        envs = [functools.partial(Counting, slot) for slot in range(num_envs)]
        return Tensors(envs, autoreset_mode=AutoresetMode.SAME_STEP)

    for left, right in zip(collect(one_by_one(3), policy()), collect(Vector(make), policy()), strict=True):
        assert_equal(left, right)
    with ce.ClusterEnv(Vector(make), num_envs=3, backend=ce.Local(workers=1)) as envs:
        envs.reset(seed=1)
        obs, rewards, terminations, _, _ = envs.step(np.zeros(3, dtype=np.int64))
        assert obs["x"][:, 0].tolist() == [1, 1, 1] and rewards.tolist() == [10, 10, 10]
        assert terminations.dtype == np.bool_
        assert envs.collector(policy(), seed=5).evaluate(episodes=4).lengths.min() >= 2


@pytest.mark.parametrize("mode", MODES)
def test_evaluations_equal_those_one_by_one(mode: AutoresetMode) -> None:
    def evaluate(env: Any, workers: int) -> Any:
        with ce.ClusterEnv(env, num_envs=4, backend=ce.Local(workers=workers)) as envs:
            collector = envs.collector(policy(), seed=5)
            return [collector.evaluate(episodes=7, deterministic=d, record=2) for d in (True, False)]

    for left, right in zip(evaluate(one_by_one(4), 2), evaluate(vector(mode), 1), strict=True):
        assert left.lengths.tolist() == right.lengths.tolist()
        assert left.returns.tolist() == right.returns.tolist()
        np.testing.assert_equal(right.infos, left.infos)
        assert len(left.infos) == 7 and all(left.infos)


class Masked(gym.Env):
    """Only action 1 is allowed. Episodes have different lengths."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(3)
    taken: ClassVar[list[int]] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 9))
        return np.zeros(1, np.float32), {"action_mask": np.array([0, 1, 0], np.int8)}

    def step(self, action):
        Masked.taken.append(int(action))
        self.left -= 1
        return np.zeros(1, np.float32), 0.0, self.left <= 0, False, {"action_mask": np.array([0, 1, 0], np.int8)}


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_evaluations_use_the_action_masks_of_running_episodes(mode: AutoresetMode) -> None:
    forward, weights = (lambda w, obs: obs @ w["w"]), {"w": np.zeros((1, 3), np.float32)}
    agent = ce.NumpyPolicy(forward, weights, dist="categorical", action_mask="action_mask")
    env = Vector(lambda n, seeds: SyncVectorEnv([Masked] * n, autoreset_mode=mode))
    with ce.ClusterEnv(env, 4, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(agent, seed=1)
        Masked.taken.clear()
        collector.evaluate(episodes=8, deterministic=False)
    assert set(Masked.taken) == {1}


def test_recorded_episodes_of_a_vector_environment_have_their_frames() -> None:
    def make(num_envs: int, seeds: list[int]) -> Any:
        return SyncVectorEnv([Counting] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    with ce.ClusterEnv(Vector(make), num_envs=3, backend=ce.Local(workers=1)) as envs:
        found = envs.collector(policy(), seed=5).evaluate(episodes=5, record=2)
        assert [len(frames) for frames in found.frames] == found.lengths[:2].tolist()
        assert [int(frame[0, 0, 0]) for frame in found.frames[0]] == list(range(found.lengths[0]))


def test_step_with_an_agent_equals_that_of_environments_one_by_one() -> None:
    def play(env: Any) -> list[Any]:
        kwargs = {"autoreset_mode": None if isinstance(env, Vector) else "SameStep"}
        with ce.ClusterEnv(env, num_envs=3, backend=ce.Local(workers=1), **kwargs) as envs:
            envs.reset(seed=5)
            agent = policy()
            return [envs.step(agent) for _ in range(20)]

    rows = zip(play(one_by_one(3)), play(vector(AutoresetMode.SAME_STEP)), strict=True)
    for (_, rewards, ends, cuts, _), (_, others, other_ends, other_cuts, infos) in rows:
        assert ends.tolist() == other_ends.tolist() and cuts.tolist() == other_cuts.tolist()
        assert (rewards // 10).tolist() == (others // 10).tolist()
        assert infos["action"].tolist() == (others % 10).tolist()


def test_a_same_step_vector_environment_without_final_observations_is_named() -> None:
    class Forgets(SyncVectorEnv):
        def step(self, actions):
            *result, infos = super().step(actions)
            return *result, {key: value for key, value in infos.items() if "final_obs" not in key}

    def make(num_envs: int, seeds: list[int]) -> Any:
        return Forgets([Counting] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    with ce.ClusterEnv(Vector(make), num_envs=3, backend=ce.Local(workers=1)) as envs:
        collector = envs.collector(policy(), seed=5)
        collector.rollout(1)
        collector.rollout(11)
        assert any("final_obs" in event.reason for event in envs.events() if event.kind == "env_error")
