"""The examples that learn from older policies' data: which weights travel, and that fresh data makes no difference."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import clusterenv as ce
from clusterenv.learning import gae
from example_scripts import EXAMPLES, load, run, summary

pytestmark = pytest.mark.examples


@pytest.mark.parametrize("sync, few", [("aps", 1), ("every", 3), ("always", 6)])
def test_ppo_detach_pulls_as_the_rule_says_and_draws_it(sync, few, tmp_path):
    png = tmp_path / "curve.png"
    rule = ("--sync", sync, "--threshold", 10.0, "--every", 2)
    options = ("--env-id", "CartPole-v1", "--total-steps", 6000, "--num-envs", 4, "--workers", 2, "--target", "inf")
    output = run("ppo_detach.py", *options, *rule, "--plot", png)
    assert summary(output, "versions") == 6, "one for each rollout"
    assert summary(output, "pulls") == few
    weights = 4 * (4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2)  # the actor's alone
    assert few * weights < summary(output, "bytes") < few * (weights + 2000)
    assert f"at every update 6, {6 / few:.1f} times as many bytes" in output
    assert 0.5 < summary(output, "ESS") <= 1.0
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sync", ["aps", "always"])
def test_impala_runs_and_says_how_old_its_data_was(sync):
    output = run("impala.py", "--total-steps", 20000, "--num-envs", 8, "--workers", 2, "--sync", sync)
    assert summary(output, "steps") >= 20000
    assert 8 <= summary(output, "evaluation") <= 500
    assert summary(output, "target") == 475, "CartPole's own threshold"
    updates, pulls = summary(output, "updates"), summary(output, "pulls")
    assert updates == -(-20000 // (4 * 32)), "one for each worker's fragment"
    assert 1 < pulls < updates / 2 if sync == "aps" else updates / 2 < pulls <= updates
    assert summary(output, "lag") > 0.0, "a worker runs ahead"
    assert 0.5 < summary(output, "ESS") <= 1.0
    for names in (("waiting", "learning", "evaluating", "other"), ("environment", "policy", "idle")):
        assert sum(summary(output, name) for name in names) == pytest.approx(summary(output, "seconds"), abs=0.5)


def test_impala_ends_cleanly_on_ctrl_c():
    # A session of its own, so that the signal reaches the whole process group as a terminal's Ctrl-C does.
    command = [sys.executable, str(EXAMPLES / "impala.py"), "--target", "inf", "--num-envs", "4", "--workers", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert "steps/s" in process.stdout.readline(), "the first line says that training has begun"
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert errors.endswith("interrupted; the environments are closed\n")
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", ["ppo_detach.py", "impala.py"])
@pytest.mark.parametrize("options", [("--threshold", "-1"), ("--threshold", "nan"), ("--every", "0")])
def test_a_rule_without_meaning_is_refused(name, options, capsys):
    with pytest.raises(SystemExit):
        load(name).main([*options])
    assert "--threshold must be 0 or more, --every at least 1" in capsys.readouterr().err


def rollout(agent: torch.nn.Module) -> ce.Rollout:
    with ce.ClusterEnv("CartPole-v1", num_envs=8, backend=ce.Local(workers=0)) as envs:
        return envs.collector(agent, seed=1).rollout(64).torch()


def plain_ppo(example, agent, optimizer, batch) -> None:
    """With the ratio to the policy that acted, and no weights."""
    estimate = gae(batch, agent.get_value, example.GAMMA, example.GAE_LAMBDA)
    obs, actions, logprobs = (getattr(batch.flatten(), name) for name in ("obs", "actions", "logprobs"))
    advantages, returns = estimate.advantages.flatten(), estimate.returns.flatten()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(example.EPOCHS):
        for index in torch.randperm(len(obs)).chunk(round(len(obs) / example.MINIBATCH_SIZE)):
            _, logprob, entropy, value = agent.get_action_and_value(obs[index], actions[index])
            ratio = (logprob - logprobs[index]).exp()
            clipped = ratio.clamp(1.0 - example.CLIP, 1.0 + example.CLIP)
            gain = torch.min(ratio * advantages[index], clipped * advantages[index])
            value_error = (value.squeeze(-1) - returns[index]).square()
            loss = example.VALUE_COEF * value_error.mean() - gain.mean() - example.ENTROPY_COEF * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), example.MAX_GRAD_NORM)
            optimizer.step()


@pytest.mark.parametrize("epochs", [1, 4])
def test_on_fresh_data_decoupled_ppo_is_ppo(epochs, monkeypatch):
    example = load("ppo_detach.py")
    monkeypatch.setattr(example, "EPOCHS", epochs)
    monkeypatch.setattr(example, "MINIBATCH_SIZE", 512 // epochs)  # first one gradient of all rows, then 16 of parts
    monkeypatch.setattr(example, "REWARD_SCALE", 1.0)
    torch.manual_seed(1)
    agent = example.Agent(4, 2)
    start = {name: weights.clone() for name, weights in agent.state_dict().items()}
    fresh = rollout(agent)

    learned = {}
    for learn in (example.learn, lambda *args: plain_ppo(example, *args)):
        pupil = example.Agent(4, 2)
        pupil.load_state_dict(start)
        # Not Adam: it makes large steps of the last digits of small gradients.
        optimizer = torch.optim.SGD(pupil.parameters(), lr=0.3)
        torch.manual_seed(2)
        learn(pupil, optimizer, fresh)
        learned[learn] = [(weights.detach(), weights.grad) for weights in pupil.parameters()]
    ours, plain = learned.values()
    for (weights, gradient), (plain_weights, plain_gradient), old in zip(ours, plain, start.values(), strict=True):
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(weights, plain_weights, rtol=1e-3, atol=1e-5)
        assert not torch.equal(weights, old)


def test_on_stale_data_the_clip_is_centred_on_the_policy_as_the_update_starts(monkeypatch):
    example = load("ppo_detach.py")
    for name, value in {"EPOCHS": 1, "MINIBATCH_SIZE": 512, "ENTROPY_COEF": 0.0, "MAX_GRAD_NORM": np.inf}.items():
        monkeypatch.setattr(example, name, value)
    torch.manual_seed(1)
    agent = example.Agent(4, 2)
    fresh = rollout(agent)
    # Every action as if it had been less likely when it was taken. Around the policy that acted, 1.5 would be clipped.
    stale = dataclasses.replace(fresh, logprobs=fresh.logprobs - np.log(1.5))
    gradients = []
    for batch in (fresh, stale):
        update = example.learn(agent, torch.optim.SGD(agent.parameters(), lr=0.0), batch)
        assert update.kl == pytest.approx(0.0, abs=1e-6)
        gradients.append([weights.grad.clone() for weights in agent.actor.parameters()])
    for of_fresh, of_stale in zip(*gradients, strict=True):
        torch.testing.assert_close(of_stale, 1.5 * of_fresh, rtol=1e-3, atol=1e-6)
    assert update.drift == pytest.approx(0.5 - np.log(1.5), rel=1e-3)


def test_impala_learns_nothing_from_rows_that_are_not_valid():
    example = load("impala.py")
    torch.manual_seed(1)
    agent = example.Agent(4, 2)
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=0)) as envs:
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
