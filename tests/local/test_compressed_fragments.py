"""Fragments from other machines are the same whether they are compressed or not, and stats say how they were sent."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import clusterenv as ce
from clusterenv.rollout import map_arrays
from stepping import kinds

STEPS = 24


class Frames(gym.Env):
    """A moving square before noise, in stacks of four frames; episodes have different lengths."""

    action_space = spaces.Discrete(2)

    def __init__(self, axis=0, is_dict=False, dtype=np.uint8):
        self.axis, self.is_dict, self.dtype = axis, is_dict, dtype
        image = spaces.Box(0, 255, (4, 40, 40) if axis == 0 else (40, 40, 4), dtype)
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = spaces.Dict(image=image, vector=vector) if is_dict else image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(3, 15))
        self.frames = [self._frame()] * 4
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        self.frames = [*self.frames[1:], self._frame()]
        return self._obs(), float(action), self.t >= self.length, False, {}

    def _frame(self):
        frame = self.np_random.integers(0, 3, (40, 40)).astype(self.dtype)
        frame[self.t % 36 : self.t % 36 + 4, 5:9] = 200
        return frame

    def _obs(self):
        image = np.stack(self.frames, self.axis)
        return {"image": image, "vector": self.np_random.random(3, np.float32)} if self.is_dict else image


def collect(make, compress, n=4, workers=2, rollouts=2, steps=STEPS):
    backend = ce.Loopback(nodes=1, workers_per_node=workers, compress=compress)
    with ce.ClusterEnv(make, n, backend=backend) as envs:
        envs.reset(seed=3)
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        batches = [collector.rollout(steps) for _ in range(rollouts)]
        assert {"node_lost", "worker_lost", "env_error"}.isdisjoint(kinds(envs))
        return batches, collector.stats()


def assert_equal(one, two):
    for mine, theirs in zip(one, two, strict=True):
        for name in ("obs", "last_obs", "final_obs"):
            pairs = []
            map_arrays(lambda *both, pairs=pairs: pairs.append(both), getattr(mine, name), getattr(theirs, name))
            assert pairs and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs), name
        for name in ("actions", "rewards", "terminations", "valid"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name


@pytest.mark.parametrize(
    ("axis", "is_dict", "dtype", "n", "workers"),
    [(0, False, np.uint8, 4, 2), (2, True, np.uint8, 3, 2), (0, False, np.float32, 1, 1)],
)
def test_a_rollout_is_the_same_compressed_or_not(axis, is_dict, dtype, n, workers):
    def make():
        return Frames(axis, is_dict, dtype)

    plain, without = collect(make, False, n, workers)
    packed, stats = collect(make, True, n, workers)
    assert_equal(plain, packed)
    assert len(plain[0].final_obs["image"] if is_dict else plain[0].final_obs), "no episode ended"
    image = "observation['image']" if is_dict else "observation"
    node = stats["nodes"][0]
    assert node["compression"][image].startswith("frames once + z")
    assert without["nodes"][0]["compression"][image] == "off: compress=False"
    if is_dict:
        assert node["compression"]["observation['vector']"] == "off: small"
    assert stats["fragment_bytes"] == without["fragment_bytes"] == without["fragment_bytes_sent"]
    assert 0 < 8 * stats["fragment_bytes_sent"] < stats["fragment_bytes"]
    assert node["fragment_bytes_sent"] == stats["fragment_bytes_sent"]


def test_a_link_within_one_machine_is_measured_too():
    """Enough data to measure the link, which takes more than one fragment. What is chosen depends on the CPU."""
    _, stats = collect(Frames, "auto", n=32, workers=1, rollouts=4, steps=16)
    assert stats["nodes"][0]["compression"]["observation"] != "off: the link is not measured yet"


def test_without_zstd_zlib_is_used_and_stats_say_so(monkeypatch):
    from clusterenv.cluster import peers

    monkeypatch.setattr(peers, "installed_codecs", lambda: ("zlib",))
    _, stats = collect(Frames, True, 1, 1)
    assert stats["nodes"][0]["compression"] == {"observation": "frames once + zlib (zstd is missing at the head)"}
