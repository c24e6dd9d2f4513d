"""A node whose versions differ is refused before it runs any user code, with both versions named, and exits with 42."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import clusterenv as ce
from clusterenv.code import versions
from clusterenv.system.exits import NEVER
from clusterenv.wire.messages import PROTOCOL
from loopback_agents import Loopback

pytestmark = [pytest.mark.network, pytest.mark.guarantee(20)]

AGENT = """
import sys
from types import SimpleNamespace
import clusterenv.cli as cli, clusterenv.node.agent as agent
from clusterenv.code import versions
from clusterenv.wire import messages
installed = versions.installed()
{change}
versions.installed = lambda: installed
sys.exit(cli.main(sys.argv[1:]))
"""
HERE = SimpleNamespace(
    python=".".join(map(str, sys.version_info[:2])), gymnasium=gym.__version__, **versions.installed()
)
DIFFERENT = {
    "protocol": ("messages.PROTOCOL = 1", f"protocol 1 there, {PROTOCOL} here"),
    "clusterenv": ("agent.__version__ = '0.0.7'", f"clusterenv 0.0.7 there, {ce.__version__} here"),
    "python": ("agent.sys = SimpleNamespace(version_info=(3, 8, 1))", f"Python 3.8 there, {HERE.python} here"),
    "gymnasium": (
        "agent.gymnasium = SimpleNamespace(__version__='0.29.1')",
        f"Gymnasium 0.29.1 there, {HERE.gymnasium} here",
    ),
    "numpy": ("installed['numpy'] = '0.9.8'", f"numpy 0.9.8 there, {HERE.numpy} here"),
    "cloudpickle": ("installed['cloudpickle'] = '2.2.1'", f"cloudpickle 2.2.1 there, {HERE.cloudpickle} here"),
    "no cloudpickle": ("del installed['cloudpickle']", "cloudpickle is not installed there"),
}
TORCH = {
    "torch": ("installed['torch'] = '1.13.1'", f"torch 1.13.1 there, {HERE.torch} here"),
    "no torch": ("del installed['torch']", "torch is not installed there"),
}
ONNX = {
    "onnxruntime": ("installed['onnxruntime'] = '1.2.0'", f"onnxruntime 1.2.0 there, {HERE.onnxruntime} here"),
    "no onnxruntime": ("del installed['onnxruntime']", "onnxruntime is not installed there"),
}
SAME = {
    "numpy": ("installed['numpy'] = installed['numpy'].split('.')[0] + '.99.0'", "is here already"),
    "torch": TORCH["torch"][:1] + ("is here already",),
}
"""Differences that do not matter: of numpy within a major version, of torch without a policy of torch."""


def agent(command: list[str], change: str) -> list[str]:
    """Return the command of an agent that claims other versions."""
    return [sys.executable, "-c", AGENT.format(change=change), *command[command.index("node") :]]


def run_agent(backend: Loopback, change: str) -> subprocess.CompletedProcess[str]:
    """Run a second agent with the key of the first node, to its end."""
    command = agent(backend.jobs[0].command(0), change)
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_each_version_that_matters_is_compared():
    backend = Loopback(nodes=1)
    with ce.ClusterEnv("CartPole-v1", 1, backend=backend) as envs:
        envs.reset(seed=1)
        for cases, is_refused in ((DIFFERENT, True), (SAME, False)):
            for name, (change, said) in cases.items():
                done = run_agent(backend, change)
                assert done.returncode == NEVER and said in done.stderr, (name, done.stderr)
                assert ("versions differ" in done.stderr) == is_refused, (name, done.stderr)
        for runtime, cases in (("onnx", ONNX), ("torch", TORCH)):
            policy = ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical", runtime=runtime)
            envs.collector(policy, seed=1).rollout(2)
            for name, (change, said) in cases.items():
                done = run_agent(backend, change)
                assert done.returncode == NEVER and f"versions differ: {said}" in done.stderr, (name, done.stderr)
            if runtime == "onnx":
                assert "is here already" in run_agent(backend, TORCH["no torch"][0]).stderr, "torch is not needed"
        reasons = [event.reason for event in envs.events() if event.kind == "node_refused"]
        for _, said in (*DIFFERENT.values(), *ONNX.values(), *TORCH.values()):
            assert any(said in reason for reason in reasons), said
        assert "transition_valid" not in envs.step(np.zeros(1, np.int64))[4]


def test_no_user_code_runs_on_a_node_that_is_refused(tmp_path):
    """What the environments' code does on a node leaves a file here; the head itself runs none of it."""

    class Marks(gym.Wrapper):
        def __init__(self, env):
            (tmp_path / "ran").touch()
            super().__init__(env)

    change, said = DIFFERENT["gymnasium"]
    backend = Loopback(nodes=1, change=lambda agents, node: agent(agents.command(node), change))
    with pytest.raises(ce.StartError) as caught:
        ce.ClusterEnv([lambda: Marks(gym.make("CartPole-v1"))], backend=backend)
    assert said in str(caught.value)
    assert backend.jobs[0].process(0).wait(10) == NEVER and backend.jobs[0].starts == {0: 1}, "and is not tried again"
    assert not (tmp_path / "ran").exists()
    with ce.ClusterEnv([lambda: Marks(gym.make("CartPole-v1"))], backend=Loopback(nodes=1)):
        assert (tmp_path / "ran").exists()


def test_a_node_without_onnxruntime_gets_the_module_itself():
    backend = Loopback(nodes=1, change=lambda agents, node: agent(agents.command(node), ONNX["no onnxruntime"][0]))
    with ce.ClusterEnv("CartPole-v1", 1, backend=backend) as envs:
        with pytest.raises(ce.PolicyError, match="onnxruntime is not installed there"):
            envs.collector(ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical", runtime="onnx"))
        collector = envs.collector(ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical"))
        stats = collector.stats()["policy"]
        assert stats["runtime"] == "torch" and "onnxruntime is not installed there" in stats["reason"]
        assert collector.rollout(2).valid.all()
