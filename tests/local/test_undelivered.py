"""Failures while rows wait for delivery: no row is overwritten or counted twice, and every loss is reported."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv as ce
from clusterenv.engine.slots import Env
from toys import Trouble

pytestmark = pytest.mark.guarantee(10)

N = 4
ZEROS = np.zeros(N, dtype=np.int64)
MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


class Gated(Trouble):
    """In the step after `gate` exists, slots 2 and 3 wait until `gate` is gone. Observation: slot, life, episode, t."""

    def __init__(self, slot: int, gate: Path, **kwargs) -> None:
        super().__init__(slot, **kwargs)
        self.gate = gate

    def step(self, action):
        while self.slot >= 2 and self.gate.exists():
            time.sleep(0.001)
        return super().step(action)


def gated(tmp_path, mode=AutoresetMode.NEXT_STEP, length=3, **trouble):
    """Slots 0 and 1 on worker 0, slots 2 and 3 behind the gate on worker 1."""
    gate, memory = tmp_path / "gate", str(tmp_path / "lives")
    thunks = [
        lambda i=i: Gated(i, gate, memory=memory, length=length if i < 2 else 100, **(trouble if i == 1 else {}))
        for i in range(N)
    ]
    recovery = ce.Recovery(backoff_s=(0.0, 0.0))
    return ce.ClusterEnv(thunks, backend=ce.Local(workers=2), autoreset_mode=mode, recovery=recovery), gate


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def step_with_a_kill(envs, gate, call):
    """Step; worker 0 is killed when its rows have arrived and worker 1 is still busy, and is replaced meanwhile."""

    def kill():
        wait_for(lambda: envs._driver.rows.ready[:2].all())
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: "worker_replaced" in envs._events.counts)
        time.sleep(0.3)  # time for a wrong rebuild, which must not happen
        gate.unlink()

    pid = envs.stats()["worker_pids"][0]
    gate.touch()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        if call == "step":
            return envs.step(ZEROS)
        envs.send(ZEROS)
        return envs.recv()
    finally:
        killer.join()


@MODES
@pytest.mark.parametrize(("call", "ends"), [("step", True), ("recv", True), ("recv", False)])
def test_rows_that_arrived_before_a_kill_are_delivered_as_they_are(tmp_path, mode, call, ends):
    envs, gate = gated(tmp_path, mode, length=3 if ends else 100)
    envs.reset(seed=0)
    envs.step(ZEROS)
    envs.step(ZEROS)
    obs, rewards, terminations, truncations, infos = step_with_a_kill(envs, gate, call)

    assert rewards.tolist() == [1.0] * N, "no row is lost, and none is of an earlier step"
    assert terminations.tolist() == [ends, ends, False, False] and not truncations.any()
    assert "transition_valid" not in infos
    assert obs[2:, 3].tolist() == [3.0, 3.0], "the rows of the other worker are those of this step"
    assert obs[:2, 1].tolist() == [0.0, 0.0], "rows of the life that ended"
    assert obs[:2, 3].tolist() == ([0.0, 0.0] if ends and mode is AutoresetMode.SAME_STEP else [3.0, 3.0])
    last = obs.copy()

    if mode is AutoresetMode.DISABLED and ends:
        obs, _ = envs.reset(options={"reset_mask": terminations})
        assert obs[:2, 1].tolist() == [1.0, 1.0] and obs[:, 3].tolist() == [0.0, 0.0, 3.0, 3.0]
    elif mode is AutoresetMode.NEXT_STEP and ends:
        obs, rewards, terminations, truncations, infos = envs.step(ZEROS)
        assert rewards.tolist() == [0.0, 0.0, 1.0, 1.0] and not (terminations | truncations).any()
        assert "transition_valid" not in infos, "a loss between two episodes costs no row"
        assert obs[:2, 1].tolist() == [1.0, 1.0] and obs[:, 3].tolist() == [0.0, 0.0, 4.0, 4.0]
    else:  # an episode was running, and is reported as lost
        obs, rewards, terminations, truncations, infos = envs.step(ZEROS)
        assert rewards.tolist() == [0.0, 0.0, 1.0, 1.0] and not terminations.any()
        assert truncations.tolist() == [True, True, False, False]
        assert infos["transition_valid"].tolist() == [False, False, True, True]
        if mode is AutoresetMode.SAME_STEP:
            assert obs[:2, 1].tolist() == [1.0, 1.0] and obs[:, 3].tolist() == [0.0, 0.0, 4.0, 4.0]
            assert np.array_equal(np.stack(infos["final_obs"][:2]), last[:2])
        else:
            assert np.array_equal(obs[:2], last[:2])
    envs.close()


@MODES
def test_a_masked_reset_of_others_does_not_hide_a_loss(tmp_path, mode):
    envs, gate = gated(tmp_path, mode, length=100, what="raise", at=3)
    envs.reset(seed=0)
    envs.step(ZEROS)
    last = envs.step(ZEROS)[0]
    gate.touch()
    envs.send(ZEROS)
    while "env_error" not in envs._events.counts:  # slots 2 and 3 are behind the gate
        with pytest.raises(ce.DeadlineError):
            envs.recv(timeout_s=0.1)
    gate.unlink()
    envs.reset(options={"reset_mask": np.array([True, False, False, False])})
    if mode is AutoresetMode.DISABLED:
        envs.send(np.zeros(1, dtype=np.int64), [1])
        obs, _, _, truncations, infos = envs.recv()
        assert truncations[0] and not infos["transition_valid"][0] and np.array_equal(obs[0], last[1])
    else:
        obs, _, terminations, truncations, infos = envs.step(ZEROS)
        assert truncations.tolist() == [False, True, False, False] and not terminations.any()
        assert infos["transition_valid"].tolist() == [True, False, True, True]
        if mode is AutoresetMode.SAME_STEP:
            assert obs[1].tolist() == [1, 1, 0, 0] and np.array_equal(infos["final_obs"][1], last[1])
        else:
            assert np.array_equal(obs[1], last[1])
    envs.close()


def test_every_fault_of_a_reply_counts_though_the_first_raises(tmp_path):
    memory = str(tmp_path / "lives")
    thunks = [lambda i=i: Trouble(i, "raise", at=1, memory=memory) for i in range(2)]
    envs = ce.ClusterEnv(thunks, backend=ce.Local(workers=1))
    envs.reset(seed=0)
    with pytest.raises(ce.EnvError, match="slot 0"):
        envs.step(np.zeros(2, dtype=np.int64))
    assert [event.slots for event in envs.events() if event.kind == "env_error"] == [(0,), (1,)]
    obs, _ = envs.reset(seed=0)
    assert obs[:, 1].tolist() == [1.0, 1.0] and obs[:, 3].tolist() == [0.0, 0.0]
    envs.close()


class Sleepy(Trouble):
    def step(self, action):
        time.sleep(0.01)  # long enough for the rows before it to be sent alone
        return super().step(action)


def test_a_row_that_arrived_alone_is_still_there_when_its_worker_dies_in_a_first_step(tmp_path):
    memory = str(tmp_path / "lives")
    thunks = [lambda i=i: Sleepy(i, "kill" if i == 1 else None, at=1, memory=memory) for i in range(2)]
    envs = ce.ClusterEnv(thunks, backend=ce.Local(workers=1))
    envs.reset(seed=0)
    envs.send(np.zeros(2, dtype=np.int64))
    with pytest.raises(ce.WorkerLostError, match="before its first successful step"):
        envs.recv()
    obs, rewards, _, truncations, infos = envs.recv()
    assert infos["slot"].tolist() == [0] and obs[0].tolist() == [0, 0, 0, 1] and rewards[0] == 1 and not truncations[0]
    envs.send(np.zeros(1, dtype=np.int64), [0])
    obs, _, _, truncations, infos = envs.recv()
    assert truncations[0] and not infos["transition_valid"][0] and obs[0].tolist() == [0, 0, 0, 1]
    envs.close()


def test_a_rebuilt_environment_does_not_hide_the_loss_before_it(tmp_path):
    """A rollout brings lost environments back; where it is interrupted, the next step still reports the loss."""
    envs, _ = gated(tmp_path, length=100)
    envs.reset(seed=0)
    last = envs.step(ZEROS)[0]
    os.kill(envs.stats()["worker_pids"][0], signal.SIGKILL)
    wait_for(lambda: envs._driver.advance(None) or "worker_lost" in envs._events.counts)
    envs._driver.collecting.is_ready(0)
    wait_for(
        lambda: envs._driver.advance(None) or all(envs._driver._state.slots.env(slot) is Env.HELD for slot in (0, 1))
    )
    obs, rewards, _, truncations, infos = envs.step(ZEROS)
    assert np.array_equal(obs[:2], last[:2]) and truncations.tolist() == [True, True, False, False]
    assert not infos["transition_valid"][:2].any() and rewards[:2].tolist() == [0.0, 0.0]
    obs, rewards, _, truncations, infos = envs.step(ZEROS)
    assert obs[:2].tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]] and not truncations.any()
    assert rewards[:2].tolist() == [0.0, 0.0] and "transition_valid" not in infos
    envs.close()


def test_a_vector_environment_lost_between_two_episodes_of_one_slot(tmp_path):
    """Its slots step together: both report the loss, then both have their reset row."""
    memory = str(tmp_path / "lives")

    def make(num_envs, seeds):
        return SyncVectorEnv([lambda i=i: Trouble(i, memory=memory, length=2 + 8 * i) for i in range(num_envs)])

    envs = ce.ClusterEnv(ce.Vector(make), num_envs=2, backend=ce.Local(workers=1))
    envs.reset(seed=0)
    envs.step(np.zeros(2, dtype=np.int64))
    last, _, terminations, _, _ = envs.step(np.zeros(2, dtype=np.int64))
    assert terminations.tolist() == [True, False]
    os.kill(envs.stats()["worker_pids"][0], signal.SIGKILL)
    obs, _, terminations, truncations, infos = envs.step(np.zeros(2, dtype=np.int64))
    assert truncations.all() and not terminations.any() and not infos["transition_valid"].any()
    assert np.array_equal(obs, last)
    obs, rewards, _, truncations, infos = envs.step(np.zeros(2, dtype=np.int64))
    assert obs.tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]] and not rewards.any() and not truncations.any()
    assert envs.step(np.zeros(2, dtype=np.int64))[0][:, 3].tolist() == [1.0, 1.0]
    envs.close()


class Kills(gym.Env):
    """Takes its worker down in the third step of its first life. Observations are text, beside the shared memory."""

    observation_space = spaces.Text(8)
    action_space = spaces.Discrete(2)

    def __init__(self, memory: Path) -> None:
        self.memory = memory

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return f"{'new' if self.memory.exists() else 'old'}{self.t}", {}

    def step(self, action):
        self.t += 1
        if self.t == 3 and not self.memory.exists():
            self.memory.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{'new' if self.memory.exists() else 'old'}{self.t}", 1.0, False, False, {}


def test_the_last_observation_of_a_lost_episode_is_kept_where_it_is_an_object(tmp_path):
    envs = ce.ClusterEnv(
        [lambda: Kills(tmp_path / "once")], backend=ce.Local(workers=1), autoreset_mode=AutoresetMode.SAME_STEP
    )
    envs.reset(seed=0)
    envs.step([0])
    envs.step([0])
    obs, *_, infos = envs.step([0])
    assert not infos["transition_valid"][0]
    assert obs == ("new0",) and infos["final_obs"][0] == "old2"
    envs.close()
