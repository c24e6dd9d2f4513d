"""`allow_pickle=False`: nodes get ids, plain arguments and weights, and unpickle nothing that came over the network."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import clusterenv as ce
from clusterenv.errors import NotPlainError
from clusterenv.policy.acting.named import Named, class_at, prepare_plain
from clusterenv.wire.channel import FrameReader, encode, encode_named, open_request
from clusterenv.wire.requests import Call, Step

ID = "CartPole-v1"
NAMED = ce.Loopback(nodes=2, allow_pickle=False)
LINEAR = ("torch.nn:Linear", {"in_features": 4, "out_features": 2})


def test_the_same_rows_as_anywhere():
    with ce.ClusterEnv(ID, 4, backend=NAMED) as envs, ce.ClusterEnv(ID, 4, backend=ce.Local(workers=0)) as same:
        assert np.array_equal(envs.reset(seed=1)[0], same.reset(seed=1)[0])
        for _ in range(30):
            ours, theirs = envs.step(np.ones(4, np.int64)), same.step(np.ones(4, np.int64))
            for a, b in zip(ours[:4], theirs[:4], strict=True):
                assert np.array_equal(a, b)
        envs.set_attr("gravity", 3.0)
        assert envs.call("gravity") == (3.0,) * 4


def test_a_policy_by_name_acts_as_the_same_policy_by_value():
    torch.manual_seed(1)
    module = torch.nn.Linear(4, 2)
    batches = []
    for backend, made_by in ((NAMED, LINEAR), (ce.Local(workers=2), None)):
        policy = ce.TorchPolicy(module, dist="categorical", made_by=made_by, runtime="torch")
        with ce.ClusterEnv(ID, 4, backend=backend) as envs:
            collector = envs.collector(policy, seed=3)
            collector.rollout(8)
            batches.append(collector.rollout(16))
            score = collector.evaluate(policy, episodes=4, seed=7)
            assert len(score.returns) == 4
    assert np.array_equal(batches[0].obs, batches[1].obs)
    assert np.array_equal(batches[0].actions, batches[1].actions)
    assert np.array_equal(batches[0].logprobs, batches[1].logprobs)


def test_random_actions_need_no_code():
    with ce.ClusterEnv(ID, 4, backend=NAMED) as envs:
        assert envs.collector(ce.RandomPolicy(), seed=1).rollout(8).valid.all()


def test_what_would_need_code_is_refused_by_name():
    with pytest.raises(ce.SpecError, match="env has to be an id"):
        ce.ClusterEnv(lambda: gym.make(ID), 2, backend=NAMED)
    with pytest.raises(ce.SpecError, match="JSON data"):
        ce.ClusterEnv(ID, 2, backend=NAMED, env_kwargs={"f": print})
    with ce.ClusterEnv(ID, 4, backend=NAMED) as envs:
        envs.reset(seed=1)
        with pytest.raises(ce.PolicyError, match="carries code"):
            envs.collector(ce.NumpyPolicy(lambda w, o: o @ w["w"], {"w": np.ones((4, 2))}))
        with pytest.raises(ce.PolicyError, match="made_by"):
            envs.collector(ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical", runtime="torch"))
        with pytest.raises(ce.PolicyError, match="not the class of the module"):
            module = torch.nn.Sequential(torch.nn.Linear(4, 2))
            envs.collector(ce.TorchPolicy(module, dist="categorical", made_by=LINEAR, runtime="torch"))
        with pytest.raises(NotPlainError, match="args"):
            envs.call("set_state", print)
        assert envs.step(np.zeros(4, np.int64))[0].shape == (4, 4), "nothing was lost"


def test_on_this_machine_there_is_nobody_to_distrust():
    with pytest.raises(ce.SpecError, match=r"allow_pickle=.*Loopback"):
        ce.Local(allow_pickle=False)


def test_only_policy_classes_are_made_of_a_name():
    with pytest.raises(ce.PolicyError, match="no policy class"):
        class_at("os:system")
    with pytest.raises(ce.PolicyError, match="no policy class"):
        class_at("subprocess:Popen")
    with pytest.raises(ce.PolicyError, match="cannot be imported"):
        class_at("no_such_package:Policy")
    space = gym.spaces.Box(-1, 1, (4,))
    with pytest.raises(ce.PolicyError, match="no policy class"):
        prepare_plain(Named("builtins:exec", {"source": "1"}, {}), space, gym.spaces.Discrete(2))


def test_a_worker_that_takes_no_pickles_unpickles_none():
    reader = FrameReader(open_request, allow_pickle=False)
    assert reader.feed(encode_named(Step(7, [0, 1], None))) == [Step(7, [0, 1], None)]
    with pytest.raises(ce.ProtocolError, match="pickled"):
        reader.feed(encode_named(Call(8, [0], "x", (), {})) + encode(Call(9, [0], "x", (), {})))


def test_a_node_without_pickles_does_not_join_a_run_with(monkeypatch):
    from clusterenv.backends.contract import Plan

    monkeypatch.setattr(Plan, "options", ["--no-pickle"])
    with pytest.raises(ce.StartError, match="takes no pickled code"):
        ce.ClusterEnv(ID, 2, backend=ce.Loopback(nodes=1))
