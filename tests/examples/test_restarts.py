"""A training script that is killed at random moments and started again comes to what it would have come to."""

from __future__ import annotations

import pytest

from example_scripts import run, summary
from tools import restarts


@pytest.mark.examples
def test_ppo_detach_goes_on_from_its_folder(tmp_path):
    options = ("--env-id", "CartPole-v1", "--num-envs", 4, "--workers", 2, "--target", "inf", "--resume", tmp_path)
    first = run("ppo_detach.py", *options, "--total-steps", 3000)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"], "it has ended in order"
    second = run("ppo_detach.py", *options, "--total-steps", 6000)
    assert summary(first, "steps") == 3072 and summary(second, "steps") == 6144
    assert summary(second, "versions") == 2 * summary(first, "versions")
    assert "since it was resumed" in second and "since it was resumed" not in first


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_script_that_is_killed_twenty_times_ends_at_the_return_of_an_undisturbed_one(capsys):
    assert restarts.main(["--kills", "20"]) == 0, capsys.readouterr().out
