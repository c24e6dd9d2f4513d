"""Rules, divergences and the drift table: pure, against torch and Monte Carlo."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

import clusterenv as ce
from clusterenv.policy.acting.distributions import family_for
from clusterenv.policy.acting.random_streams import Streams
from clusterenv.policy.sync.divergence import divergence
from clusterenv.policy.sync.drift import CAPACITY, DriftTable
from clusterenv.policy.sync.rules import Standing, decide, fit
from policies import draw, logprob

BOX = spaces.Box(-2.0, 3.0, (3,), np.float32)
SPACES = {
    "categorical": spaces.Discrete(5),
    "multi-categorical": spaces.MultiDiscrete([3, 2, 4]),
    "bernoulli": spaces.MultiBinary(4),
    "normal": BOX,
    "tanh-normal": BOX,
    "deterministic": BOX,
    "epsilon-greedy": spaces.Discrete(5),
}


def torch_kl(name, old, new):
    old, new = torch.from_numpy(old).double(), torch.from_numpy(new).double()
    if name == "categorical":
        return kl_divergence(Categorical(logits=old), Categorical(logits=new))
    if name == "multi-categorical":
        pairs = zip(old.split([3, 2, 4], 1), new.split([3, 2, 4], 1), strict=True)
        return sum(kl_divergence(Categorical(logits=a), Categorical(logits=b)) for a, b in pairs)
    if name == "bernoulli":
        return kl_divergence(Bernoulli(logits=old), Bernoulli(logits=new)).sum(1)
    a, b = Normal(old[:, :3], old[:, 3:].exp()), Normal(new[:, :3], new[:, 3:].exp())
    return kl_divergence(a, b).sum(1)


DISTRIBUTIONS = ["categorical", "multi-categorical", "bernoulli", "normal", "tanh-normal"]


@given(st.sampled_from(DISTRIBUTIONS), st.integers(0, 10**6))
def test_divergences_are_torchs_own(name, seed):
    family = family_for(name, SPACES[name])
    rng = np.random.default_rng(seed)
    old = (2.0 * rng.normal(size=(20, family.num_params))).astype(np.float32)
    new = old + (rng.choice([0.01, 0.3, 2.0]) * rng.normal(size=old.shape)).astype(np.float32)
    ours = divergence(family)(old, new, {})
    assert np.allclose(ours, torch_kl(name, old, new).numpy(), rtol=1e-6, atol=1e-10)
    assert np.allclose(divergence(family)(old, old, {}), 0.0, atol=1e-12)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_divergences_agree_with_monte_carlo(name):
    family = family_for(name, SPACES[name])
    rng = np.random.default_rng(3)
    old = np.tile((0.5 * rng.normal(size=(1, family.num_params))).astype(np.float32), (60_000, 1))
    new = old + (0.2 * rng.normal(size=(1, family.num_params))).astype(np.float32)
    noise = Streams(1).draw([0], [0], len(old), family.noise, family.noise_size)[:, 0]
    sample = draw(family, old, noise)
    ratios = sample.logprobs.astype(np.float64) - logprob(name, new, sample.actions, SPACES[name])
    error = 4 * ratios.std() / math.sqrt(len(ratios))
    assert abs(ratios.mean() - divergence(family)(old[:1], new[:1], {})[0]) < error


def test_policies_that_are_no_distributions_have_kin():
    greedy = divergence(family_for("epsilon-greedy", SPACES["epsilon-greedy"]))
    q = np.array([[1.0, 2.0, 0, 0, 0], [3.0, 2.0, 0, 0, 0]], dtype=np.float32)
    assert greedy(q, q[[0, 0]], {"epsilon": 0.1}).tolist() == [0.0, 0.9]
    plain = divergence(family_for("deterministic", BOX))
    a = np.zeros((1, 3), dtype=np.float32)
    assert plain(a, a + 0.1, {"noise": 0.1})[0] == pytest.approx(1.5) and plain(a, a, {})[0] == 0.0


def test_kl_foretells_the_effective_sample_size():
    """ESS/N is about exp(-2 KL) for small KL: what `APS(ess=...)` means."""
    family = family_for("categorical", spaces.Discrete(4))
    rng = np.random.default_rng(0)
    old = np.tile(rng.normal(size=(1, 4)).astype(np.float32), (50_000, 1))
    new = old + (0.12 * rng.normal(size=(1, 4))).astype(np.float32)
    noise = Streams(1).draw([0], [0], len(old), family.noise, family.noise_size)[:, 0]
    sample = draw(family, old, noise)
    w = np.exp(logprob("categorical", new, sample.actions, spaces.Discrete(4)) - sample.logprobs)
    ess = w.sum() ** 2 / (len(w) * (w**2).sum())
    assert ess == pytest.approx(math.exp(-2 * divergence(family)(old[:1], new[:1], {})[0]), abs=0.003)


# -- rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "version", "latest", "drift", "pulls"),
    [
        (ce.Always(), 3, 4, None, True),
        (ce.Always(), 4, 4, None, False),
        (ce.Never(), -1, 0, None, True),
        (ce.Never(), 0, 100, (9.0, 0.1), False),
        (ce.Every(4), 2, 5, None, False),
        (ce.Every(4), 2, 6, None, True),
        (ce.APS(threshold=0.02), -1, 0, None, True),
        (ce.APS(threshold=0.02), 1, 9, (0.01, 0.001), False),
        (ce.APS(threshold=0.02), 1, 9, (0.019, 0.002), True),
        (ce.APS(threshold=0.02, z=0.0), 1, 9, (0.019, 0.002), False),
        (ce.APS(threshold=0.02, max_lag=5), 1, 6, (0.0, 0.0), True),
        (ce.APS(threshold=0.02, min_updates=3), 1, 3, (9.0, 0.0), False),
        (ce.APS(), 1, 2, (0.011, 0.0), True),
        (ce.APS(), 1, 2, (0.009, 0.0), False),
        (ce.APS(threshold=0.02), 1, 2, None, True),
        (ce.APS(threshold=0.0), 1, 2, (0.0, 0.0), False),
        (ce.APS(), 1, 2, (math.nan, 0.0), True),
        (ce.APS(), 1, 2, (0.001, math.nan), True),
        (lambda standing: standing.lag > 2, 1, 4, None, True),
        (lambda standing: standing.lag > 2, 1, 3, None, False),
    ],
)
def test_rules(rule, version, latest, drift, pulls):
    mean, se = drift or (None, None)
    verdict = decide(rule, Standing(version, latest, mean, se))
    assert verdict.pull == pulls and verdict.reason


def test_a_version_that_is_acted_with_for_long_is_replaced_whatever_its_drift():
    standing = Standing(1, 90, 0.001, 0.0, fragments=64)
    verdict = decide(ce.APS(), standing)
    assert verdict.pull and verdict.is_overdue and "64 fragments" in verdict.reason
    assert not decide(ce.APS(), standing._replace(fragments=63)).pull
    assert not decide(ce.APS(), standing._replace(latest=1)).pull, "nothing is newer"
    assert not decide(ce.APS(max_fragments=None), standing).pull
    assert not decide(ce.APS(), standing._replace(drift=1.0)).is_overdue


def test_bad_rules_are_refused():
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(ce.SpecError, match="threshold"):
            ce.APS(threshold=wrong)
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(ce.SpecError, match="ess"):
            ce.APS(ess=wrong)
    with pytest.raises(ce.SpecError, match="give one"):
        ce.APS(threshold=0.1, ess=0.9)
    for wrong in ({"max_lag": 0}, {"max_fragments": 0}):
        with pytest.raises(ce.SpecError, match=r"max_\w+=0"):
            ce.APS(**wrong)
    with pytest.raises(ce.SpecError, match="Every"):
        ce.Every(0)
    with pytest.raises(ce.PolicyError, match="no meaning for a epsilon-greedy policy"):
        fit(ce.APS(ess=0.9), family_for("epsilon-greedy", spaces.Discrete(3)))
    with pytest.raises(ce.SpecError, match="expected Always"):
        fit("often", family_for("categorical", spaces.Discrete(3)))
    with pytest.raises(ce.PolicyError, match="ZeroDivisionError"):
        decide(lambda standing: 1 / 0, Standing(0, 1, None, None))


# -- the drift table --------------------------------------------------------------------------------------------


def test_the_drift_table_estimates_the_mean_over_visited_states():
    family = family_for("categorical", spaces.Discrete(4))
    rng = np.random.default_rng(0)
    w = {version: rng.normal(size=(6, 4)).astype(np.float32) * 0.3 for version in range(3)}
    table = DriftTable(divergence(family), lambda obs: obs @ w[2], lambda version, obs: obs @ w[version])
    assert table.drift(0, 2, {}) is None, "no state is known yet"
    states = rng.normal(size=(20_000, 6)).astype(np.float32)
    for start in range(0, len(states), 1000):
        part = states[start : start + 1000]
        table.add(0, part, part @ w[0])
    true = divergence(family)(states @ w[0], states @ w[2], {}).mean()
    estimate = table.drift(0, 2, {})
    assert estimate.states == CAPACITY and abs(estimate.mean - true) < 4 * estimate.se < 0.5 * true
    assert table.drift(2, 2, {}).mean == 0.0
    never_acted = table.drift(1, 2, {})
    assert never_acted.mean == pytest.approx(divergence(family)(states @ w[1], states @ w[2], {}).mean(), rel=0.3)
    table.keep({1})
    assert table.drift(1, 3, {}) is not None, "the newest states stay for versions that have none"
