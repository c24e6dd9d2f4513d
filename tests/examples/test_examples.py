"""The examples, run as a reader would run them; and the rows that PPO must not learn from."""

import os
import re
import signal

import numpy as np
import pytest

from example_scripts import interrupt, load, run, summary

pytestmark = pytest.mark.examples


def test_ppo_runs_and_draws_its_curve(tmp_path):
    png = tmp_path / "new folder" / "curve.png"
    output = run("ppo.py", "--total-steps", 3000, "--num-envs", 4, "--workers", 2, "--demo", "--plot", png)
    assert summary(output, "steps") >= 3000
    assert summary(output, "evaluation") > 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in output, "no terminal, so plain lines"


def test_ppo_learns_the_same_whatever_the_number_of_workers():
    one, three = (
        run("ppo.py", "--total-steps", 3000, "--num-envs", 6, "--workers", workers, "--seed", 7) for workers in (1, 3)
    )
    pattern = re.compile(r"^(?:steps|evaluation) .*$", re.MULTILINE)
    assert pattern.findall(one) == pattern.findall(three) != []


def test_ppo_ends_cleanly_on_ctrl_c():
    interrupt("ppo.py", "--target", "inf", "--total-steps", 100_000_000, "--num-envs", 4)


def test_ppo_trains_on_when_a_worker_is_killed(monkeypatch, capsys):
    ppo = load("ppo.py")

    class Deadly(ppo.ce.ClusterEnv):
        taken = 0

        def step(self, actions):
            self.taken += 1
            if self.taken == 100:
                os.kill(self.stats()["worker_pids"][0], signal.SIGKILL)
            return super().step(actions)

    monkeypatch.setattr(ppo.ce, "ClusterEnv", Deadly)
    # The example sets threads for its own process; here that is the process of all the tests.
    monkeypatch.setattr(ppo.torch, "set_num_threads", lambda _: None)
    assert ppo.main(["--total-steps", "2000", "--num-envs", "4", "--workers", "2"]) == 0
    output = capsys.readouterr().out
    assert summary(output, "lost rows") == 2, "a dead worker costs one row of each of its own slots"
    assert summary(output, "steps") >= 2000


def test_gae_bootstraps_truncation_and_stops_at_termination():
    ppo = load("ppo.py")
    # Two slots, three rows: row 0 ends the episode (terminated, truncated), row 1 is the reset row.
    rewards = np.array([[1, 1], [0, 0], [1, 1]], np.float32)
    values = np.array([[2, 2], [5, 5], [3, 3], [4, 4]], np.float32)
    terminations = np.array([[1, 0], [0, 0], [0, 0]], np.float32)
    valid = np.array([[True, True], [False, False], [True, True]])
    advantages = ppo.gae(rewards, values, terminations, valid, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(advantages[0], [1 - 2, 1 + 0.5 * 5 - 2])
    np.testing.assert_allclose(advantages[1], [0, 0])
    np.testing.assert_allclose(advantages[2], 1 + 0.5 * 4 - 3)


def test_gae_lets_nothing_through_a_lost_row():
    ppo = load("ppo.py")
    rewards = np.array([[1], [np.nan], [0], [1]], np.float32)
    values = np.array([[2], [5], [np.nan], [3], [4]], np.float32)
    valid = np.array([[True], [False], [False], [True]])
    advantages = ppo.gae(rewards, values, np.zeros((4, 1), np.float32), valid, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(advantages[:, 0], [1 + 0.5 * 5 - 2, 0, 0, 1 + 0.5 * 4 - 3])


@pytest.mark.timeout(300)
def test_ppo_solves_cartpole():
    output = run("ppo.py", "--target", 475, "--seed", 1, timeout_s=280)
    assert summary(output, "evaluation") >= 475
    assert "target      475 reached" in output
