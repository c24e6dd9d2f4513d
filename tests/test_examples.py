"""The examples, run as a reader would run them; and the rows that PPO must not learn from."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PPO = Path(__file__).parent.parent / "examples" / "ppo.py"


def run_ppo(*options: object, timeout_s: float = 100.0) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PPO), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def summary(output: str, name: str) -> float:
    match = re.search(rf"^{re.escape(name)} +(-?[\d.]+)", output, re.MULTILINE)
    assert match, output
    return float(match[1])


def load_ppo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ppo_example", PPO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ppo_runs_and_draws_its_curve(tmp_path):
    png = tmp_path / "new folder" / "curve.png"
    output = run_ppo("--total-steps", 3000, "--num-envs", 4, "--workers", 2, "--demo", "--plot", png)
    assert summary(output, "steps") >= 3000
    assert summary(output, "evaluation") > 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in output, "no terminal, so plain lines"


def test_ppo_learns_the_same_whatever_the_number_of_workers():
    one, three = (
        run_ppo("--total-steps", 3000, "--num-envs", 6, "--workers", workers, "--seed", 7) for workers in (1, 3)
    )
    pattern = re.compile(r"^(?:steps|evaluation) .*$", re.MULTILINE)
    assert pattern.findall(one) == pattern.findall(three) != []


def test_ppo_ends_cleanly_on_ctrl_c():
    # A session of its own, so that the signal reaches the whole process group as a terminal's Ctrl-C does.
    command = [sys.executable, str(PPO), "--target", "inf", "--total-steps", "100000000", "--num-envs", "4"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert "steps/s" in process.stdout.readline(), "the first line says that training has begun"
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert errors.endswith("interrupted; the environments are closed\n")
    assert "Traceback" not in errors


def test_ppo_trains_on_when_a_worker_is_killed(monkeypatch, capsys):
    ppo = load_ppo()

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
    ppo = load_ppo()
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
    ppo = load_ppo()
    rewards = np.array([[1], [np.nan], [0], [1]], np.float32)
    values = np.array([[2], [5], [np.nan], [3], [4]], np.float32)
    valid = np.array([[True], [False], [False], [True]])
    advantages = ppo.gae(rewards, values, np.zeros((4, 1), np.float32), valid, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(advantages[:, 0], [1 + 0.5 * 5 - 2, 0, 0, 1 + 0.5 * 4 - 3])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ppo_solves_cartpole():
    output = run_ppo("--target", 475, "--seed", 1, timeout_s=280)
    assert summary(output, "evaluation") >= 475
    assert "target      475 reached" in output
