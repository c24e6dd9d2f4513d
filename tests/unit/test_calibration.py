"""A real PPO run under APS, with every decision and every sample recorded: computed again, in float64."""

from __future__ import annotations

import numpy as np
import pytest

import clusterenv as ce
from experiments.calibration import compare, decide_again, record, summarise


@pytest.fixture(scope="module")
def run():
    return record("CartPole-v1", ce.APS(threshold=0.01), 120_000, num_envs=64, nodes=4, seed=1)


def test_pulls_happen_where_the_drift_crosses_the_rule(run):
    found = decide_again(run)
    assert found.different == 0
    assert found.near < 0.1 * found.decisions
    assert 4 * 4 < found.pulls < 0.8 * found.decisions, "neither never nor always"


def test_the_estimate_is_the_drift(run):
    found = summarise(compare(run, np.random.default_rng(0)))
    assert found["points"] > 15
    assert 0.8 < found["median_ratio"] < 1.25
    assert found["rank_correlation"] > 0.9
    assert found["coverage_2se"] > 0.8, "the full run, in docs/aps.md, says 0.85 and more"
