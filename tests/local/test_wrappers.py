"""Every vector wrapper of Gymnasium gives the same over `ClusterEnv` as over `SyncVectorEnv`, in every mode."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

import clusterenv as ce
from toys import SpaceEnv, same

BOX = spaces.Box(-2, 2, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
DISCRETE = spaces.Discrete(3)
CONTINUOUS = spaces.Box(-1, 1, (2,), np.float32)
DICT = spaces.Dict(a=BOX, b=DISCRETE)


def plus_one(x):
    return x + 1


# name → (observation space, action space, how to wrap)
CASES = {
    "ArrayConversion": (BOX, DISCRETE, lambda e: wrappers.ArrayConversion(e, env_xp=np, target_xp=torch)),
    "ClipAction": (BOX, CONTINUOUS, lambda e: wrappers.ClipAction(e)),
    "ClipReward": (BOX, DISCRETE, lambda e: wrappers.ClipReward(e, -0.5, 0.5)),
    "DictInfoToList": (BOX, DISCRETE, lambda e: wrappers.DictInfoToList(e)),
    "DtypeObservation": (BOX, DISCRETE, lambda e: wrappers.DtypeObservation(e, np.float64)),
    "FilterObservation": (DICT, DISCRETE, lambda e: wrappers.FilterObservation(e, ["a"])),
    "FlattenObservation": (DICT, DISCRETE, lambda e: wrappers.FlattenObservation(e)),
    "GrayscaleObservation": (IMAGE, DISCRETE, lambda e: wrappers.GrayscaleObservation(e)),
    "HumanRendering": (BOX, DISCRETE, lambda e: wrappers.HumanRendering(e)),
    "NormalizeObservation": (BOX, DISCRETE, lambda e: wrappers.NormalizeObservation(e)),
    "NormalizeReward": (BOX, DISCRETE, lambda e: wrappers.NormalizeReward(e)),
    "NumpyToTorch": (BOX, DISCRETE, lambda e: wrappers.NumpyToTorch(e)),
    "RecordEpisodeStatistics": (BOX, DISCRETE, lambda e: wrappers.RecordEpisodeStatistics(e)),
    "RecordVideo": (BOX, DISCRETE, None),
    "RescaleAction": (BOX, CONTINUOUS, lambda e: wrappers.RescaleAction(e, 0.0, 1.0)),
    "RescaleObservation": (BOX, DISCRETE, lambda e: wrappers.RescaleObservation(e, 0.0, 1.0)),
    "ReshapeObservation": (BOX, DISCRETE, lambda e: wrappers.ReshapeObservation(e, (2, 2))),
    "ResizeObservation": (IMAGE, DISCRETE, lambda e: wrappers.ResizeObservation(e, (4, 4))),
    "TransformAction": (BOX, CONTINUOUS, lambda e: wrappers.TransformAction(e, np.tanh)),
    "TransformObservation": (BOX, DISCRETE, lambda e: wrappers.TransformObservation(e, plus_one)),
    "TransformReward": (BOX, DISCRETE, lambda e: wrappers.TransformReward(e, plus_one)),
    "VectorizeTransformAction": (
        BOX,
        CONTINUOUS,
        lambda e: wrappers.VectorizeTransformAction(e, gym.wrappers.ClipAction),
    ),
    "VectorizeTransformObservation": (
        BOX,
        DISCRETE,
        lambda e: wrappers.VectorizeTransformObservation(
            e, gym.wrappers.TransformObservation, func=plus_one, observation_space=None
        ),
    ),
    "VectorizeTransformReward": (
        BOX,
        DISCRETE,
        lambda e: wrappers.VectorizeTransformReward(e, gym.wrappers.TransformReward, func=plus_one),
    ),
}

# Adapters between array libraries; they need JAX on one side, which ClusterEnv's numpy never is.
NOT_FOR_NUMPY = {"JaxToNumpy", "JaxToTorch"}


def test_no_wrapper_is_forgotten():
    assert set(wrappers.__all__) == set(CASES) | NOT_FOR_NUMPY


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda m: m.name)
@pytest.mark.parametrize("name", CASES)
def test_wrapper_gives_the_same(name, mode, tmp_path, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    observation_space, action_space, wrap = CASES[name]
    thunks = [lambda i=i: SpaceEnv(observation_space, action_space, 3 + i, "plain") for i in range(3)]
    if name == "RecordVideo":

        def wrap(env):
            return wrappers.RecordVideo(env, str(tmp_path / type(env).__name__))

    def build(env):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. "recorded episodes will not contain the last frame"
            return wrap(env)

    ref = SyncVectorEnv(thunks, autoreset_mode=mode)
    try:
        ref = build(ref)
    except (AssertionError, ValueError) as error:
        ours = ce.ClusterEnv(thunks, backend=ce.Local(workers=2), autoreset_mode=mode)
        with pytest.raises(type(error)):  # refused over both alike
            build(ours)
        ours.close()
        ref.close()
        return
    envs = build(ce.ClusterEnv(thunks, backend=ce.Local(workers=2), autoreset_mode=mode))
    try:
        assert envs.observation_space == ref.observation_space and envs.action_space == ref.action_space
        compare(envs.reset(seed=1), ref.reset(seed=1))
        ref.action_space.seed(2)
        for _ in range(14):
            actions = ref.action_space.sample()
            if name in ("NumpyToTorch", "ArrayConversion"):
                actions = torch.as_tensor(actions)
            try:
                theirs = ref.step(actions)
            except BufferError:  # torch cannot hold the object array of final_obs, over neither of them
                with pytest.raises(BufferError):
                    envs.step(actions)
                return
            compare(envs.step(actions), theirs)
            ended = np.asarray(theirs[2]) | np.asarray(theirs[3])
            if mode is AutoresetMode.DISABLED and ended.any():
                # Each gets a dict of its own: Gymnasium's reset takes the mask out of it.
                compare(
                    envs.reset(options={"reset_mask": ended}),
                    masked_reset(ref, ended, name),
                )
    finally:
        envs.close()
        ref.close()


def masked_reset(ref, ended, name):
    """Gymnasium pops the mask from the options, which its own RecordEpisodeStatistics then misses."""
    if name == "RecordEpisodeStatistics":
        observations, infos = ref.env.reset(options={"reset_mask": ended})
        ref.episode_start_times[ended] = 0
        ref.episode_returns[ended] = 0
        ref.episode_lengths[ended] = 0
        ref.prev_dones[ended] = False
        return observations, infos
    return ref.reset(options={"reset_mask": ended})


def compare(ours, theirs):
    same(plain(ours), plain(theirs))


def plain(value):
    """Tensors as arrays, and without the seconds that an episode took."""
    if hasattr(value, "numpy"):
        return value.numpy()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ("t", "_t") or not isinstance(v, np.ndarray)}
    if isinstance(value, (tuple, list)):
        return type(value)(plain(v) for v in value)
    return value
