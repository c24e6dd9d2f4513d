"""APS on real workers: what moves, when, and how well the drift is known."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import clusterenv as ce
from clusterenv.policy.acting.distributions import family_for
from clusterenv.policy.sync.divergence import divergence
from clusterenv.policy.weights import encoding
from clusterenv.testing import Virtual
from policies import net, nudge

TWO = ce.Local(workers=2, preload=("torch", "gymnasium.envs.box2d.lunar_lander"))  # imported once, not by each worker


def pulls(envs):
    return [event.reason for event in envs.events() if event.kind == "pull"]


def test_unchanged_weights_move_no_byte_and_always_moves_every_version():
    module = net()
    policy = ce.TorchPolicy(module, dist="categorical")
    size = None
    generator = torch.Generator().manual_seed(0)
    with ce.ClusterEnv("LunarLander-v3", 8, backend=TWO) as envs:
        collector = envs.collector(policy, seed=1)
        for _ in range(3):
            collector.rollout(4)
        size = len(encoding.encode(policy.weights()))
        assert collector.stats()["pulls"] == 1 and collector.stats()["weight_bytes"] == size
        for _ in range(4):
            nudge(module, 0.01, generator)
            collector.publish()  # twice before the rollout: coalesced into what is newest then
            nudge(module, 0.01, generator)
            assert (collector.rollout(4).versions == collector.stats()["version"]).all()
        stats, summary = collector.stats(), collector.summary()
        assert stats["pulls"] == stats["pushes"] == 5 and stats["weight_bytes"] == stats["pushed_bytes"] == 5 * size
        assert stats["version"] == 8 and stats["threshold"] is None
        assert summary["sync/bytes_saved"] == summary["sync/pulls_saved"] == summary["sync/lag"] == 0.0


def test_a_summary_tells_what_the_rule_and_the_codec_saved_and_how_stale_the_data_was():
    """Compared with every version that was the newest when fragments were requested, sent whole."""
    module = net()
    policy = ce.TorchPolicy(module, dist="categorical")
    generator = torch.Generator().manual_seed(0)
    lags, drifts = [], []
    with ce.ClusterEnv("LunarLander-v3", 8, backend=TWO) as envs:
        collector = envs.collector(policy, seed=1, sync=ce.APS(threshold=0.05, max_lag=4), codec="fp16")
        for _ in range(9):
            batch = collector.rollout(8)
            lags += [receipt.lag for receipt in batch.receipts]
            drifts += [receipt.drift for receipt in batch.receipts if receipt.drift is not None]
            nudge(module, 0.001, generator)
            collector.publish()  # with the next one, coalesced into what is newest at the next request
            nudge(module, 0.001, generator)
        collector.evaluate(episodes=2)  # sends the newest weights: not a pull
        stats, summary, size = collector.stats(), collector.summary(), len(encoding.encode(policy.weights()))
    assert stats["pushes"] == 9 and stats["pushed_bytes"] == 9 * size and stats["threshold"] == 0.05
    assert stats["pulls"] == 5, "rollouts 0, 2, 4, ...: max_lag is reached by two updates of two versions"
    assert stats["evaluation_bytes"] == size
    assert summary["sync/pulls_saved"] == 4.0
    assert summary["sync/bytes_saved"] == 9 * size - stats["weight_bytes"] and stats["weight_bytes"] < 5 * size
    assert summary["sync/lag"] == np.mean(lags) == pytest.approx(8 / 9)
    assert summary["sync/mean_drift"] == pytest.approx(np.mean(drifts)) and max(drifts) > 0


def test_in_a_stream_always_saves_nothing():
    module = net(2, 4)
    generator = torch.Generator().manual_seed(0)
    with ce.ClusterEnv("CartPole-v1", 8, backend=TWO) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1)
        for i, _ in enumerate(collector.stream(4)):
            nudge(module, 0.01, generator)
            collector.publish()
            if i == 20:
                break
        stats = collector.stats()
    assert stats["pushes"] == stats["pulls"] > 5 and stats["pushed_bytes"] == stats["weight_bytes"]
    assert stats["mean_lag"] > 0, "versions are published while fragments run"


@pytest.mark.parametrize("rule", [ce.Never(), ce.Every(3), lambda standing: standing.lag == 2])
def test_simple_rules_pull_when_they_say(rule):
    module = net()
    generator = torch.Generator().manual_seed(0)
    with ce.ClusterEnv("LunarLander-v3", 4, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, sync=rule)
        versions = []
        for _ in range(8):
            versions.append(int(collector.rollout(3).versions[0, 0]))
            nudge(module, 0.01, generator)
    if isinstance(rule, ce.Never):
        assert versions == [0] * 8
    else:
        gap = 3 if isinstance(rule, ce.Every) else 2
        assert versions == [v - v % gap for v in range(8)]


def test_aps_pulls_where_the_true_drift_crosses_the_threshold():
    """The drift is recomputed from all recorded states of the acting version, in float64, with torch."""
    module, delta = net(), 0.02
    family = family_for("categorical", gym.spaces.Discrete(4))
    generator = torch.Generator().manual_seed(2)
    ratios, wrong, decided = [], 0, 0
    with ce.ClusterEnv("LunarLander-v3", 32, backend=TWO) as envs:
        rule = ce.APS(threshold=delta, z=0.0)
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, sync=rule)
        acting, states = net(), []
        for _ in range(40):
            before = collector.stats()["pulls"]
            if states:
                with torch.no_grad():
                    obs = torch.from_numpy(np.concatenate(states))
                    true = divergence(family)(acting(obs).numpy(), module(obs).numpy(), {}).mean()
            batch = collector.rollout(64)
            pulled = collector.stats()["pulls"] > before
            if states:
                said = collector.stats()["drift_at_pull"] if pulled else batch.receipts[0].drift
                ratios.append(said / true)
                if abs(true - delta) > 0.15 * delta:
                    decided += 1
                    wrong += pulled != (true > delta)
            if pulled:
                acting.load_state_dict(module.state_dict())
                states = []
            states.append(batch.obs.reshape(-1, 8))
            nudge(module, 0.04, generator)
        count = collector.stats()["pulls"]
    assert 4 < count < 30, "neither always nor never"
    assert decided > 20 and wrong == 0
    assert 0.8 < np.median(ratios) < 1.25


def test_a_drift_that_stays_below_the_threshold_does_not_hold_a_version_for_ever(caplog):
    module, generator = net(), torch.Generator().manual_seed(2)
    with ce.ClusterEnv("LunarLander-v3", 8, backend=TWO) as envs:
        policy = ce.TorchPolicy(module, dist="categorical")
        collector = envs.collector(policy, seed=1, sync=ce.APS(threshold=9.0, max_fragments=3))
        versions = []
        for _ in range(8):
            versions.append(int(collector.rollout(8).versions[0, 0]))
            nudge(module, 0.01, generator)
    assert versions == [0, 0, 0, 3, 3, 3, 6, 6], "each worker's fragments count by themselves"
    assert caplog.text.count("fragments with one version") == 1, "said once"


def test_receipts_say_how_stale_the_data_is():
    module = net()
    generator = torch.Generator().manual_seed(2)
    with ce.ClusterEnv("LunarLander-v3", 8, backend=TWO) as envs:
        policy = ce.TorchPolicy(module, dist="categorical")
        collector = envs.collector(policy, seed=1, sync=ce.APS(threshold=1.0, max_lag=3))
        lags = []
        for _ in range(7):
            batch = collector.rollout(16)
            lags.append(batch.receipts[0].lag)
            assert all(r.version == batch.versions[0, r.slots[0]] for r in batch.receipts)
            if batch.receipts[0].lag:
                assert batch.receipts[0].drift > 0 and batch.receipts[0].drift_se > 0
            nudge(module, 0.02, generator)
        assert lags == [0, 1, 2, 0, 1, 2, 0]
        stats = collector.stats()
        assert stats["drift_bytes"] < 0.2 * stats["fragment_bytes"], "of 128 states 64; one in 64 where there are many"
        assert any("max_lag=3" in reason for reason in pulls(envs))


def test_a_threshold_of_zero_pulls_every_time_and_tells_how_far_one_update_goes():
    module = net()
    generator = torch.Generator().manual_seed(2)
    with ce.ClusterEnv("LunarLander-v3", 8, backend=Virtual(2)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, sync=ce.APS(threshold=0))
        kappas = []
        for size in (0.01, 0.02, 0.04, 0.04):
            collector.rollout(16)
            nudge(module, size, generator)
            kappas.append(collector.stats()["drift_at_pull"])
        assert collector.stats()["pulls"] == 2 * 4
    assert kappas[0] is None and 0 < kappas[1] < kappas[2] < kappas[3]


@pytest.mark.parametrize("rule", [ce.Always(), ce.APS(threshold=9.0)], ids=lambda rule: type(rule).__name__)
def test_in_a_stream_a_receipt_speaks_of_the_newest_at_delivery(rule):
    """The learner has published since the fragment was asked for: the weights were the newest then, and are not now."""
    module = net()
    generator = torch.Generator().manual_seed(2)
    with ce.ClusterEnv("LunarLander-v3", 8, backend=Virtual(2)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, sync=rule)
        stale = []
        stream = collector.stream(16, queue=1)
        for _ in range(12):
            receipt = next(stream).receipts[0]
            if receipt.lag:
                stale.append(receipt.drift)
            nudge(module, 0.02, generator)
            collector.publish()
        stream.close()
    if isinstance(rule, ce.Always):
        assert len(stale) > 6 and set(stale) == {None}, "not measured, and not zero"
    else:
        assert len(stale) > 6 and min(stale) > 0 and stale[-1] > stale[0], "nothing was pulled: it grows"


def test_packed_weights_leave_a_drift_that_the_receipt_tells():
    module = net()
    generator = torch.Generator().manual_seed(2)
    rule = ce.APS(threshold=0.01)
    with ce.ClusterEnv("LunarLander-v3", 8, backend=Virtual(2)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, sync=rule, codec="auto")
        fresh = []
        for _ in range(12):
            receipt = collector.rollout(16).receipts[0]
            if not receipt.lag:
                fresh.append(receipt.drift)
            nudge(module, 0.05, generator)
        assert max(fresh) <= rule.delta / 4 and min(fresh[1:]) > 0
        forms = collector.stats()["nodes"][0]["forms"]
        assert forms.keys() - {"fp32"}, forms
    with ce.ClusterEnv("LunarLander-v3", 8, backend=Virtual(2)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, codec="int8")
        collector.rollout(16)
        nudge(module, 0.05, generator)
        assert collector.rollout(16).receipts[0][3:] == (0, None, None), "nobody measured it"


def test_weights_that_a_node_has_are_not_taken_for_the_exact_ones_of_their_version():
    module = net()
    with ce.ClusterEnv("LunarLander-v3", 8, backend=Virtual(1)) as envs:
        policy = ce.TorchPolicy(module, dist="categorical")
        collector = envs.collector(policy, seed=1, sync=ce.APS())
        rows = {"obs": collector.rollout(4).obs[0]}
        publisher = collector._sync.publisher
        exact = publisher._forward_newest(rows)
        near = {name: values * np.float32(0.5) for name, values in policy.weights().items()}
        publisher.weights_of = {publisher.version: encoding.encode(near)}.get
        assert not np.allclose(publisher._forward_of(publisher.version, rows), exact)
        assert np.array_equal(publisher._forward_newest(rows), exact)


def test_a_state_of_earlier_versions_can_be_loaded_in_the_middle_of_a_run():
    module = net()
    generator = torch.Generator().manual_seed(2)
    with ce.ClusterEnv("LunarLander-v3", 8, backend=Virtual(2)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, sync=ce.APS(threshold=9.0))
        collector.rollout(16)
        state, weights = collector.state_dict(), copy.deepcopy(module.state_dict())
        for _ in range(6):
            nudge(module, 0.5, generator)
            collector.rollout(16)
        with pytest.raises(ce.DeadlineError):
            collector.rollout(16, timeout_s=0)
        with pytest.raises(ce.UsageError, match="a fragment is under way"):
            collector.load_state_dict(state)
        collector.rollout(16)
        collector.load_state_dict(state)
        module.load_state_dict(weights)
        batch = collector.rollout(16)
        assert (batch.versions == 1).all() and batch.receipts[0].lag == 0
        logits = module(torch.from_numpy(batch.obs))
        ours = torch.distributions.Categorical(logits=logits).log_prob(torch.from_numpy(batch.actions))
        assert np.allclose(ours.detach().numpy(), batch.logprobs, atol=1e-5), "the workers act with what was loaded"


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 4)


def gru_dist(module, obs, state, start):
    state = module.cell(obs, state * (1.0 - start)[:, None])
    return torch.distributions.Categorical(logits=module.head(state)), state


def test_recurrent_policies_are_replayed():
    """The same weights under a new number have no drift; other weights have."""
    torch.manual_seed(0)
    module = Gru()
    policy = ce.TorchPolicy(module, dist=gru_dist, initial_state=lambda rows: torch.zeros(rows, 8))
    with ce.ClusterEnv("LunarLander-v3", 6, backend=TWO) as envs:
        collector = envs.collector(policy, seed=1, sync=ce.APS(threshold=1e9))
        for steps in (5, 40, 40):
            collector.rollout(steps)
        publisher = collector._sync.publisher
        with torch.no_grad():
            module.head.bias.add_(1e-7)
        collector.rollout(40)
        assert collector.stats()["drift"] < 1e-10
        with torch.no_grad():
            module.head.weight.mul_(3.0)
        collector.rollout(40)
        assert collector.stats()["drift"] > 1e-4 and publisher.version == 2


def test_a_rule_that_raises_leaves_everything_usable():
    with ce.ClusterEnv("CartPole-v1", 4, backend=ce.Local(workers=1)) as envs:
        policy = ce.TorchPolicy(net(2, 4), dist="categorical")
        collector = envs.collector(policy, seed=1, sync=lambda standing: 1 // 0)
        collector.rollout(3)  # nothing loaded yet: no rule is asked
        nudge(policy.module, 0.1, torch.Generator().manual_seed(0))
        with pytest.raises(ce.PolicyError, match=r"sync rule .* raised"):
            collector.rollout(3)
        assert envs.collector(policy, seed=1).rollout(3).valid.all()
        with pytest.raises(ce.PolicyError, match="ess"):
            envs.collector(ce.TorchPolicy(net(2, 4), dist="epsilon-greedy"), sync=ce.APS(ess=0.9))


def test_the_drift_does_not_depend_on_who_sent_the_samples():
    """More samples than a reservoir holds, from one process or three."""
    seen = []
    for workers in (0, 3):
        module = net(2, 4)
        with ce.ClusterEnv("CartPole-v1", 48, backend=ce.Local(workers=workers, preload=("torch",))) as envs:
            policy = ce.TorchPolicy(module, dist="categorical")
            collector = envs.collector(policy, seed=1, sync=ce.APS(threshold=10.0))
            generator = torch.Generator().manual_seed(0)
            drifts = []
            for _ in range(5):
                drifts.append(collector.rollout(256).receipts[0].drift)
                nudge(module, 0.02, generator)
            seen.append(drifts)
    assert seen[0][-1] > 0 and seen[0] == seen[1]
