"""Spaces of classes that are not Gymnasium's, between machines: the head never unpickles what a node sends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import clusterenv as ce
from toys import SpaceEnv, same
from vector_toys import Anything, Echo

pytestmark = pytest.mark.network

NODES = ce.Loopback(nodes=2)


def test_custom_spaces_travel_with_the_code():
    with ce.ClusterEnv([Echo] * 4, backend=NODES) as envs:
        ref = SyncVectorEnv([Echo] * 4)
        assert isinstance(envs.single_action_space, Anything) and envs.action_space == ref.action_space
        assert isinstance(envs.single_observation_space, Anything) and envs.observation_space == ref.observation_space
        same(envs.reset(seed=1), ref.reset(seed=1))
        for actions in [("a", "b", "c", "d"), ("e", "end", "g", "h"), ("i", "j", "end", "l")]:
            same(envs.step(actions), ref.step(actions))


def test_a_custom_space_within_others_and_other_infos_sent_as_text():
    observation_space = spaces.Dict(word=Anything(), image=spaces.Box(0, 255, (2, 2), np.uint8))
    action_space = spaces.Tuple((Anything(), spaces.Discrete(3)))
    thunks = [lambda: SpaceEnv(observation_space, action_space, 3)] * 3
    with ce.ClusterEnv(thunks, backend=ce.Loopback(nodes=1)) as envs:
        ref = SyncVectorEnv(thunks)
        assert envs.observation_space == ref.observation_space
        same(envs.reset(seed=5), ref.reset(seed=5))
        for _ in range(4):
            actions = ref.action_space.sample()
            same(envs.step(actions), ref.step(actions))


def test_a_pair_of_spaces_for_slots_that_differ():
    some = [spaces.Box(0, high, (5,)) for high in (1, 2, 3, 4)]
    thunks = [lambda space=space: SpaceEnv(space, spaces.Discrete(2), 3) for space in some]
    with ce.ClusterEnv(thunks, backend=NODES, observation_mode="different") as envs:
        ref = SyncVectorEnv(thunks, observation_mode="different")
        assert envs.observation_space == ref.observation_space
        same(envs.reset(seed=2), ref.reset(seed=2))
        same(envs.step(np.zeros(4, np.int64)), ref.step(np.zeros(4, np.int64)))
    with pytest.raises(ce.SpecError, match=r"observation spaces are not equivalent.*slot 1"):
        ce.ClusterEnv(thunks, backend=NODES)


class Other(Anything):
    """Equal to `Anything` by its `__eq__`, and described by another name."""


def test_slots_with_other_custom_spaces_are_refused():
    made = [Anything, Anything, Other, Other]
    thunks = [lambda kind=kind: SpaceEnv(kind(), spaces.Discrete(2)) for kind in made]
    with pytest.raises(ce.SpecError, match=r"slot 2 has .*Other, .* has .*Anything"):
        ce.ClusterEnv(thunks, backend=NODES)


def test_an_environment_that_only_nodes_can_make(monkeypatch):
    head = os.getpid()

    def make():
        if os.getpid() == head:
            raise OSError("no simulator here")
        return Echo()

    with pytest.raises(ce.SpecError, match=r"one environment is made in this process too.*no simulator here"):
        ce.ClusterEnv(make, num_envs=2, backend=ce.Loopback(nodes=1))


def test_nodes_that_take_no_code(tmp_path, monkeypatch):
    (tmp_path / "echo_envs.py").write_text(
        "import gymnasium\ngymnasium.register('echo_envs/Echo-v0', entry_point='vector_toys:Echo')\n"
    )
    support = Path(__file__).parent.parent / "support"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{support}")
    monkeypatch.syspath_prepend(tmp_path)
    backend = ce.Loopback(nodes=1, allow_pickle=False)
    with pytest.raises(ce.SpecError, match=r"allow_pickle=False.*class that is not Gymnasium's"):
        ce.ClusterEnv("echo_envs:echo_envs/Echo-v0", num_envs=2, backend=backend)
    gym.registry.pop("echo_envs/Echo-v0")


SCRIPT = """
import gymnasium as gym, clusterenv as ce
from gymnasium import spaces

class Words(spaces.Space):
    def __init__(self):
        super().__init__(None, None)
    def sample(self, mask=None, probability=None):
        return "word"
    def __eq__(self, other):
        return isinstance(other, Words)

class Env(gym.Env):
    observation_space, action_space = Words(), Words()
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "begin", {}
    def step(self, action):
        return f"did {action}", 0.0, False, False, {}

if __name__ == "__main__":
    for backend in (ce.Local(workers=2), ce.Loopback(nodes=2)):
        with ce.ClusterEnv([Env] * 2, backend=backend) as envs:
            assert type(envs.single_observation_space) is Words, envs.single_observation_space
            assert envs.reset(seed=0)[0] == ("begin", "begin")
            print(envs.step(("a", "b"))[0], envs.action_space.sample())
"""


def test_classes_of_the_script_itself(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "('did a', 'did b') ('word', 'word')\n" * 2
