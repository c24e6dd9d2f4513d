"""Typical mistakes of a first day: the error names the argument, what was given, and what to write instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import clusterenv as ce
from clusterenv.arguments import closest, describe, fits
from clusterenv.cli import main
from toys import SpaceEnv

HERE = ce.Local(workers=0)
BOX = spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture(scope="module")
def envs() -> Iterator[ce.ClusterEnv]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "CLUSTERENV_MONITOR", "0"
        )  # begins after a second: the leak check would blame the test of that time
        made = ce.ClusterEnv("CartPole-v1", 2, backend=HERE)
    with made:
        yield made


def no_return():
    gym.make("CartPole-v1")


def make(**kwargs: Any) -> Any:
    return ce.ClusterEnv("CartPole-v1", 2, **{"backend": HERE, **kwargs})


def collect(envs: ce.ClusterEnv, **kwargs: Any) -> Any:
    return envs.collector(ce.RandomPolicy(), **kwargs)


def agent_on(action_space: spaces.Space) -> Any:
    """A module whose shape is not known, for environments with this action space."""
    return ce.TorchPolicy(torch.nn.Linear(3, 2)).prepare(BOX, action_space)


# What is called; the argument, what was given, and what to do, as they stand in the text.
MISTAKES = {
    # where and how
    "backend by name": (lambda e: make(backend="local"), "backend='local'", "write backend=Local()"),
    "another backend by name": (lambda e: make(backend="slrum"), "backend='slrum'", "write backend=Slurm(nodes=...)"),
    "class of a backend": (lambda e: make(backend=ce.Local), "backend=<class Local>", "write backend=Local()"),
    "recovery as a dict": (
        lambda e: make(recovery={"max_restarts": 3}),
        "recovery={'max_restarts': 3}",
        "write recovery=Recovery(max_restarts=3)",
    ),
    "class of recovery": (lambda e: make(recovery=ce.Recovery), "recovery=<class Recovery>", "recovery=Recovery()"),
    "a timeout as text": (lambda e: ce.Recovery(step_timeout_s="30"), "step_timeout_s='30'", "step_timeout_s=30,"),
    "one number for two": (lambda e: ce.Recovery(backoff_s=1.0), "backoff_s=1.0", "expected 2 numbers"),
    "an unknown choice": (lambda e: ce.Recovery(on_error="restrat"), "on_error='restrat'", 'did you mean "restart"?'),
    "workers as text": (lambda e: ce.Local(workers="4"), "Local(workers='4')", "write workers=4, without quotes"),
    "one module to preload": (lambda e: ce.Local(preload="torch"), "preload='torch'", "write preload=['torch']"),
    "nodes as text": (lambda e: ce.Slurm(nodes="4"), "Slurm(nodes='4')", "write nodes=4, without quotes"),
    "nodes as a float": (lambda e: ce.Ray(nodes=4.0), "Ray(nodes=4.0)", "write nodes=4"),
    "a wait with a unit": (lambda e: ce.Manual(2, start_timeout_s="1h"), "start_timeout_s='1h'", "expected a number"),
    "a list for a dict": (lambda e: ce.Slurm(2, env_vars=["A=1"]), "env_vars=['A=1']", "expected a dict"),
    "no image": (lambda e: ce.Kubernetes(2, None), "Kubernetes(image=None)", "expected a string"),
    # what to build
    "num_envs as text": (lambda e: ce.ClusterEnv("CartPole-v1", "4"), "num_envs='4'", "write num_envs=4"),
    "num_envs as a float": (lambda e: ce.ClusterEnv("CartPole-v1", 4.0), "num_envs=4.0", "write num_envs=4"),
    "a list of ids": (
        lambda e: ce.ClusterEnv(["CartPole-v1"] * 2),
        "env[0]='CartPole-v1'",
        "ClusterEnv('CartPole-v1', num_envs=...)",
    ),
    "env_kwargs as a list": (lambda e: make(env_kwargs=["x"]), "env_kwargs=['x']", "expected a dict or None"),
    "another spelling of a mode": (
        lambda e: make(autoreset_mode="SAME_STEP"),
        "autoreset_mode='SAME_STEP'",
        'did you mean "SameStep"?',
    ),
    "copy as text": (lambda e: make(copy="no"), "copy='no'", "expected True or False"),
    "no function in Vector": (lambda e: ce.Vector(3), "fn=3", "write Vector(lambda num_envs, seeds: ...)"),
    "a misspelt argument of make_vec": (
        lambda e: ce.make_vec("CartPole-v1", 2, bakend=HERE),
        "make_vec(bakend=Local(",
        "did you mean backend=...? If the environment is to get it, write env_kwargs={'bakend': ...}",
    ),
    "an argument of Gymnasium's make_vec": (
        lambda e: ce.make_vec("CartPole-v1", 2, vectorization_mode="async"),
        "vectorization_mode='async'",
        "leave it out",
    ),
    "a wrapper instead of a list of them": (
        lambda e: ce.make_vec("CartPole-v1", 2, wrappers=gym.wrappers.RecordEpisodeStatistics),
        "make_vec(wrappers=<class RecordEpisodeStatistics>)",
        "write wrappers=[...]",
    ),
    "a misspelt list of wrappers": (
        lambda e: ce.make_vec("CartPole-v1", 2, wrapper=[gym.wrappers.RecordEpisodeStatistics]),
        "make_vec(wrapper=",
        "did you mean wrappers=...?",
    ),
    "wrappers of a vector simulator": (
        lambda e: ce.make_vec("CartPole-v1", 2, wrappers=[gym.Wrapper], simulator="native"),
        "make_vec(wrappers=...)",
        "leave out simulator='native'",
    ),
    "wrappers for nodes that take no code": (
        lambda e: ce.make_vec(
            "CartPole-v1", 2, wrappers=[gym.Wrapper], backend=ce.Loopback(nodes=1, allow_pickle=False)
        ),
        "wrappers cannot be sent",
        '"package:Name-v0"',
    ),
    # collecting
    "class of a rule": (lambda e: collect(e, sync=ce.APS), "sync=<class APS>", "write sync=APS(...)"),
    "rule by name": (lambda e: collect(e, sync="aps"), "sync='aps'", "write sync=APS()"),
    "threshold for a rule": (lambda e: collect(e, sync=0.02), "sync=0.02", "write sync=APS(threshold=0.02)"),
    "threshold as text": (lambda e: ce.APS("0.01"), "threshold='0.01'", "write threshold=0.01, without quotes"),
    "k as text": (lambda e: ce.Every("4"), "k='4'", "write k=4, without quotes"),
    "one info key": (lambda e: collect(e, info_keys="success"), "info_keys='success'", "write info_keys=['success']"),
    "a negative seed": (lambda e: collect(e, seed=-1), "seed=-1", "expected 0 or more"),
    "an unknown on_loss": (lambda e: collect(e, on_loss="drop"), "on_loss='drop'", 'expected "rerun" or "mask"'),
    "an unknown codec": (lambda e: collect(e, codec="zip"), "codec='zip'", "choose one of fp32"),
    "class of a policy": (
        lambda e: e.collector(ce.RandomPolicy),
        "agent=<class RandomPolicy>",
        "write RandomPolicy(...)",
    ),
    "class of a module": (lambda e: ce.TorchPolicy(torch.nn.Linear), "module=<class Linear>", "write Linear(...)"),
    "one prefix": (
        lambda e: ce.TorchPolicy(torch.nn.Linear(4, 2), acting="weight"),
        "acting='weight'",
        "write acting=['weight']",
    ),
    "weights as a list": (lambda e: ce.NumpyPolicy(len, [1]), "NumpyPolicy(values=[1])", "expected a dict"),
    "a module for discrete actions": (
        lambda e: agent_on(spaces.Discrete(2)),
        "Linear has none of the known shapes",
        "dist=lambda module, obs: torch.distributions.Categorical(logits=module(obs))",
    ),
    "a module for continuous actions": (
        lambda e: agent_on(spaces.Box(-1, 1, (2,))),
        "Linear has none of the known shapes",
        "dist=lambda module, obs: torch.distributions.Normal(module(obs), 0.5)",
    ),
    "a module for binary actions": (
        lambda e: agent_on(spaces.MultiBinary(2)),
        "Linear has none of the known shapes",
        "torch.distributions.Bernoulli(logits=module(obs))",
    ),
    "num_steps as text": (lambda e: collect(e).rollout("8"), "num_steps='8'", "write num_steps=8, without quotes"),
    "num_steps as a float": (lambda e: collect(e).rollout(8.0), "num_steps=8.0", "write num_steps=8"),
    "no steps": (lambda e: collect(e).rollout(0), "num_steps=0", "expected 1 or more"),
    "a rollout's timeout": (lambda e: collect(e).rollout(8, timeout_s="5"), "timeout_s='5'", "write timeout_s=5"),
    "a stream's min_envs": (lambda e: collect(e).stream(8, min_envs=9), "min_envs=9", "expected 1 to 2, or None"),
    "episodes as the agent": (lambda e: collect(e).evaluate(32), "agent=32", "write evaluate(episodes=32)"),
    # calls
    "a word as a seed": (
        lambda e: e.reset(seed=[1, "a"]),
        "seed=[1, 'a']",
        "expected whole numbers, or None for a slot",
    ),
    "options as a number": (lambda e: e.reset(options=3), "options=3", "expected a dict or None"),
    "a mask for slots": (
        lambda e: (e.reset(), e.send([0], np.array([True, False]))),
        "slots=array([ True, False])",
        "write np.flatnonzero(mask)",
    ),
    "one slot": (lambda e: (e.reset(), e.send([0], 1)), "slots=1", "expected a list of whole numbers"),
    "nodes of scale": (lambda e: e.scale("2"), "nodes='2'", "write nodes=2, without quotes"),
    "a state that is none": (lambda e: e.load_state_dict(3), "state=3", "pass what state_dict() returned"),
    "slots of set_attr": (lambda e: e.set_attr("x", 1, [5]), "slots=[5]", "different slots within 0..1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_what_was_given_and_what_to_do(name, envs):
    call, given, advice = MISTAKES[name]
    with pytest.raises(ce.ClusterEnvError) as caught:
        call(envs)
    text = str(caught.value)
    assert given in text and advice in text, text
    assert isinstance(caught.value, ValueError), "an argument, not a moment"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_thunk_that_returns_no_environment(workers):
    for thunk, what in (
        (no_return, r"no_return \(test_mistakes.py, line \d+\) returned None, .* is its `return` missing"),
        (lambda: SpaceEnv, r"returned the class SpaceEnv, .* write SpaceEnv\(\.\.\.\)"),
        (lambda: gym.make_vec("CartPole-v1", 2, "sync"), r"returned a vector environment.*Vector\(fn\)"),
        (lambda: "CartPole-v1", "returned str without reset, step, observation_space, action_space"),
    ):
        with pytest.raises(ce.EnvError, match=what):
            ce.ClusterEnv([thunk] * 2, backend=ce.Local(workers=workers))
    with pytest.raises(ce.EnvError, match=r"test_mistakes.py, line \d+\) returned None, .* is its `return` missing"):
        ce.make_vec("CartPole-v1", 2, wrappers=[lambda env: None], backend=ce.Local(workers=workers))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["slurm", "nodes=four"], "Slurm(nodes='four'): expected a whole number"),
        (["slurm", "nodes"], "'nodes': expected NAME=VALUE"),
        (["slurm", "partitoin=cpu"], "Slurm has no option 'partitoin'; did you mean partition=...?"),
        (["kubernetes"], "Kubernetes needs image: write image=..."),
    ],
)
def test_a_mistake_on_the_command_line(options, text, capsys):
    assert main(["script", *options]) == 2
    assert text in capsys.readouterr().err


def test_numbers_that_look_like_names_are_names_on_the_command_line(capsys):
    assert main(["script", "slurm", "nodes=2", "account=123", "time_limit=60"]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --account=123\n" in printed and "#SBATCH --time=60\n" in printed


class TakesBakend(SpaceEnv):
    def __init__(self, bakend="none", **kwargs):
        super().__init__(BOX, spaces.Discrete(2))
        self.bakend, self.kwargs = bakend, kwargs


def test_make_vec_passes_on_what_the_constructor_takes():
    gym.register("TakesBakend-v0", entry_point=TakesBakend)
    try:
        with ce.make_vec("TakesBakend-v0", 1, backend=HERE, bakend="mine", env_kwargs={"recover": 1}) as envs:
            assert envs.get_attr("bakend") == ("mine",) and envs.get_attr("kwargs") == ({"recover": 1},)
        with pytest.raises(ce.SpecError, match=r"make_vec\(recover=1\).*did you mean recovery"):
            ce.make_vec("TakesBakend-v0", 1, backend=HERE, recover=1)
    finally:
        del gym.registry["TakesBakend-v0"]


def test_numbers_of_numpy_and_paths_are_taken():
    with ce.ClusterEnv("CartPole-v1", np.int64(2), backend=ce.Local(workers=np.int32(0))) as envs:
        assert type(envs.num_envs) is int
        batch = envs.collector(ce.RandomPolicy(), seed=np.int64(3), info_keys=("a",)).rollout(np.int16(4))
        assert batch.num_steps == 4
    assert ce.Slurm(2, folder=Path("keys"), setup=("a", "b")).folder == Path("keys")
    assert ce.Recovery(step_timeout_s=np.float32(2), backoff_s=[0, 1]).backoff_s == [0, 1]


def test_repr_of_aps_shows_the_threshold_in_effect():
    assert repr(ce.APS()) == "APS(threshold=0.01, max_lag=None, max_fragments=64, min_updates=1, z=1.0)"
    assert repr(ce.APS(ess=0.95, max_lag=3)).startswith("APS(ess=0.95 (threshold 0.0256), max_lag=3,")


@pytest.mark.parametrize(
    ("value", "kind", "is_one"),
    [
        (True, int, False),
        (np.int64(1), int, True),
        (1, float, True),
        (np.bool_(True), bool, True),
        (None, int | None, True),
        ("a", Literal["a", "b"], True),
        (1, Literal[True], False),
        ([1.0, 2], tuple[float, float], True),
        ([1.0], tuple[float, float], False),
        ("ab", tuple[str, ...], False),
        (Path(), os.PathLike[str], True),
        (dict, dict, False),
    ],
)
def test_what_counts_as_a_kind(value, kind, is_one):
    assert fits(value, kind) is is_one


def test_words_for_kinds():
    assert describe(int | None) == "a whole number or None"
    assert describe(str | float | None) == "a string, a number or None"
    assert describe(tuple[float, float, float]) == "3 numbers"
    assert closest("KUBERNETS", ["Kubernetes", "Ray"]) == "Kubernetes" and closest("x", ["Ray"]) is None
