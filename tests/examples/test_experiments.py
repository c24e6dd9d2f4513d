"""The experiments' own machinery: statistics that can be checked by hand, runs that resume, a page that follows."""

from __future__ import annotations

import doctest
import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import experiments.run
import experiments.stats
from experiments.__main__ import DATA, parent_of, run
from experiments.arms import TABLES, TASKS, Arm, Job
from experiments.records import Runs, read, score
from experiments.report import BLOCKS, DOCS, fill
from experiments.run import run_arm, schedule
from experiments.stats import MARGIN, difference, iqm, pass_rate, probability_of_improvement

pytestmark = pytest.mark.examples


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(0, 99))
def test_shuffled_pulls_are_as_many_after_the_same_intervals(intervals, seed):
    pulled = np.cumsum([0, *intervals]).tolist()
    other = schedule(pulled, seed)
    assert sorted(np.diff([0, *other])) == sorted(intervals) and other[-1] == pulled[-1]
    anywhere = schedule(pulled, seed, is_shuffled=False)
    assert len(set(anywhere)) == len(intervals) and max(anywhere) <= pulled[-1]


def test_statistics():
    rng = np.random.default_rng(0)
    assert iqm([1.0, 2.0, 3.0, 1000.0, -1000.0, 2.0, 2.0, 2.0]) == 2.0
    base = rng.normal(size=40)
    better = difference(base + 0.3, base)
    assert better.value == pytest.approx(0.3) and better.low > 0.2, "the same seeds are compared"
    same = probability_of_improvement(rng.normal(size=60), rng.normal(size=60))
    assert same.low < 0.5 < same.high
    assert probability_of_improvement(base + 9, base).low == 1.0


def test_power_grows_with_seeds_and_falls_with_spread():
    rng = np.random.default_rng(1)
    narrow, wide = rng.normal(scale=MARGIN / 4, size=30), rng.normal(scale=4 * MARGIN, size=30)
    assert pass_rate(narrow, 10, 60) > 0.9
    assert pass_rate(wide, 10, 60) < 0.4 < pass_rate(rng.normal(scale=MARGIN, size=30), 40, 60)


def test_tables_name_tasks_and_parents_that_exist():
    for name, jobs in TABLES.items():
        assert len(set(jobs)) == len(jobs), name
        for job in jobs:
            assert job.arm.task in TASKS
            parent = parent_of(job.arm)
            if parent is not None:
                known = jobs + TABLES["main"] + TABLES["grid"]
                assert Job(parent, job.seed) in known, job


def test_a_table_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "runs.jsonl"
    jobs = [Job(Arm("CartPole PPO", rule), 1) for rule in ("Shuffled(0.02)", "APS(0.02)", "Always")]
    run(jobs[:2], path, 2, steps_share=0.1)
    first = read(path)
    assert [record["rule"] for record in first] == ["APS(0.02)", "Shuffled(0.02)"], "the one that permutes waits"
    assert first[0]["pulls"] == first[1]["pulls"]
    run(jobs, path, 2, steps_share=0.1)
    assert read(path)[:2] == first and len(read(path)) == 3
    again = json.loads(json.dumps(run_arm(jobs[1].arm, 1, steps_share=0.1)))
    assert again.pop("sent_bytes") == pytest.approx(first[0]["sent_bytes"], rel=1e-3), (
        "a pickled policy varies a little"
    )
    del again["seconds"]
    assert again == {key: first[0][key] for key in again}, "the same each time"


def test_an_arm_can_sample_more_states_for_its_drift_than_others():
    usual, more = (
        run_arm(Arm("CartPole PPO", "APS(0.02)", variant=variant), 1, steps_share=0.05)
        for variant in ("", "sample_every=8")
    )
    assert more["drift_bytes"] > 2 * usual["drift_bytes"]
    assert usual["pulled"], "what is decided is heard"
    again = run_arm(Arm("CartPole PPO", "APS(0.02)"), 1, steps_share=0.05)
    assert again["drift_bytes"] == usual["drift_bytes"], "and afterwards it is as before"


def test_lines_of_a_task_that_has_other_settings_by_now_do_not_count(tmp_path):
    path = tmp_path / "runs.jsonl"
    setting = json.loads(json.dumps(asdict(TASKS["CartPole PPO"])))
    lines = [{"task": "CartPole PPO", "setting": setting}, {"task": "CartPole PPO"}]
    changed = {"task": "CartPole PPO", "setting": setting | {"settings": setting["settings"] | {"epochs": 99}}}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, changed]))
    assert read(path) == lines


def test_scores_are_0_for_a_random_policy_and_1_for_a_solved_task():
    task = TASKS["CartPole PPO"]
    record = {"task": "CartPole PPO", "curve": [task.worst, None, task.best], "late_return": task.best}
    assert score(record, "late") == 1.0 and score(record) == 0.5


@pytest.mark.parametrize("module", [experiments.run, experiments.stats])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_the_page_is_made_from_the_lines():
    page = (DOCS / "evidence.md").read_text()
    assert all(f"<!-- {name} -->" in page for name in BLOCKS)
    assert fill(page, Runs(read(DATA / "runs.jsonl"))) == page, "run python -m experiments.report"
