"""The examples that learn from a stream, run as a reader would run them, only shorter; and what they rely on."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

import clusterenv as ce
from example_scripts import interrupt, load, run, summary

pytestmark = pytest.mark.examples


@pytest.mark.parametrize(
    "name, sync, low, high",
    [("dqn.py", "aps", 8, 500), ("dqn.py", "every", 8, 500), ("sac.py", "aps", -2000, 0)],
)
def test_the_example_runs_and_says_what_travelled(name, sync, low, high):
    output = run(name, "--total-steps", 2200, "--num-envs", 8, "--workers", 2, "--sync", sync, "--every", 50)
    steps, updates, pulls = (summary(output, key) for key in ("steps", "updates", "pulls"))
    assert steps >= 2200
    assert low <= summary(output, "evaluation") <= high
    example = load(name)
    warmup = 8 * example.NUM_STEPS * -(-example.WARMUP_STEPS // (8 * example.NUM_STEPS))
    assert updates == (steps - warmup) // example.STEPS_PER_UPDATE, "whatever the machine's speed"
    assert 1 <= pulls <= updates / (50 if sync == "every" else 1) + 1
    assert summary(output, "against every update") == pytest.approx((updates + 1) / pulls, abs=0.06)
    spent = sum(summary(output, key) for key in ("collecting", "learning", "publishing", "evaluating", "other"))
    assert spent == pytest.approx(summary(output, "seconds"), abs=0.5)
    if name == "sac.py":
        spaces = (gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-2, 2, (1,)))
        actor = sum(4 * weights.numel() for weights in example.Agent(*spaces).actor.parameters())
        assert actor < summary(output, "weight bytes") / pulls < 1.05 * actor, "the critics stay at home"


def test_dqn_ends_cleanly_on_ctrl_c():
    interrupt("dqn.py", "--target", "inf", "--total-steps", 100_000_000, "--num-envs", 4)


def dqn_after(example, transitions):
    torch.manual_seed(2)
    replay = example.Replay(1000, gym.spaces.Box(-1, 1, (4,)), seed=3)
    added = replay.add(transitions)
    q_net, target_net = example.mlp(4, 2), example.mlp(4, 2)
    optimizer = torch.optim.Adam(q_net.parameters())
    for _ in range(3):
        example.learn(q_net, target_net, optimizer, replay.sample(256))
    return added, q_net.state_dict()


def sac_after(example, transitions):
    torch.manual_seed(2)
    spaces = (gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-2, 2, (1,)))
    replay = example.Replay(1000, *spaces, seed=3)
    added = replay.add(transitions)
    agent = example.Agent(*spaces)
    learner = example.Learner(agent)
    for _ in range(3):
        learner.learn(*replay.sample(256))
    return added, agent.state_dict()


@pytest.mark.parametrize(
    "name, env_id, after", [("dqn.py", "CartPole-v1", dqn_after), ("sac.py", "Pendulum-v1", sac_after)]
)
def test_nothing_is_learned_from_rows_that_are_not_valid(name, env_id, after):
    example = load(name)
    with ce.ClusterEnv(env_id, num_envs=4, backend=ce.Local(workers=0)) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(32)
    valid = batch.valid.copy()
    valid[20:, 1] = False

    def learned(filler: float):
        torn = {key: getattr(batch, key).copy() for key in ("obs", "rewards")}
        for values in torn.values():
            values[~valid] = filler
        torn["obs"][20, 1] = batch.obs[20, 1]  # was seen: the environment failed in the step from there
        return after(example, dataclasses.replace(batch, valid=valid, **torn).transitions())

    (added, zero), (_, nan) = learned(0.0), learned(float("nan"))
    assert added == valid.sum() == 4 * 32 - 12
    for key, weights in zero.items():
        assert torch.equal(weights, nan[key]), key


def test_the_replay_buffer_keeps_the_newest_rows_together():
    example = load("dqn.py")
    replay = example.Replay(50, gym.spaces.Box(-1, 1, (4,)), seed=3)
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        rows = [collector.rollout(8).transitions() for _ in range(3)]
    for part in rows:
        assert replay.add(part) == 32
    for key in ("obs", "actions", "rewards", "next_obs", "terminations"):
        newest = np.concatenate([getattr(part, key) for part in rows])[-50:]
        np.testing.assert_array_equal(np.roll(getattr(replay, key), -96 % 50, axis=0), newest)


def test_the_sac_agent_acts_as_its_workers_do():
    example = load("sac.py")
    torch.manual_seed(1)
    with ce.ClusterEnv("Pendulum-v1", num_envs=4, backend=ce.Local(workers=0)) as envs:
        agent = example.Agent(envs.single_observation_space, envs.single_action_space)
        policy = ce.TorchPolicy(agent, dist="tanh-normal", acting=["actor"])
        batch = envs.collector(policy, seed=1).rollout(2000).torch().flatten()
    with torch.no_grad():
        actions, logprobs = agent.act(batch.obs)
    # Other noise, the same distribution; the environment's action is twice the squashed one, which halves its density.
    assert actions.mean().item() == pytest.approx(batch.actions.mean().item(), abs=0.1)
    assert actions.std().item() == pytest.approx(batch.actions.std().item(), abs=0.1)
    assert logprobs.mean().item() - np.log(2.0) == pytest.approx(batch.logprobs.mean().item(), abs=0.1)
