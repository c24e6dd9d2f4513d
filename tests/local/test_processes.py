"""How processes start and end: unguarded scripts, notebooks, Ctrl-C, sys.exit, garbage (docs/guarantees.md 13, 15)."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import clusterenv as ce
from survivors import survivors
from toys import Trouble

SCRIPT = """
import gymnasium as gym
import numpy as np
import clusterenv as ce

class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), 1.0, False, False, {}

gym.register("Mine-v0", entry_point=Mine)
offset = 1
envs = ce.ClusterEnv([lambda: gym.make("CartPole-v1")] * 2, backend=ce.Local(workers=2))
envs.reset(seed=offset)
envs.step([0, 1])
envs.close()
envs = ce.ClusterEnv("Mine-v0", num_envs=3, backend=ce.Local(workers=2))
envs.reset()
print("rewards", envs.step([0, 1, 0])[1].tolist())
"""


def environment():
    """Subprocesses must not see the notebook's or pytest's variables, but the same package."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def no_children_left(marker):
    """No process of this test is left: each carries the marker in its environment."""
    deadline = time.monotonic() + 5
    while True:
        left = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("CLUSTERENV_TEST") == marker and process.pid != os.getpid():
                    left.append(process.pid)
            except psutil.Error:
                continue
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.05)


def test_an_unguarded_script_runs_and_leaves_nothing(tmp_path):
    """No `if __name__ == "__main__"`, classes of the script itself, and no close() at its end."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    env = {**environment(), "CLUSTERENV_TEST": str(path)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "rewards [1.0, 1.0, 1.0]" in done.stdout and done.stderr == ""
    no_children_left(str(path))


def test_a_script_from_stdin_runs():
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "rewards [1.0, 1.0, 1.0]" in done.stdout


def test_modules_beside_the_script_are_found(tmp_path):
    (tmp_path / "my_envs.py").write_text("import gymnasium as gym\ndef make():\n    return gym.make('CartPole-v1')\n")
    script = "import clusterenv as ce, my_envs\nenvs = ce.ClusterEnv(my_envs.make, 2)\nprint(envs.reset()[0].shape)\n"
    (tmp_path / "main.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.stdout == "(2, 4)\n", done.stderr


def test_a_notebook_runs():
    """A real kernel, driven from a process of its own: nbclient's event loop keeps descriptors open."""
    driver = """
        import sys, nbformat
        from nbclient import NotebookClient
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.stdin.read())])
        NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
        print("".join(output.get("text", "") for output in notebook.cells[0].outputs))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(driver)],
        input=SCRIPT,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=90,
    )
    assert "rewards [1.0, 1.0, 1.0]" in done.stdout, done.stderr


@pytest.mark.guarantee(15)
@pytest.mark.parametrize("ending", ["raise ValueError('mine')", "raise SystemExit(7)", "os._exit(9)", "del envs"])
@pytest.mark.parametrize("moment", ["idle", "in_flight"])
def test_however_the_script_ends_nothing_is_left(tmp_path, ending, moment):
    """docs/guarantees.md 13, 15."""
    script = f"""
        import os
        import clusterenv as ce
        envs = ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2))
        envs.reset()
        {"envs.send([0, 1, 0, 1])" if moment == "in_flight" else "envs.step([0, 1, 0, 1])"}
        {ending}
    """
    env = {**environment(), "CLUSTERENV_TEST": str(tmp_path)}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=env, timeout=60
    )
    assert time.monotonic() - start < 15
    assert done.returncode == {"raise ValueError('mine')": 1, "raise SystemExit(7)": 7, "os._exit(9)": 9}.get(ending, 0)
    no_children_left(str(tmp_path))


HANGING = """
import sys, time
import clusterenv as ce
import gymnasium as gym

class Stuck(gym.Wrapper):
    def step(self, action):
        time.sleep(1000)

envs = ce.ClusterEnv([lambda: Stuck(gym.make("CartPole-v1"))] * 2, backend=ce.Local(workers=2))
envs.reset()
print("ready", flush=True)
envs.step([0, 1])
"""


@pytest.mark.guarantee(13, 15)
@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGINT, signal.SIGINT], [signal.SIGKILL], [signal.SIGTERM]]
)
def test_ctrl_c_and_kill_leave_nothing(tmp_path, signals):
    """docs/guarantees.md 13, 15: while an environment hangs."""
    env = {**environment(), "CLUSTERENV_TEST": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    start = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    if signals == [signal.SIGINT]:
        assert "KeyboardInterrupt" in stderr
    no_children_left(str(tmp_path))


@pytest.mark.guarantee(15)
def test_garbage_collection_closes():
    envs = ce.ClusterEnv("CartPole-v1", num_envs=2)
    pids = [pid for pid in envs.stats()["worker_pids"] if pid]
    del envs
    gc.collect()
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_fork_of_the_head_leaves_the_workers_alone():
    envs = ce.ClusterEnv("CartPole-v1", num_envs=2)
    envs.reset()
    pid = os.fork()
    if pid == 0:
        envs.close()
        os._exit(0)
    os.waitpid(pid, 0)
    envs.step([0, 1])
    envs.close()


class Chatty(Trouble):
    def step(self, action):
        print(f"hello from t={self.t}")
        os.write(2, b"raw words\n")
        return super().step(action)


def test_what_workers_print_reaches_the_log_with_its_slot(caplog):
    caplog.set_level(logging.INFO, "clusterenv")
    envs = ce.ClusterEnv([lambda i=i: Chatty(i) for i in range(4)], backend=ce.Local(workers=2))
    envs.reset()
    for _ in range(3):
        envs.step([0] * 4)
        time.sleep(0.05)
    envs.close()
    assert "[slot 3] hello from t=0" in caplog.messages
    assert "[slots 2-3] raw words" in caplog.messages


def test_what_workers_print_is_seen_without_any_logging_set_up():
    script = """
        import clusterenv as ce, gymnasium as gym, time
        def make():
            print("made one")
            return gym.make("CartPole-v1")
        envs = ce.ClusterEnv([make, make])
        envs.reset(); envs.step([0, 1]); time.sleep(0.1); envs.step([0, 1])
        envs.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert sorted(done.stderr.splitlines()) == ["[slot 0] made one", "[slot 1] made one"]


class Where(Trouble):
    def pid(self):
        return os.getpid()


class Spawner(Trouble):
    """Starts a simulator of its own, which must not outlive the worker."""

    def __init__(self, slot, detached):
        super().__init__(slot)
        self.child = subprocess.Popen(["sleep", "1000"], start_new_session=detached)


@pytest.mark.parametrize("detached", [False, True])
def test_simulators_that_environments_start_die_with_them(detached):
    envs = ce.ClusterEnv([lambda: Spawner(0, detached)] * 2, backend=ce.Local(workers=2))
    envs.reset()
    children = [psutil.Process(popen) for popen in (c.pid for c in _children(envs))]
    assert len(children) >= 2
    envs.close()
    alive = survivors(children, 5)
    assert not alive


def _children(envs):
    server = psutil.Process(envs._driver.executor._server.pid)
    return [p for p in server.children(recursive=True) if p.name() == "sleep"]


def test_a_breakpoint_works_in_the_calling_process():
    with ce.ClusterEnv(Where, 2, backend=ce.Local(workers=0)) as envs:
        assert envs.call("pid") == (os.getpid(), os.getpid())
    with ce.ClusterEnv(Where, 2, backend=ce.Local(workers=2)) as envs:
        assert os.getpid() not in envs.call("pid")


def test_forked_workers_do_not_share_global_random_state():
    class Draw(gym.Env):
        observation_space = spaces.Box(0, 1, (1,), np.float64)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.random.random(1), {}

        def step(self, action):
            return np.random.random(1), 0.0, False, False, {}

    envs = ce.ClusterEnv(Draw, 4, backend=ce.Local(workers=4))
    obs, _ = envs.reset()
    envs.close()
    assert len(set(obs[:, 0])) == 4


def test_threads_of_numerical_libraries_are_bounded_in_workers():
    class Ask(Trouble):
        def threads(self):
            return os.environ.get("OMP_NUM_THREADS")

    with ce.ClusterEnv(Ask, 2, backend=ce.Local(workers=1, threads_per_worker=3)) as envs:
        assert envs.call("threads") == ("3", "3")
