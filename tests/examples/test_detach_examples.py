"""The examples whose workers act, run as a reader would run them, only shorter; and what their learners rely on."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import clusterenv as ce
from example_scripts import load, run, summary

pytestmark = pytest.mark.examples


def test_ppo_detach_runs_draws_its_curve_and_says_where_the_time_went(tmp_path):
    png = tmp_path / "new folder" / "curve.png"
    output = run("ppo_detach.py", "--total-steps", 3000, "--num-envs", 4, "--workers", 2, "--demo", "--plot", png)
    assert summary(output, "steps") >= 3000
    assert -1000 < summary(output, "evaluation") < 350
    assert summary(output, "target") == 200, "LunarLander's own threshold"
    names = ("environment", "policy", "waiting", "learning", "evaluating", "other")
    assert sum(summary(output, name) for name in names) == pytest.approx(summary(output, "seconds"), abs=0.5)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in output, "no terminal, so plain lines"


def test_ppo_detach_learns_the_same_whatever_the_number_of_workers():
    options = ("--env-id", "CartPole-v1", "--total-steps", 5000, "--num-envs", 6, "--seed", 7)
    none, three = (run("ppo_detach.py", *options, "--workers", workers) for workers in (0, 3))
    pattern = re.compile(r"^(?:steps|evaluation) .*$", re.MULTILINE)
    assert pattern.findall(none) == pattern.findall(three) != []


@pytest.mark.parametrize(
    "name, steps, low, high",
    [
        ("ppo_continuous.py", 3000, -2000, 0),
        ("ppo_pixels.py", 2000, -1, 1),
        ("ppo_recurrent.py", 1000, 8, 500),
    ],
)
def test_the_example_runs(name, steps, low, high):
    output = run(name, "--total-steps", steps, "--num-envs", 8, "--workers", 2)
    assert summary(output, "steps") >= steps
    assert summary(output, "seconds") > 0
    assert low <= summary(output, "evaluation") <= high


def test_ppo_continuous_writes_for_tensorboard(tmp_path):
    run("ppo_continuous.py", "--total-steps", 3000, "--num-envs", 8, "--workers", 2, "--log", tmp_path)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    steps = [event.step for event in read.Scalars("collect/steps")]
    assert steps == [1600, 3200] and {"sync/bytes_saved", "charts/episodic_return"} <= set(read.Tags()["scalars"])


@pytest.mark.parametrize("act", ["workers", "head"])
def test_ppo_atari_runs_wherever_its_policy_acts(act, tmp_path):
    png = tmp_path / "pong.png"
    options = ("--num-envs", 4, "--num-steps", 16, "--epochs", 1, "--eval-episodes", 1, "--act", act)
    output = run("ppo_atari.py", "--total-steps", 128, "--workers", 2, *options, "--plot", png)
    assert summary(output, "steps") >= 128
    assert -21 <= summary(output, "evaluation") <= 21
    assert f"acted       {act}" in output
    assert png.read_bytes().startswith(b"\x89PNG")


def test_ppo_detach_learns_nothing_from_rows_that_are_not_valid():
    example = load("ppo_detach.py")
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=0)) as envs:
        torch.manual_seed(1)
        agent = example.Agent(4, 2)
        batch = envs.collector(agent, seed=1).rollout(32).torch()
    valid = batch.valid.clone()
    valid[20:, 1] = False

    def learned(filler: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        pupil = example.Agent(4, 2)
        torn = {name: getattr(batch, name).clone() for name in ("obs", "rewards", "logprobs")}
        for values in torn.values():
            values[~valid] = filler
        torn["obs"][20, 1] = batch.obs[20, 1]  # was seen: the environment failed in the step from there
        optimizer = torch.optim.Adam(pupil.parameters())
        example.learn(pupil, optimizer, dataclasses.replace(batch, valid=valid, **torn))
        return pupil.state_dict()

    zero, nan = learned(0.0), learned(float("nan"))
    for name, weights in zero.items():
        assert torch.equal(weights, nan[name]), name


def test_ppo_recurrent_replays_what_the_workers_did():
    example = load("ppo_recurrent.py")
    torch.manual_seed(1)
    agent = example.Agent(2, 2)
    with torch.no_grad():
        agent.actor.weight.mul_(100.0)  # else all actions are about as likely, whatever the state
    policy = ce.TorchPolicy(agent, dist=example.act, initial_state=lambda rows: torch.zeros(rows, example.HIDDEN))
    with ce.ClusterEnv(example.make_env, num_envs=5, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(policy, seed=1)
        collector.rollout(10)
        batch = collector.rollout(50).torch()
    assert batch.initial_state.abs().max() > 0 and batch.episode_starts.any()
    with torch.no_grad():
        states = example.replay(agent, batch, slice(None))
        logprobs = example.Categorical(logits=agent.actor(states)).log_prob(batch.actions)
    np.testing.assert_allclose(logprobs, batch.logprobs, atol=1e-4)
    estimate = example.estimate_advantages(agent, batch)
    np.testing.assert_allclose(estimate.values, agent.critic(states).squeeze(-1).detach(), atol=1e-5)
