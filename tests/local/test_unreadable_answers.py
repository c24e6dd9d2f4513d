"""Values that a worker can pickle and the head cannot unpickle: their worker is lost, once, and the run goes on."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import clusterenv as ce
from clusterenv.wire.channel import FrameReader, encode, encode_quick
from clusterenv.wire.requests import Close, Reply


class Odd(Exception):
    """As many exceptions of libraries: what it is made from is not in `args`."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


class SometimesOdd(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {"error": Odd(3, "no")} if action else {}

    def error(self):
        return Odd(3, "no")


def test_a_frame_that_cannot_be_opened_is_not_opened_again_nor_any_after_it():
    reader = FrameReader()
    odd = encode(Reply(7, [], result=[Odd(3, "no")]))
    with pytest.raises(TypeError):
        reader.feed(encode(Close(1)) + odd + encode_quick(8) + encode_quick(9)[:4])
    assert reader.feed(b"") == [Close(1)], "what follows is of a sender that is to be ended"


@pytest.fixture
def envs():
    with ce.ClusterEnv([SometimesOdd] * 2, backend=ce.Local(workers=2)) as made:
        made.reset(seed=1)
        made.step([0, 0])
        yield made


def test_in_a_step(envs):
    _, rewards, terminations, truncations, infos = envs.step([0, 1])
    assert rewards.tolist() == [1.0, 0.0] and not terminations.any()
    assert truncations.tolist() == [False, True] and infos["worker_lost"].tolist() == [False, True]
    (event,) = [event for event in envs.events() if event.kind == "worker_lost"]
    assert "cannot be unpickled" in event.reason and "Odd.__init__() missing" in event.reason
    envs.step([0, 0])
    assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]


def test_in_a_call(envs):
    with pytest.raises(ce.WorkerLostError):
        envs.call("error")
    envs.reset()
    lost = [event.reason for event in envs.events() if event.kind == "worker_lost"]
    assert len(lost) == 2 and all("cannot be unpickled" in reason for reason in lost)
    assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]
