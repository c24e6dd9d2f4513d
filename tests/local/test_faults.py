"""Faults on one machine: what the user sees, and in which time."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import clusterenv as ce
from toys import SpaceEnv, Trouble

N = 4
ZEROS = np.zeros(N, dtype=np.int64)


def troubled(tmp_path, what, *, slot=1, mode=AutoresetMode.NEXT_STEP, workers=2, recovery=None, **kwargs):
    """Four environments on two workers; `slot` has the trouble, at its third step."""
    memory = str(tmp_path / "lives")

    def thunk(i):
        return lambda: Trouble(i, what if i == slot else None, memory=memory, **kwargs)

    return ce.ClusterEnv(
        [thunk(i) for i in range(N)],
        backend=ce.Local(workers=workers),
        autoreset_mode=mode,
        recovery=recovery or ce.Recovery(backoff_s=(0.05, 0.1), step_timeout_s=1.0),
    )


def close_in_time(envs, record=lambda name, value: None):
    start = time.monotonic()
    envs.close()
    seconds = time.monotonic() - start
    assert seconds < 10
    record("closed_s", seconds)
    envs.close()


# Which slots lose their episode: the whole worker of slot 1 (slots 0 and 1), or slot 1 alone.
FAULTS = {
    "kill": ([0, 1], "SIGKILL"),
    "segfault": ([0, 1], "SIGSEGV"),
    "hang": ([0, 1], "hung for"),
    "hang_with_gil": ([0, 1], "hung for"),
    "raise": ([1], "ZeroDivisionError: simulator exploded"),
    "exit": ([1], "SystemExit: 3"),
    "nan": ([1], "observation is not finite"),
    "shape": ([1], "has shape (3,), its space says (4,)"),
    "inf_reward": ([1], "reward is inf"),
}
GUARANTEE = {"kill": 1, "segfault": 2, "hang": 5, "hang_with_gil": 5, "raise": 10, "exit": 10}  # others: 12


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda m: m.name)
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.guarantee(GUARANTEE.get(what, 12), 16)) for what in FAULTS]
)
def test_fault_costs_only_the_slots_concerned(tmp_path, what, mode, record_property):
    hit, reason = FAULTS[what]
    spared = [slot for slot in range(N) if slot not in hit]
    envs = troubled(tmp_path, what, mode=mode)
    envs.reset(seed=0)
    envs.step(ZEROS)
    last_obs, *_ = envs.step(ZEROS)

    start = time.monotonic()
    obs, rewards, terminations, truncations, infos = envs.step(ZEROS)
    seconds = time.monotonic() - start
    assert seconds < (3.5 if "hang" in what else 3.0)
    event = next(e for e in envs.events() if e.kind in ("worker_lost", "env_error"))
    if mode is not AutoresetMode.SAME_STEP:  # there the step also waits for the replacement
        record_property("detected_s", seconds)
    record_property("lost_steps", int(truncations.sum()))

    assert rewards[hit].tolist() == [0.0] * len(hit) and rewards[spared].tolist() == [1.0] * len(spared)
    assert not terminations.any()
    assert truncations.tolist() == [slot in hit for slot in range(N)]
    assert infos["transition_valid"].tolist() == [slot not in hit for slot in range(N)]
    ends_worker = what in ("kill", "segfault", "hang", "hang_with_gil")
    assert infos["worker_lost"].tolist() == [ends_worker and slot in hit for slot in range(N)]
    assert reason in infos["loss_reason"][1] and infos["loss_reason"][3] is None
    assert obs[spared, 3].tolist() == [3.0] * len(spared), "siblings go on in their episode"

    if mode is AutoresetMode.SAME_STEP:
        assert obs[hit, 3].tolist() == [0.0] * len(hit), "the new episode's first observation"
        for slot in hit:
            assert np.array_equal(infos["final_obs"][slot], last_obs[slot])
    else:
        assert np.array_equal(obs[hit], last_obs[hit]), "the last observation delivered"
        if mode is AutoresetMode.DISABLED:
            with pytest.raises(ce.UsageError, match="autoreset is DISABLED"):
                envs.step(ZEROS)
            obs, infos = envs.reset(options={"reset_mask": truncations})
        else:
            obs, rewards, terminations, truncations, infos = envs.step(ZEROS)
            assert rewards[hit].tolist() == [0.0] * len(hit) and "transition_valid" not in infos
            assert not truncations.any() and not terminations.any()
        assert obs[hit, 3].tolist() == [0.0] * len(hit) and obs[hit, 1].tolist() == [1.0] * len(hit)

    obs, rewards, terminations, truncations, infos = envs.step(ZEROS)
    assert rewards.tolist() == [1.0] * N and not truncations.any() and infos == {}
    assert obs[hit, 3].tolist() == [1.0] * len(hit) and obs[hit, 1].tolist() == [1.0] * len(hit)

    assert reason in event.reason and 1 in event.slots
    if what == "raise":
        assert "in _fail" in event.detail and event.seed == 1 and event.step == 3 and event.incarnation == 0
    if what == "segfault":
        assert "Segmentation fault" in event.detail and "_fail" in event.detail
    if what.startswith("hang"):
        assert "_fail" in event.detail, "faulthandler says where it hung"
    close_in_time(envs, record_property)


def test_later_incarnations_have_seeds_of_their_own_and_sticky_attributes(tmp_path):
    envs = troubled(tmp_path, "kill")
    envs.reset(seed=5)
    envs.set_attr("mood", ["a", "b", "c", "d"])
    envs.call("set_wrapper_attr", "volume", 11, sticky=True)
    for _ in range(4):
        envs.step(ZEROS)
    assert envs.get_attr("mood") == ("a", "b", "c", "d") and envs.get_attr("volume") == (11,) * 4
    assert envs.stats()["incarnations"].tolist() == [1, 1, 0, 0]
    expected = [int(np.random.SeedSequence((5, slot, 1)).generate_state(1)[0] >> 1) for slot in (0, 1)]
    assert list(envs.np_random_seed) == [*expected, 7, 8]
    envs.close()


@pytest.mark.guarantee(1)
def test_a_worker_killed_between_steps_is_replaced(tmp_path, record_property):
    envs = troubled(tmp_path, None)
    envs.reset(seed=0)
    envs.step(ZEROS)
    os.kill(envs.stats()["worker_pids"][1], signal.SIGKILL)
    start = time.monotonic()
    *_, truncations, infos = envs.step(ZEROS)
    seconds = time.monotonic() - start
    assert seconds < 2
    record_property("detected_s", seconds)
    assert truncations.tolist() == [False, False, True, True]
    assert "SIGKILL" in infos["loss_reason"][2]
    obs, *_ = envs.step(ZEROS)
    assert obs[2:, 3].tolist() == [0.0, 0.0] and obs[:2, 3].tolist() == [3.0, 3.0]
    close_in_time(envs)


def test_a_worker_killed_after_its_episodes_ended_costs_nothing(tmp_path):
    envs = troubled(tmp_path, None, length=2)
    envs.reset(seed=0)
    envs.step(ZEROS)
    _, _, terminations, _, _ = envs.step(ZEROS)
    assert terminations.all()
    os.kill(envs.stats()["worker_pids"][0], signal.SIGKILL)
    obs, rewards, _, truncations, infos = envs.step(ZEROS)
    assert not truncations.any() and infos == {} and rewards.tolist() == [0.0] * N
    assert obs[:, 3].tolist() == [0.0] * N and obs[:2, 1].tolist() == [1.0, 1.0]
    close_in_time(envs)


def test_a_dead_fork_server_is_started_again(tmp_path):
    envs = troubled(tmp_path, None, length=1_000_000)  # a loss between two episodes would cost none
    envs.reset(seed=0)
    envs.step(ZEROS)
    server = envs._driver.executor._server
    os.kill(server.pid, signal.SIGKILL)
    # Its workers die with it, but each a little later, and may answer a step before.
    lost = np.zeros(N, dtype=int)
    deadline = time.monotonic() + 30
    while not lost.all() and time.monotonic() < deadline:
        *_, infos = envs.step(ZEROS)
        lost += infos.get("worker_lost", np.zeros(N, dtype=bool))
    assert lost.tolist() == [1] * N
    for _ in range(2):  # the reset rows, where the loss was told last
        obs, *_ = envs.step(ZEROS)
    assert obs[:, 1].tolist() == [1.0] * N
    close_in_time(envs)


@pytest.mark.guarantee(1)
def test_a_kill_during_reset_is_made_good(tmp_path):
    envs = troubled(tmp_path, None)
    envs.reset(seed=0)
    envs.step(ZEROS)
    os.kill(envs.stats()["worker_pids"][0], signal.SIGKILL)
    obs, _ = envs.reset(seed=9)
    assert obs[:, 3].tolist() == [0.0] * N and list(envs.np_random_seed) == [9, 10, 11, 12]
    envs.close()


@pytest.mark.guarantee(10)
def test_raise_in_autoreset_is_made_good(tmp_path):
    envs = troubled(tmp_path, "raise_in_reset", length=2)
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(ZEROS)
    obs, _, _, truncations, infos = envs.step(ZEROS)
    assert not truncations.any() and infos == {}
    assert obs[1].tolist() == [1, 1, 0, 0], "the reset row of the new incarnation"
    envs.close()


@pytest.mark.parametrize(("what", "error"), [("raise", ce.EnvError), ("kill", ce.WorkerLostError)])
def test_an_error_before_the_first_successful_step_raises_at_once(tmp_path, what, error):
    envs = troubled(tmp_path, what, at=1)
    envs.reset(seed=0)
    with pytest.raises(error, match="slot 1"):
        envs.step(ZEROS)
    close_in_time(envs)


@pytest.mark.guarantee(10)
def test_an_error_in_init_raises_at_once_with_its_traceback(tmp_path):
    start = time.monotonic()
    with pytest.raises(ce.EnvError, match="no simulator licence") as caught:
        troubled(tmp_path, "raise_in_init")
    assert time.monotonic() - start < 5
    assert caught.value.slot == 1 and caught.value.phase == "init" and "OSError" in caught.value.remote_traceback


def test_on_error_raise(tmp_path):
    envs = troubled(tmp_path, "raise", recovery=ce.Recovery(on_error="raise"))
    envs.reset(seed=0)
    envs.step(ZEROS)
    envs.step(ZEROS)
    with pytest.raises(ce.EnvError, match="ZeroDivisionError") as caught:
        envs.step(ZEROS)
    assert caught.value.slot == 1 and "simulator exploded" in caught.value.remote_traceback
    with pytest.raises(ce.UsageError, match="call reset"):
        envs.step(ZEROS)
    obs, _ = envs.reset(seed=0)
    assert obs[:, 3].tolist() == [0.0] * N
    envs.step(ZEROS)
    close_in_time(envs)


@pytest.mark.guarantee(11)
@pytest.mark.parametrize("what", ["raise", "kill"])
def test_a_crash_loop_ends_in_a_typed_error(tmp_path, what):
    """docs/guarantees.md 11."""
    recovery = ce.Recovery(backoff_s=(0.01, 0.02), max_restarts=3)
    envs = troubled(tmp_path, what, always=True, recovery=recovery)
    envs.reset(seed=0)
    with pytest.raises(ce.CrashLoopError, match="failed 4 times") as caught:
        for _ in range(100):
            envs.step(ZEROS)
    assert "s ago" in str(caught.value)
    close_in_time(envs)


@pytest.mark.guarantee(11)
def test_reset_after_a_crash_loop_starts_again(tmp_path):
    envs = troubled(tmp_path, "kill", recovery=ce.Recovery(max_restarts=0))
    envs.reset(seed=0)
    with pytest.raises(ce.CrashLoopError):
        for _ in range(5):
            envs.step(ZEROS)
    obs, _ = envs.reset(seed=0)
    assert obs[:, 3].tolist() == [0.0] * N and obs[:, 1].tolist() == [1.0, 1.0, 0.0, 0.0]
    envs.step(ZEROS)
    close_in_time(envs)


@pytest.mark.parametrize("then", ["send", "reset"])
def test_a_slot_is_rebuilt_once_whatever_the_user_does_meanwhile(tmp_path, then):
    """The rebuild of slot 1 is under way while other slots are received, and then slot 1 is asked for."""

    class SlowToMake(Trouble):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            time.sleep(0.3 if self.life else 0)

    memory = str(tmp_path / "lives")
    thunks = [lambda i=i: SlowToMake(i, "raise" if i == 1 else None, memory=memory) for i in range(N)]
    envs = ce.ClusterEnv(thunks, backend=ce.Local(workers=4))
    envs.reset(seed=0)
    for _ in range(3):
        *_, infos = envs.step(ZEROS)
    assert not infos["transition_valid"][1]
    envs.send([0, 0], [2, 3])
    envs.recv()
    if then == "send":
        envs.send([0], [1])
        obs, *_ = envs.recv()
    else:
        obs = envs.reset(seed=0)[0][1:2]
    assert obs[0, 0] == 1 and obs[0, 3] == 0
    obs, *_ = envs.step(ZEROS)
    assert obs[1].tolist()[3] == 1
    assert envs.stats()["incarnations"].tolist() == [0, 1, 0, 0]
    close_in_time(envs)


def test_no_replacement_in_time_raises_with_the_good_rows(tmp_path):
    recovery = ce.Recovery(backoff_s=(30.0, 60.0), recovery_timeout_s=0.3)
    envs = troubled(tmp_path, "raise", always=True, at=1, recovery=recovery)
    envs._driver.rows.proven[:] = True
    envs.reset(seed=0)
    envs.step(ZEROS)
    envs.step(ZEROS)
    envs.step(ZEROS)
    with pytest.raises(ce.WorkerLostError, match=r"slots \[1\]") as caught:
        envs.step(ZEROS)
    assert caught.value.slots == (1,)
    obs, *_ = caught.value.rows
    assert obs[:, 0].tolist() == [0.0, 2.0, 3.0]
    close_in_time(envs)


@pytest.mark.guarantee(6)
def test_a_slow_environment_is_named_and_never_killed(tmp_path):
    """docs/guarantees.md 6."""

    class Slow(Trouble):
        def step(self, action):
            time.sleep(0.01 if self.slot == 2 else 0.0005)
            return super().step(action)

    envs = ce.ClusterEnv([lambda i=i: Slow(i) for i in range(N)], backend=ce.Local(workers=2))
    envs.reset(seed=0)
    for _ in range(260):
        envs.step(ZEROS)
    assert envs.stats()["slow_slots"] == [2]
    assert [e.kind for e in envs.events()] == ["slow"] and envs.events()[0].slots == (2,)
    envs.close()


@pytest.mark.guarantee(28)
def test_a_late_reply_is_never_taken_for_the_next(tmp_path):
    """docs/guarantees.md 28: Gymnasium's AsyncVectorEnv returns the previous step's result here."""

    class Sleepy(Trouble):
        def step(self, action):
            time.sleep(0.3 if self.t == 1 and self.slot == 3 else 0)
            return super().step(action)

    envs = ce.ClusterEnv([lambda i=i: Sleepy(i) for i in range(N)], backend=ce.Local(workers=2))
    envs.reset(seed=0)
    envs.step(ZEROS)
    envs.send(ZEROS)
    with pytest.raises(ce.DeadlineError, match=r"slots \[.*3\]"):
        envs.recv(timeout_s=0.05)
    with pytest.raises(ce.UsageError, match="in flight"):
        envs.step(ZEROS)
    obs, *_ = envs.recv()
    assert obs[:, 3].tolist() == [2.0] * N
    obs, *_ = envs.step(ZEROS)
    assert obs[:, 3].tolist() == [3.0] * N
    envs.send(ZEROS)
    obs, _ = envs.reset(seed=0)
    assert obs[:, 3].tolist() == [0.0] * N
    obs, *_ = envs.step(ZEROS)
    assert obs[:, 3].tolist() == [1.0] * N
    envs.close()


def test_objects_survive_a_loss(tmp_path):
    """Observations that travel beside the shared memory are kept at the head, too."""

    class Kill(SpaceEnv):
        def step(self, action):
            if self.t == 2 and not (tmp_path / "once").exists():
                (tmp_path / "once").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    space = spaces.Dict(text=spaces.Text(4), box=spaces.Box(-1, 1, (2,)))
    envs = ce.ClusterEnv([lambda: Kill(space, spaces.Discrete(2))] * 2, backend=ce.Local(workers=1))
    envs.reset(seed=0)
    envs.step([0, 1])
    last, *_ = envs.step([0, 1])
    obs, *_, infos = envs.step([0, 1])
    assert obs["text"] == last["text"] and np.array_equal(obs["box"], last["box"])
    assert not infos["transition_valid"].any()
    envs.step([0, 1])
    envs.close()


@pytest.mark.guarantee(16)
def test_closing_while_an_environment_hangs_is_bounded(tmp_path):
    """docs/guarantees.md 16."""
    envs = troubled(tmp_path, "hang_with_gil", at=1, recovery=ce.Recovery())
    envs.reset(seed=0)
    envs.send(ZEROS)
    close_in_time(envs)


def test_a_worker_of_a_node_that_ended_before_the_step_gives_no_row_in_it():
    """Its node steps the others, and answers for those alone."""

    class Where(Trouble):
        def pid(self):
            return os.getpid()

    backend = ce.Loopback(nodes=1, workers_per_node=2)
    with ce.ClusterEnv([lambda i=i: Where(i) for i in range(2)], backend=backend) as envs:
        envs.reset(seed=0)
        envs.step([0, 0])
        process = psutil.Process(envs.call("pid")[0])
        process.kill()
        psutil.wait_procs([process], timeout=10)
        time.sleep(0.2)  # the node's word of it is here, and not taken in before the next step is asked for
        obs, rewards, _, truncations, infos = envs.step([0, 0])
        assert infos["transition_valid"].tolist() == [False, True]
        assert rewards.tolist() == [0.0, 1.0] and truncations.tolist() == [True, False] and obs[1, 3] == 2.0
        obs, *_ = envs.step([0, 0])
        assert obs[:, 3].tolist() == [0.0, 3.0]


@pytest.mark.parametrize(("what", "lost"), [("raise", (1,)), ("kill", (0, 1))])
def test_a_call_of_healthy_environments_does_not_wait_for_those_that_are_gone(tmp_path, what, lost):
    envs = troubled(tmp_path, what, recovery=ce.Recovery(backoff_s=(30.0, 60.0)), mode=AutoresetMode.DISABLED)
    envs.reset(seed=0)
    for _ in range(3):
        *_, infos = envs.step(ZEROS)
    assert np.flatnonzero(~infos["transition_valid"]).tolist() == list(lost)
    healthy = [slot for slot in (3, 0, 2) if slot not in lost]
    assert envs.get_attr("slot", slots=healthy) == tuple(healthy)
    assert envs.call("_obs", slots=healthy)[0].tolist() == [3, 0, 0, 3]
    with pytest.raises(ce.WorkerLostError, match=r"slots \[1\] failed and are not back yet") as caught:
        envs.call("_obs", slots=[1, 2])
    assert caught.value.slots == (1,)
    with pytest.raises(ce.WorkerLostError) as caught:
        envs.get_attr("slot")
    assert caught.value.slots == lost
    close_in_time(envs)
