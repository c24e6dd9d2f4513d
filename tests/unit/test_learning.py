"""Advantages and weights equal their definitions, summed episode by episode, whatever ended, was lost or was nested."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from clusterenv.errors import SpecError
from clusterenv.learning import Advantages, behaviour_weights, effective_sample_size, gae, vtrace
from clusterenv.rollout import Rollout, map_arrays

EXACT = {"rtol": 1e-9, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass(frozen=True)
class Case:
    """A rollout with what the references read: plain tables, no array of the rollout but its observations."""

    batch: Rollout
    logprobs: Any  # [T, N] of the learner's policy
    finals: dict[tuple[int, int], Any]  # (t, n) -> observation


def value_of(obs):
    if not isinstance(obs, dict):
        return np.tanh(obs[..., 0]) + 2.0 * obs[..., 1]
    return value_of(obs["a"]) + 0.01 * obs["b"][0] + 0.5 * obs["b"][1]["c"][..., 0, 1]


def torch_value(obs):
    """The same values from parameters that want a gradient, though no graph should be kept for them."""
    assert not torch.is_grad_enabled()
    two = torch.nn.Parameter(torch.tensor(2.0))
    if not isinstance(obs, dict):
        return torch.tanh(obs[:, 0]) + two * obs[:, 1]
    a, (b, deep) = obs["a"], obs["b"]
    return (torch.tanh(a[:, 0]) + two * a[:, 1] + 0.01 * b + 0.5 * deep["c"][:, 0, 1])[:, None]


def rollout(T, N, **given):
    """Without an end and of zeros, unless told otherwise."""
    no = np.zeros((T, N), dtype=bool)
    batch = Rollout(
        obs=np.zeros((T, N, 2)),
        actions=np.zeros((T, N), dtype=np.int64),
        rewards=np.zeros((T, N)),
        terminations=no,
        truncations=no,
        logprobs=np.zeros((T, N), dtype=np.float32),
        versions=np.zeros((T, N), dtype=np.int64),
        valid=~no,
        episode_starts=no,
        last_obs=np.zeros((N, 2)),
        final_obs=np.zeros((0, 2)),
        final_at=np.zeros((0, 2), dtype=np.int64),
        slots=np.arange(N),
    )
    return replace(batch, **given)


@st.composite
def cases(draw, off_policy=True):
    """Episodes that end anywhere in any way; what may never be read is NaN or infinite."""
    T, N = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    ends = draw(arrays(np.int8, (T, N), elements=st.sampled_from([0] * 9 + [1, 2, 3]), fill=st.nothing()))
    terminated, truncated = (ends == 1) | (ends == 3), (ends == 2) | (ends == 3)
    valid = np.ones((T, N), dtype=bool)
    if draw(st.booleans()):
        valid = draw(arrays(bool, (T, N), elements=st.sampled_from([True] * 6 + [False]), fill=st.nothing()))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nested = draw(st.booleans())
    garbage = draw(st.sampled_from([np.nan, np.inf]))

    def observations(*shape):
        if not nested:
            return rng.normal(size=(*shape, 2))
        b = (rng.integers(0, 256, shape, dtype=np.uint8), {"c": rng.normal(size=(*shape, 1, 3)).astype(np.float32)})
        return {"a": rng.normal(size=(*shape, 2)), "b": b}

    def spoil(obs, where):
        def leaf(values):
            if values.dtype != np.uint8:
                values[where] = garbage

        map_arrays(leaf, obs)

    ended = terminated | truncated
    # A lost environment may have told how its episode ended, or not.
    told = valid | (rng.random((T, N)) < 0.5)
    final_at = np.argwhere(ended & told)
    obs, last_obs, final_obs = observations(T, N), observations(N), observations(len(final_at))
    read = valid.copy()
    read[1:] |= valid[:-1] & ~ended[:-1]  # a row before a lost one still bootstraps from what it led to
    spoil(obs, ~read)
    spoil(last_obs, ~valid[-1] | ended[-1])
    spoil(final_obs, np.array([terminated[t, n] or not valid[t, n] for t, n in final_at], dtype=bool))

    behaviour = -rng.exponential(1.0, (T, N)).astype(np.float32)
    # Spread over decades, and exactly on-policy at times: both sides of every cap.
    spread = draw(st.sampled_from([0.0, 0.1, 1.0, 5.0])) if off_policy else 0.0
    logprobs = behaviour + (spread * rng.normal(size=(T, N))).astype(np.float32)
    rewards = rng.normal(size=(T, N))
    for array in (behaviour, logprobs, rewards):
        array[~valid] = garbage
    ways = {"terminations": terminated, "truncations": truncated, "valid": valid}
    places = {"obs": obs, "last_obs": last_obs, "final_obs": final_obs, "final_at": final_at}
    batch = rollout(T, N, rewards=rewards, logprobs=behaviour, **ways, **places)
    finals = {(int(t), int(n)): map_arrays(lambda x, k=k: x[k], final_obs) for k, (t, n) in enumerate(final_at)}
    return Case(batch, logprobs, finals)


@dataclass
class Segment:
    """Valid rows of one episode, one after the other, of one environment."""

    n: int
    rows: list[int]
    rewards: list[float]
    values: list[float]
    ratios: list[float]
    beyond: float  # value of what the last row led to


def segments(case):
    batch, found = case.batch, []
    T, N = batch.rewards.shape
    for n in range(N):
        rows: list[int] = []
        for t in range(T):
            if not batch.valid[t, n]:
                continue
            rows.append(t)
            if batch.terminations[t, n]:
                beyond = 0.0
            elif batch.truncations[t, n]:
                beyond = float(value_of(case.finals[t, n]))
            elif t == T - 1:
                beyond = float(value_of(map_arrays(lambda x, n=n: x[n], batch.last_obs)))
            elif not batch.valid[t + 1, n]:
                beyond = float(value_of(map_arrays(lambda x, t=t, n=n: x[t + 1, n], batch.obs)))
            else:
                continue
            values = [float(value_of(map_arrays(lambda x, r=r, n=n: x[r, n], batch.obs))) for r in rows]
            ratios = [math.exp(float(case.logprobs[r, n]) - float(batch.logprobs[r, n])) for r in rows]
            found.append(Segment(n, rows, [float(batch.rewards[r, n]) for r in rows], values, ratios, beyond))
            rows = []
        assert not rows
    return found


def tables(case):
    values = value_of(case.batch.obs)
    return Advantages(np.zeros(values.shape), np.array(values, dtype=np.float64), values)


def reference_gae(case, gamma, lam):
    """The mixture of k-step returns that lambda weighs, not the recursion: (1 - lam) * sum lam^(k-1) G_k."""
    result = tables(case)
    for s in segments(case):
        L = len(s.rows)
        onward = s.values[1:] + [s.beyond]
        for i, t in enumerate(s.rows):
            total, lam_return = 0.0, 0.0
            for k in range(1, L - i + 1):
                total += gamma ** (k - 1) * s.rewards[i + k - 1]
                k_step = total + gamma**k * onward[i + k - 1]
                weight = lam ** (k - 1) * (1 - lam if i + k < L else 1.0)
                lam_return += weight * k_step
            result.returns[t, s.n] = lam_return
            result.advantages[t, s.n] = lam_return - s.values[i]
    return result


def reference_vtrace(case, gamma, rho_bar, c_bar, lam):
    """The sum of the paper's equation 1."""
    result = tables(case)
    for s in segments(case):
        L = len(s.rows)
        onward = s.values[1:] + [s.beyond]
        rho = [min(rho_bar, ratio) for ratio in s.ratios]
        targets = []
        for i in range(L):
            target = s.values[i]
            for j in range(i, L):
                trace = math.prod(lam * min(c_bar, s.ratios[k]) for k in range(i, j))
                target += gamma ** (j - i) * trace * rho[j] * (s.rewards[j] + gamma * onward[j] - s.values[j])
            targets.append(target)
        targets.append(s.beyond)
        for i, t in enumerate(s.rows):
            result.returns[t, s.n] = targets[i]
            result.advantages[t, s.n] = rho[i] * (s.rewards[i] + gamma * targets[i + 1] - s.values[i])
    return result


def close(got, want, tolerance):
    for name in Advantages._fields:
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), err_msg=name, **tolerance)


unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
caps = st.sampled_from([0.3, 1.0, 2.5, math.inf])


@given(case=cases(), gamma=unit, lam=unit)
@settings(max_examples=300)
def test_gae_is_the_weighted_mean_of_the_returns_of_each_episode(case, gamma, lam):
    close(gae(case.batch, value_of, gamma, lam), reference_gae(case, gamma, lam), EXACT)


@given(case=cases(), gamma=unit, lam=unit, rho_bar=caps, c_bar=caps)
@settings(max_examples=300)
def test_vtrace_is_the_sum_of_the_paper_over_each_episode(case, gamma, lam, rho_bar, c_bar):
    got = vtrace(case.batch, value_of, case.logprobs, gamma, rho_bar, c_bar, lam)
    # Uncapped ratios make targets of any size; terms of opposite sign then cancel.
    close(got, reference_vtrace(case, gamma, rho_bar, c_bar, lam), {"rtol": 1e-7, "atol": 1e-6})


@given(case=cases(off_policy=False), gamma=unit, lam=unit)
def test_on_policy_vtrace_targets_are_the_returns_of_gae(case, gamma, lam):
    got, want = vtrace(case.batch, value_of, case.logprobs, gamma, lam=lam), gae(case.batch, value_of, gamma, lam)
    np.testing.assert_allclose(got.returns, want.returns, **EXACT)


@given(case=cases())
def test_the_one_step_target_is_that_of_next_obs(case):
    batch = case.batch
    onward = np.where(batch.terminations, 0.0, value_of(batch.next_obs()))
    want = np.where(batch.valid, batch.rewards + 0.9 * onward, value_of(batch.obs))
    np.testing.assert_allclose(gae(batch, value_of, 0.9, 0.0).returns, want, **EXACT)


@given(case=cases())
def test_rows_that_are_not_valid_teach_nothing(case):
    lost = ~case.batch.valid
    for got in (gae(case.batch, value_of), vtrace(case.batch, value_of, case.logprobs)):
        assert (got.advantages[lost] == 0).all()
        np.testing.assert_array_equal(got.returns[lost], got.values[lost])
        assert np.isfinite(got.advantages).all()
        assert np.isfinite(got.returns[~lost]).all()


@given(case=cases())
@settings(max_examples=50)
def test_tensors_and_arrays_give_the_same(case):
    batch, tensors = case.batch, case.batch.torch()
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    pairs = [
        (gae(batch, value_of), gae(tensors, torch_value)),
        (vtrace(batch, value_of, case.logprobs), vtrace(tensors, torch_value, logprobs)),
    ]
    for want, got in pairs:
        for tensor in got:
            assert tensor.dtype == torch.float32
            assert not tensor.requires_grad
        close(Advantages(*(tensor.numpy() for tensor in got)), want, SINGLE)
    weights = behaviour_weights(tensors, logprobs)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), behaviour_weights(batch, case.logprobs), rtol=1e-6)
    ess = effective_sample_size(batch, case.logprobs)
    assert effective_sample_size(tensors, logprobs) == pytest.approx(ess, rel=1e-9)

    crossed = gae(batch, lambda obs: torch_value(map_arrays(torch.as_tensor, obs)).to(torch.float64))
    assert all(isinstance(array, np.ndarray) for array in crossed)
    close(crossed, pairs[0][0], SINGLE)
    crossed = gae(tensors, lambda obs: value_of(map_arrays(lambda leaf: leaf.numpy(), obs)))
    assert all(isinstance(array, torch.Tensor) for array in crossed)
    close(Advantages(*(tensor.numpy() for tensor in crossed)), pairs[0][0], SINGLE)


@given(case=cases())
def test_each_observation_is_valued_once_and_no_array_is_changed_or_shared(case):
    before = map_arrays(np.copy, case.batch.obs)
    asked = []

    def value_fn(obs):
        values = value_of(obs)
        asked.append(len(values))
        return values

    result = gae(case.batch, value_fn)
    T, N = case.batch.rewards.shape
    assert sum(asked) == T * N + N + len(case.batch.final_at)
    for array in result:
        array += 1.0
    map_arrays(np.testing.assert_array_equal, case.batch.obs, before)


def test_a_value_fn_may_reuse_its_buffer_or_return_its_input():
    batch = rollout(4, 4, rewards=np.ones((4, 4)), obs=np.arange(16.0).reshape(4, 4), last_obs=np.arange(16.0, 20.0))
    want = gae(batch, np.copy)
    buffer = np.zeros(16)

    def reuse(obs):
        buffer[: len(obs)] = obs
        return buffer[: len(obs)]

    close(gae(batch, reuse), want, EXACT)
    got = gae(batch, lambda obs: obs)
    got.values[:] = -1.0
    assert batch.obs[0, 1] == 1.0, "the values are no view of the observations"


@given(case=cases(), cap=caps)
def test_behaviour_weights_are_the_capped_ratio_and_zero_in_lost_rows(case, cap):
    batch, got = case.batch, behaviour_weights(case.batch, case.logprobs, cap)
    for (t, n), valid in np.ndenumerate(batch.valid):
        ratio = math.exp(float(case.logprobs[t, n]) - float(batch.logprobs[t, n])) if valid else 0.0
        assert got[t, n] == pytest.approx(min(cap, ratio), rel=1e-9)
    flat = behaviour_weights(batch.flatten(), case.logprobs.reshape(-1), cap)
    np.testing.assert_array_equal(flat, got.reshape(-1))


@given(case=cases())
def test_effective_sample_size_is_its_definition_and_within_its_bounds(case):
    batch = case.batch
    got = effective_sample_size(batch, case.logprobs)
    pairs = zip(case.logprobs[batch.valid], batch.logprobs[batch.valid], strict=True)
    w = [math.exp(float(new) - float(old)) for new, old in pairs]
    if not w:
        assert got == 0.0
        return
    assert isinstance(got, float)
    assert 1 / len(w) - 1e-9 <= got <= 1.0
    assert got == pytest.approx(math.fsum(w) ** 2 / (len(w) * math.fsum(x * x for x in w)), rel=1e-9)
    assert effective_sample_size(batch.logprobs, case.logprobs, batch.valid) == got


@given(shift=st.floats(-1e4, 1e4), n=st.integers(1, 50))
def test_effective_sample_size_does_not_overflow(shift, n):
    old = np.linspace(-3.0, 0.0, n)
    assert effective_sample_size(old, old + shift) == pytest.approx(1.0)
    new = old.copy()
    new[0] += 1e4
    assert effective_sample_size(old, new) == pytest.approx(1 / n)


def test_extreme_ratios_are_capped_without_a_warning():
    batch = rollout(4, 4)
    logprobs = np.full((4, 4), 1e4)
    logprobs[0] = -np.inf  # an action that the learner's mask has since forbidden
    weights = behaviour_weights(batch, logprobs, cap=1.7)
    assert (weights[0] == 0).all()
    assert (weights[1:] == 1.7).all()
    assert np.isfinite(vtrace(batch, value_of, logprobs).returns).all()
    assert effective_sample_size(batch, logprobs) == pytest.approx(0.75)
    assert effective_sample_size(batch, np.full((4, 4), -np.inf)) == 0.0


def test_integer_rewards_and_half_precision_values_do_not_round_the_advantages():
    batch = rollout(4, 4, rewards=np.ones((4, 4), dtype=np.int64)).torch()
    got = gae(batch, lambda obs: torch.full((len(obs),), 0.5, dtype=torch.bfloat16), gamma=0.5, lam=0.0)
    assert got.advantages.dtype == torch.float32
    assert (got.advantages == 0.75).all()


def test_torch_is_not_imported_for_arrays():
    code = (
        "import sys, doctest, clusterenv.learning as m; sys.exit(doctest.testmod(m).failed or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def first(obs):
    return obs[:, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: gae(b, lambda obs: obs), r"value_fn must return \[16\] or \[16, 1\].*got \[16, 2\]"),
        (lambda b: gae(b, lambda obs: 0.0), r"value_fn must return \[16\].*got \[\]"),
        (lambda b: gae(b.flatten(), first), r"rewards must be \[T, N\], got \[16\]; .*before batch.flatten"),
        (lambda b: gae(replace(b, valid=b.valid[1:]), first), r"valid must be \[4, 4\].*got \[3, 4\]"),
        (lambda b: vtrace(b, first, np.zeros(16)), r"logprobs must be \[4, 4\].*got \[16\]"),
        (lambda b: vtrace(b, first, b.logprobs, rho_bar=0.0), "rho_bar must be positive, got 0.0"),
        (lambda b: behaviour_weights(b, np.zeros((4, 4, 2))), r"logprobs must be \[4, 4\].*got \[4, 4, 2\]"),
        (lambda b: behaviour_weights(b, b.logprobs, cap=-1.0), "cap must be positive"),
        (lambda b: behaviour_weights(b, np.full((4, 4), np.nan)), "under the learner's policy is NaN"),
        (lambda b: effective_sample_size(b.logprobs - np.inf, b.logprobs), "behaviour log-probability is not finite"),
        (lambda b: effective_sample_size(b, b.logprobs[0]), r"logprobs must be \[4, 4\].*got \[4\]"),
        (lambda b: effective_sample_size(b.logprobs, b.logprobs, b.valid[0]), r"valid is \[4\] but .* are \[4, 4\]"),
        (lambda b: effective_sample_size(b, b.logprobs, b.valid), "brings its own `valid`"),
    ],
)
@pytest.mark.parametrize("convert", [lambda b: b, Rollout.torch], ids=["numpy", "torch"])
def test_a_wrong_argument_is_named(call, message, convert):
    with pytest.raises(SpecError, match=message):
        call(convert(rollout(4, 4)))
