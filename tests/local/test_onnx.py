"""Exported policies in use: workers without torch, nodes without pickles, and what stays in torch, with its reason."""

from __future__ import annotations

import logging
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical, Normal

import clusterenv as ce
from clusterenv.policy.acting.named import prepare_plain
from clusterenv.policy.acting.torch_actor import TorchRecipe
from clusterenv.policy.onnx.actor import OnnxRecipe
from clusterenv.wire.channel import encode_named, open_request
from clusterenv.wire.requests import SetPolicy
from toys import ReportsImports

ID = "CartPole-v1"
CARTPOLE = gym.make(ID)
SPACES = CARTPOLE.observation_space, CARTPOLE.action_space
NODES = ce.Loopback(nodes=2, allow_pickle=False)


def net(outputs=2, inputs=4):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 2)


def remember(module, obs, state, start):
    state = module.cell(obs, state * (1 - start[:, None]))
    return Categorical(logits=4 * module.head(state)), state


def zeros(rows):
    return torch.zeros(rows, 8)


def memory(**options):
    return ce.TorchPolicy(Memory(), dist=remember, initial_state=zeros, **options)


def rollouts(policy, backend, count=2, env=ID, **options):
    with ce.ClusterEnv(env, 6, backend=backend) as envs:
        collector = envs.collector(policy, seed=1, **options)
        return [collector.rollout(20) for _ in range(count)], collector.stats()


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a.obs, b.obs) and np.array_equal(a.actions, b.actions)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-5)


# -- workers --------------------------------------------------------------------------------------------------


def test_workers_have_no_torch_and_no_more_threads():
    """`test_policies.py` has the same for a policy in torch, where the answer is the other one."""
    with ce.ClusterEnv(ReportsImports, 1, backend=ce.Local(workers=1)) as envs:
        assert envs.call("imported", "onnxruntime") == (True,), "before there is a policy: in the fork server"
        threads = envs.call("native_threads")
        envs.collector(ce.TorchPolicy(nn.Linear(5, 2), dist="categorical", runtime="onnx")).rollout(2)
        assert envs.call("imported", "torch") == (False,)
        assert envs.call("native_threads") == threads == (1,)


def test_importing_the_package_imports_neither():
    code = "import clusterenv, sys; print([m for m in ('torch', 'onnx', 'onnxruntime') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("kind", ["categorical", "normal", "recurrent"])
def test_the_same_actions_as_in_torch_and_for_any_number_of_workers(kind):
    env = "Pendulum-v1" if kind == "normal" else ID

    def policy(runtime):
        if kind == "recurrent":
            return memory(runtime=runtime)
        if kind == "normal":
            return ce.TorchPolicy(net(1, 3), dist=lambda m, o: Normal(m(o), 0.5), runtime=runtime)
        return ce.TorchPolicy(net(), dist="categorical", runtime=runtime)

    ours, stats = rollouts(policy("onnx"), ce.Local(workers=2), env=env)
    spread, _ = rollouts(policy("onnx"), ce.Local(workers=3), env=env)
    theirs, in_torch = rollouts(policy("torch"), ce.Local(workers=0), env=env)
    assert stats["policy"]["runtime"] == "onnx" and in_torch["policy"]["runtime"] == "torch"
    if kind != "normal":  # there, the actions themselves are rounded differently
        assert_same(ours, theirs)
    else:
        assert np.allclose(ours[0].actions, theirs[0].actions, atol=1e-4)
    for a, b in zip(ours, spread, strict=True):
        assert np.array_equal(a.actions, b.actions) and np.array_equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize(("runtime", "workers"), [("onnx", 2), ("torch", 0)])
def test_published_weights_are_used(runtime, workers):
    module = net()
    with ce.ClusterEnv(ID, 4, backend=ce.Local(workers=workers)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical", runtime=runtime), seed=1)
        assert set(np.unique(collector.rollout(20).actions)) == {0, 1}
        for action in (1, 0):
            with torch.no_grad():
                module[-1].bias.copy_(torch.tensor([-100.0, 100.0] if action else [100.0, -100.0]))
            assert (collector.rollout(10).actions == action).all()
        assert (collector.evaluate(episodes=3).lengths < 20).all(), "always to one side"


def test_weights_of_convolutions_are_replaced_too():
    module = nn.Sequential(nn.Conv2d(3, 4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    policy = ce.TorchPolicy(module, dist="categorical", runtime="onnx")
    space = spaces.Box(0, 255, (3, 8, 8), np.uint8)
    recipe = policy.prepare(space, spaces.Discrete(2)).recipe
    assert recipe.are_weights_constant
    actor = recipe.build()
    obs = np.stack([space.sample() for _ in range(16)])
    for factor in (1.0, -2.0, 3.0):
        with torch.no_grad():
            module[0].weight.mul_(factor)
            expected = module(torch.from_numpy(obs).float()).numpy()
        actor.load(policy.weights())
        assert np.allclose(actor.forward(obs, None, None)[0], expected, atol=1e-5 * np.abs(expected).max())


def test_another_architecture_is_refused_by_name():
    policy = ce.TorchPolicy(net(), dist="categorical", runtime="onnx")
    actor = policy.prepare(*SPACES).recipe.build()
    weights = {**policy.weights(), "0.weight": np.zeros((16, 4), np.float32)}
    with pytest.raises(ce.PolicyError, match=r"'0.weight' have shape \(16, 4\).*\(32, 4\)"):
        actor.load(weights)


class Masked(gym.Wrapper):
    """Only one action is allowed at a time."""

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.t = 0
        return obs, {**info, "allowed": self.mask()}

    def step(self, action):
        assert self.mask()[action]
        self.t += 1
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "allowed": self.mask()}

    def mask(self):
        return np.array([self.t % 2 == 0, self.t % 2 == 1])


def test_action_masks_are_applied():
    policy = ce.TorchPolicy(net(), dist="categorical", action_mask="allowed", runtime="onnx")
    (batch,), _ = rollouts(policy, ce.Local(workers=2), count=1, env=lambda: Masked(gym.make(ID)))
    assert batch.valid.all() and {0, 1} == set(np.unique(batch.actions))
    assert np.array_equal(batch.actions[0], np.zeros(6))


def test_the_head_measures_drift_with_the_exported_policy():
    drifts = {}
    for runtime in ("onnx", "torch"):
        module = net()
        with ce.ClusterEnv(ID, 8, backend=ce.Local(workers=0)) as envs:
            policy = ce.TorchPolicy(module, dist="categorical", runtime=runtime)
            collector = envs.collector(policy, seed=1, sync=ce.APS(ess=0.5))
            collector.rollout(32)
            with torch.no_grad():
                module[-1].weight.add_(0.2)
                module[-1].weight[0].add_(0.2)
            collector.rollout(32)
            collector.rollout(32)
            drifts[runtime] = collector.stats()["drift"]
    assert drifts["onnx"] == pytest.approx(drifts["torch"], rel=1e-3) and drifts["onnx"] > 0


# -- nodes that accept no pickled code ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lambda", "recurrent"])
def test_an_exported_policy_reaches_nodes_as_plain_data(kind):
    """Neither could be sent by name: one has a function, the other a state."""

    def policy():
        if kind == "recurrent":
            return memory(runtime="onnx")
        return ce.TorchPolicy(net(), dist=lambda m, o: Categorical(logits=2 * m(o)), runtime="onnx")

    ours, _ = rollouts(policy(), NODES)
    here, _ = rollouts(policy(), ce.Local(workers=2))
    assert_same(ours, here)


def test_a_recipe_survives_the_wire_without_pickle():
    policy = memory(runtime="onnx")
    prepared = policy.prepare(*SPACES)
    frame = encode_named(SetPolicy(1, prepared.recipe, None, None, 0, ()))
    arrived = open_request(frame[5:]).recipe
    assert isinstance(arrived, OnnxRecipe)
    again = prepare_plain(arrived, *SPACES)
    assert again.family.name == "categorical"
    actors = [recipe.recipe.build() for recipe in (prepared, again)]
    obs = np.ones((16, 4), np.float32)
    outputs = []
    for actor in actors:
        actor.load(policy.weights())
        outputs.append(actor.forward(obs, actor.initial_state(16), np.ones(16, np.bool_)))
    assert np.array_equal(outputs[0][0], outputs[1][0]) and np.array_equal(outputs[0][1], outputs[1][1])


# -- what stays in torch --------------------------------------------------------------------------------------


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.heat = net(), nn.Parameter(torch.ones(1))


class Changes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, obs):
        logits = self.net(obs)
        logits[:, 0] = 0
        return logits


REFUSED = {
    "reads a value": (Reads(), lambda m, o: Categorical(logits=m.net(o) / float(m.heat)), "reads the value"),
    "reads an array": (
        Reads(),
        lambda m, o: Categorical(logits=m.net(o) / torch.from_numpy(m.heat.detach().numpy() * 1.0)),
        "reads the value",
    ),
    "folds a weight": (
        Reads(),
        lambda m, o: Categorical(logits=m.net(o) / torch.from_numpy(np.from_dlpack(m.heat.detach()) * 1.0)),
        "differs from torch's",
    ),
    "branches": (net(), lambda m, o: Categorical(logits=m(o if o.abs().max() > 1e9 else -o)), "reads the value"),
    "changes a view": (Changes(), lambda m, o: Categorical(logits=m(o)), "changes a tensor in place"),
    "changes observations": (net(), lambda m, o: Categorical(logits=m(o.mul_(2))), "observations in place"),
    "draws": (net(), lambda m, o: Categorical(logits=m(o) + torch.randn(len(o), 2)), r"aten\.randn"),
    "other paths": (
        net(),
        lambda m, o: Categorical(logits=m(o) if len(o) < 20 else m(o).tanh()),
        "another number of rows",
    ),
    "mixes rows": (net(), lambda m, o: Categorical(logits=m(o) - m(o).flip(0)), r"aten\.flip"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_runs_in_torch_and_says_why(name):
    module, dist, reason = REFUSED[name]
    prepared = ce.TorchPolicy(module, dist=dist).prepare(*SPACES)
    assert prepared.runtime == "torch" and isinstance(prepared.recipe, TorchRecipe)
    with pytest.raises(ce.PolicyError, match=f"cannot be exported: .*{reason}"):
        ce.TorchPolicy(module, dist=dist, runtime="onnx").prepare(*SPACES)


def test_a_graph_that_does_not_agree_with_torch_is_not_used(monkeypatch):
    from clusterenv.policy.onnx.layers import TABLE

    monkeypatch.setitem(TABLE, "tanh", TABLE["sigmoid"])
    prepared = ce.TorchPolicy(net(), dist="categorical").prepare(*SPACES)
    assert prepared.runtime == "torch" and "its output differs from torch's by" in prepared.reason


def test_a_state_that_begins_differently_in_each_row_stays_in_torch():
    policy = ce.TorchPolicy(Memory(), dist=remember, initial_state=lambda rows: torch.rand(rows, 8), runtime="onnx")
    with pytest.raises(ce.PolicyError, match="not the same for every row"):
        policy.prepare(*SPACES)


def test_a_fallback_acts_and_is_shown(caplog):
    module, dist, _ = REFUSED["reads a value"]
    with caplog.at_level(logging.INFO, "clusterenv"):
        (batch,), stats = rollouts(ce.TorchPolicy(module, dist=dist), ce.Local(workers=0), count=1)
    assert batch.valid.all()
    expected = {"family": "categorical", "runtime": "torch", "reason": "it reads the value of a tensor in Python"}
    assert stats["policy"] == expected
    assert sum("runs in torch (it reads the value" in record.message for record in caplog.records) == 1


def test_without_onnxruntime_everything_runs_in_torch(monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    prepared = ce.TorchPolicy(net(), dist="categorical").prepare(*SPACES)
    assert prepared.runtime == "torch" and "not installed" in prepared.reason
    with pytest.raises(ce.PolicyError, match=r"clusterenv\[onnx\]"):
        ce.TorchPolicy(net(), dist="categorical", runtime="onnx").prepare(*SPACES)


@pytest.mark.parametrize("runtime", ["auto", "onnx"])
def test_nodes_without_onnxruntime_get_the_module(monkeypatch, runtime):
    from clusterenv.driver import Driver

    needed = []

    def need(self, names):
        needed.append(names)
        if "onnxruntime" in names:
            raise ce.PolicyError("the policy cannot run on node 0: onnxruntime is not installed there")

    monkeypatch.setattr(Driver, "need_packages", need)
    with ce.ClusterEnv(ID, 2, backend=ce.Local(workers=0)) as envs:
        if runtime == "onnx":
            with pytest.raises(ce.PolicyError, match="not installed there"):
                envs.collector(ce.TorchPolicy(net(), dist="categorical", runtime=runtime))
            return
        stats = envs.collector(ce.TorchPolicy(net(), dist="categorical")).stats()
    assert stats["policy"]["runtime"] == "torch" and "not installed there" in stats["policy"]["reason"]
    assert needed == [("onnxruntime",), ("torch",)]


def test_a_misspelt_runtime_is_refused():
    with pytest.raises(ce.SpecError, match='did you mean "onnx"'):
        ce.TorchPolicy(net(), dist="categorical", runtime="onxx")


def test_other_policies_run_in_numpy():
    (_,), stats = rollouts(ce.RandomPolicy(), ce.Local(workers=0), count=1)
    assert stats["policy"] == {"family": "uniform", "runtime": "numpy", "reason": ""}
