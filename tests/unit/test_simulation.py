"""Simulated runs of the real head with fixed seeds, short schedules that once failed, and the simulation itself."""

from __future__ import annotations

import pytest

from simulation.schedule import run

SEEDS = range(0, 160, 20)


@pytest.mark.parametrize("first", SEEDS)
def test_no_rule_is_broken(first: int) -> None:
    failed = [(seed, found.failure) for seed in range(first, first + 20) if (found := run(seed)).failure is not None]
    assert not failed


def test_schedules_are_long_and_the_same_each_time() -> None:
    first, again = run(7, keep_trace=True), run(7, keep_trace=True)
    assert first.num_events >= 200
    assert first.trace == again.trace
    assert run(recorded=first.choices, keep_trace=True).trace == first.trace
