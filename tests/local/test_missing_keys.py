"""A misspelt `action_mask` or `info_keys` is told when the first episode has ended without it; nothing travels else."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import clusterenv as ce
from clusterenv.engine.fragment_answers import check_missing
from clusterenv.errors import ProtocolError
from clusterenv.testing import Virtual
from clusterenv.wire.channel import encode_plain, plain
from clusterenv.wire.requests import MissingKeys, Reply
from clusterenv.worker.key_watch import KeyWatch, explain


class Masked(gym.Env):
    """Five steps; the infos forbid action 1, which is the one that is rewarded. `when`: which infos have the mask."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, when="always"):
        self.when = when

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(4, np.float32), self._info(self.when in ("always", "reset"))

    def step(self, action):
        self.t += 1
        end = self.t == 5
        info = self._info(self.when == "always" or (self.when == "some" and self.t == 3))
        if end:
            info["is_success"] = True
        return np.zeros(4, np.float32), float(action == 1), end, False, {"speed": 2.0, **info}

    def _info(self, has_mask):
        return {"action_mask": np.array([True, False, True])} if has_mask else {}


def policy(mask: str | None) -> ce.NumpyPolicy:
    weights = {"w": np.zeros((4, 3), np.float32)}
    return ce.NumpyPolicy(lambda w, obs: obs @ w["w"], weights, action_mask=mask)


def told(envs: ce.ClusterEnv) -> list[str]:
    return [event.reason for event in envs.events() if event.kind == "missing_key"]


HERE = ce.Local(workers=0)


@pytest.mark.parametrize(
    "backend",
    [HERE, ce.Local(workers=2), ce.Loopback(nodes=2)],
    ids=["here", "processes", "network"],
)
def test_a_misspelt_key_is_told_once_with_what_was_seen(backend, caplog):
    with ce.ClusterEnv(Masked, 4, backend=backend) as envs:
        collector = envs.collector(policy("action_maks"), info_keys=["speed", "sucess", "is_success"], seed=1)
        collector.rollout(4)
        assert not told(envs), "no episode has ended"
        for _ in range(3):
            collector.rollout(4)
        mask, keys = told(envs)
        assert mask.startswith("action_mask='action_maks': neither the observation nor any info had this")
        assert "'action_mask', 'is_success', 'speed' (did you mean 'action_mask'?)" in mask
        assert keys.startswith(
            "info_keys=['sucess']: no info had this by the end of an episode. Keys of the infos: 'act"
        )
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and "action_maks" in warnings[0], "seen by who looks at no events"


@pytest.mark.parametrize("when", ["always", "reset", "some"])
def test_keys_that_come_are_not_told(when):
    with ce.ClusterEnv(lambda: Masked(when), 2, backend=HERE) as envs:
        collector = envs.collector(policy("action_mask"), info_keys=["is_success", "speed"], seed=1)
        batch = collector.rollout(12)
        assert not told(envs) and batch.infos["_is_success"].sum() == 4
        assert (batch.rewards.sum() == 0) == (when == "always"), "a step without a mask allows every action"


def test_masks_in_the_observation_are_not_looked_for_in_infos():
    class InObs(Masked):
        observation_space = spaces.Dict(x=Masked.observation_space, allowed=spaces.MultiBinary(3))

        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            return {"x": obs, "allowed": np.array([1, 0, 1], np.int8)}, info

        def step(self, action):
            obs, *rest = super().step(action)
            return {"x": obs, "allowed": np.array([1, 0, 1], np.int8)}, *rest

    agent = ce.NumpyPolicy(lambda w, obs: np.zeros((len(obs["x"]), 3)), {}, action_mask="allowed")
    with ce.ClusterEnv(InObs, 2, backend=HERE) as envs:
        assert envs.collector(agent, seed=1).rollout(12).rewards.sum() == 0 and not told(envs)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
def test_one_step_at_a_time(mode):
    for key, count in (("action_maks", 1), ("action_mask", 0)):
        with ce.ClusterEnv(Masked, 2, backend=HERE, autoreset_mode=mode) as envs:
            agent = policy(key)
            envs.reset(seed=0)
            for _ in range(4):
                envs.step(agent)
            assert not told(envs)
            for _ in range(8):
                envs.step(agent)
            assert len(told(envs)) == count


def test_in_a_stream_and_of_each_worker():
    with ce.ClusterEnv(Masked, 4, backend=Virtual(nodes=4)) as envs:
        for number, _ in enumerate(envs.collector(policy("action_maks"), seed=1).stream(6)):
            if number == 8:
                break
        assert len(told(envs)) == 1


@pytest.mark.parametrize("when", ["reset", "some"])
def test_evaluation_goes_on_where_an_info_has_no_mask(when):
    with ce.ClusterEnv(lambda: Masked(when), 2, backend=HERE) as envs:
        evaluation = envs.collector(policy("action_mask"), seed=1).evaluate(episodes=3, deterministic=False)
        assert evaluation.lengths.tolist() == [5, 5, 5]


def test_a_mask_of_the_wrong_length_is_named():
    class Long(Masked):
        def _info(self, has_mask):
            return {"action_mask": np.ones(5, bool)}

    with (
        ce.ClusterEnv(Long, 2, backend=HERE) as envs,
        pytest.raises(ce.PolicyError, match="an action mask has 5 entries, but the policy chooses among 3 actions"),
    ):
        envs.collector(policy("action_mask"), seed=1).rollout(4)


def test_nothing_travels_where_all_keys_come():
    """A fragment's answer has its place for infos anyway: what is missing takes it, and only once."""
    watch = KeyWatch("mask", ["a"])
    watch.was_reset({"mask": 1, "a": 2})
    assert watch, "of a reset, only masks count: its other infos are not brought back"
    watch.stepped({"a": 1})
    assert not watch and watch.episode_ended() is None
    watch = KeyWatch(None, ["a"])
    watch.stepped({3: "a key may be anything"})
    assert watch.episode_ended() == MissingKeys(None, ["a"], ["3"]) and not watch
    assert "Keys of the infos: none" in explain(MissingKeys("m", [], []))[0]


def test_what_a_node_says_of_keys_is_checked():
    good = MissingKeys("mask", ["a"], ["b"])
    told_of = plain().unpack(encode_plain(Reply(1, [], good))[5 + 20 :])
    assert told_of.infos == good
    check_missing(good)
    check_missing(None)
    for bad in (3, MissingKeys(3, [], []), MissingKeys(None, "ab", []), MissingKeys(None, [], ["x" * 2000]), {"a": 1}):
        with pytest.raises(ProtocolError):
            check_missing(bad)
