"""Weights in fewer bytes: both ends have the same, rounding does not add up, and what does not fit goes whole."""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterenv as ce
from clusterenv.executors.remote import RemoteExecutor
from clusterenv.policy.weights import encoding
from clusterenv.policy.weights.packing import pack, unpack
from clusterenv.testing import Virtual
from policies import net, nudge
from prefork import agents

FORMS = ("fp16", "int8", "int4", "int2")
floats = st.floats(-100, 100, width=32)


def weights(values, step=0):
    array = np.array(values, np.float32)
    return {"a": array, "b": array.astype(np.float64)[:1], "step": np.array(step), "on": np.array([True, False])}


@settings(max_examples=200, deadline=None)
@given(old=st.lists(floats, min_size=1, max_size=50), data=st.data(), form=st.sampled_from(FORMS))
def test_both_ends_have_the_same_and_it_is_near(old, data, form):
    new = data.draw(st.lists(floats, min_size=len(old), max_size=len(old)))
    base, target = encoding.encode(weights(old)), encoding.encode(weights(new, 7))
    packed = pack(form, target, base)
    assert packed is not None and unpack(packed.data, base) == packed.weights
    given_ones, meant = encoding.decode(packed.weights), encoding.decode(target)
    assert given_ones["step"] == 7 and given_ones["on"].tolist() == [True, False], "what is no float goes as it is"
    assert all(given_ones[name].dtype == array.dtype for name, array in meant.items())
    change = np.abs(np.array(new, np.float64) - np.array(old, np.float32)).max()
    limit = 0.05 if form == "fp16" else change / {"int8": 254, "int4": 14, "int2": 1}[form] * 1.001 + 1e-4
    assert np.abs(given_ones["a"] - meant["a"]).max() <= limit


@pytest.mark.parametrize("form", ["int8", "int4", "int2"])
def test_steps_are_taken_from_what_the_node_has_so_rounding_never_adds_up(form):
    rng = np.random.default_rng(0)
    true = rng.normal(size=500).astype(np.float32)
    held = encoding.encode({"w": true})
    errors = []
    for _ in range(60):
        true = true + rng.normal(scale=0.01, size=500).astype(np.float32)
        packed = pack(form, encoding.encode({"w": true}), held)
        held = packed.weights
        errors.append(np.abs(encoding.decode(held)["w"] - true).max())
    assert max(errors[30:]) < 2 * max(errors[:30])


def test_int2_goes_as_far_in_the_direction_of_the_change_as_it_should():
    rng = np.random.default_rng(0)
    old, change = rng.normal(size=(2, 10_000))
    base = encoding.encode({"w": old.astype(np.float32)})

    def moved(by):
        packed = pack("int2", encoding.encode({"w": (old + by).astype(np.float32)}), base)
        return len(packed.data), encoding.decode(packed.weights)["w"] - old

    size, step = moved(0.01 * change)
    assert step @ change / (change @ change) == pytest.approx(0.01, rel=1e-3)
    assert size < len(base) / 20
    assert np.allclose(moved(0.01 * np.sign(change))[1], 0.01 * np.sign(change), atol=1e-6), "all changed as much"
    assert not moved(0 * change)[1].round(6).any()
    nearly = np.full(10_000, 0.01)
    nearly[:5] = 0.012
    assert np.abs(moved(nearly)[1]).max() < 0.0121, "a few do not make up for all"


def test_what_does_not_fit_is_not_packed():
    base, large = encoding.encode(weights([1.0])), encoding.encode(weights([1e6]))
    assert pack("int8", base, None) is None, "nothing to take steps from"
    assert pack("int8", base, encoding.encode({"a": np.zeros(1, np.float32)})) is None, "other arrays"
    assert pack("fp16", large, None) is None, "too large for a half"
    assert pack("int8", encoding.encode(weights([np.nan])), base) is None


def test_what_is_not_what_the_head_meant_is_refused():
    base, other, target = (encoding.encode(weights([value, 2.0])) for value in (1.0, 1.5, 1.7))
    packed = pack("int8", target, base).data
    with pytest.raises(ce.PolicyError, match="another version"):
        unpack(packed, other)
    with pytest.raises(ce.PolicyError, match="without a version"):
        unpack(packed, None)
    meant = pack("int8", target, base).weights
    for at in range(len(packed)):
        with contextlib.suppress(ce.PolicyError):
            assert unpack(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :], base) == meant, "an unused bit"
        with pytest.raises(ce.PolicyError):
            unpack(packed[:at], base)
    many = encoding.encode({"w": np.zeros(10_000_000, np.int8)})
    with pytest.raises(ce.PolicyError, match="as large as"):
        unpack(pack("fp16", many, None).data, None, limit=1000)


def collect(backend, codec_name, rule, updates=10):
    """Rollouts between which the weights move as a learner's would; batches, and what travelled."""
    module, generator = net(2, 4), torch.Generator().manual_seed(3)
    with ce.ClusterEnv("CartPole-v1", 8, backend=backend) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=5, sync=rule, codec=codec_name)
        batches = []
        for _ in range(updates):
            batches.append(collector.rollout(32))
            nudge(module, 0.02, generator)
        return batches, collector.stats(), envs.stats()


@pytest.mark.parametrize("codec_name", ["fp16", "int8", "auto"])
def test_the_networked_path_makes_the_same_pulls_and_bytes_as_the_virtual_cluster(codec_name):
    rule = ce.APS(threshold=0.0008)
    virtual, counted, _ = collect(Virtual(2), codec_name, rule)
    real, told, bytes_of = collect(ce.Loopback(nodes=2), codec_name, rule)
    for one, other in zip(virtual, real, strict=True):
        for name in ("obs", "actions", "logprobs", "versions", "rewards"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
    for name in ("pulls", "weight_bytes", "drift_bytes", "version"):
        assert counted[name] == told[name], name
    assert counted["nodes"][0]["forms"] == told["nodes"][0]["forms"]
    assert 3 <= counted["nodes"][0]["pulls"] < 10
    assert sum(bytes_of["sent_bytes"]) > told["weight_bytes"]


def test_auto_chooses_small_forms_and_says_so():
    _, whole, _ = collect(Virtual(1), "fp32", ce.Always(), 20)
    _, small, _ = collect(Virtual(1), "auto", ce.Always(), 20)
    forms = small["nodes"][0]["forms"]
    assert sum(forms.values()) == small["pulls"] == whole["pulls"] == 20
    assert forms["fp16"] == 1 and "fp32" not in forms, "the first is measured on the states that episodes begin with"
    assert small["weight_bytes"] < whole["weight_bytes"] / 3
    with pytest.raises(ce.SpecError, match="codec='zip'"):
        collect(Virtual(1), "zip", ce.Always())


def test_weights_that_cannot_be_unpacked_are_sent_whole(monkeypatch, caplog):
    put, damaged = RemoteExecutor.put_weights, []

    def damaging(self, transfer):
        if transfer.is_packed and transfer.machine.node == 0 and len(damaged) < 2:
            packed = transfer.data[:40] + bytes([transfer.data[40] ^ 255]) + transfer.data[41:]
            transfer.weights = transfer.weights._replace(packed=packed)
            damaged.append(len(transfer.weights.data))
        return put(self, transfer)

    monkeypatch.setattr(RemoteExecutor, "put_weights", damaging)
    with caplog.at_level(logging.WARNING, "clusterenv"):
        real, stats, _ = collect(ce.Loopback(nodes=2), "int8", ce.Always())
    assert len(damaged) == 2 and caplog.text.count("could not unpack") == 2
    virtual, counted, _ = collect(Virtual(2), "int8", ce.Always())
    forms = {name: number - {"fp32": -2, "int8": 2}[name] for name, number in counted["nodes"][0]["forms"].items()}
    assert stats["nodes"][0]["forms"] == forms and stats["pulls"] == counted["pulls"]
    assert stats["weight_bytes"] == counted["weight_bytes"] + sum(damaged), "the damaged ones, and the whole"
    for one, other in zip(virtual, real, strict=True):
        assert np.array_equal(one.obs, other.obs) and np.array_equal(one.logprobs, other.logprobs)


def test_a_node_that_comes_anew_gets_the_whole_again(caplog):
    module, generator = net(2, 4), torch.Generator().manual_seed(3)
    recovery = ce.Recovery(backoff_s=(0.05, 0.1))
    backend = ce.Loopback(nodes=2, heartbeat_s=(0.2, 1.5, 4.0))
    with ce.ClusterEnv("CartPole-v1", 8, backend=backend, recovery=recovery) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=5, codec="int8")
        for i in range(6):
            batch = collector.rollout(16)
            assert batch.valid.all() and (batch.versions == i).all()
            nudge(module, 0.02, generator)
            if i == 3:
                agents()[0].kill()
        assert "could not unpack" not in caplog.text
        assert envs.stats()["events"]["node_lost"] == 1
