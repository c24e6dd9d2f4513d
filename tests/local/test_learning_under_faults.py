"""What faults cost a learner: a short run of experiments/faults.py, and the verdict of its recorded runs."""

from __future__ import annotations

import pytest

from experiments.faults import read_records, run, verdict

pytestmark = pytest.mark.guarantee(30)


def test_recorded_runs_with_faults_are_not_worse(record_property):
    found = verdict(read_records())
    record_property("difference", found.difference.value)
    record_property("difference_low", found.difference.low)
    assert found.seeds >= 30 and found.power > 0.8, found
    assert found.is_non_inferior, found


@pytest.mark.slow
def test_a_learner_learns_under_faults():
    found = run(seed=1, has_faults=True, steps_share=0.3)
    assert found["events"]["env_error"] and found["curve"][-1] > 100, found  # 20 without learning
