"""SIGTERM to a head with nodes: the run is closed in order, wherever the script is; others' handlers are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.system import termination

_FAST = {"heartbeat_s": (0.2, 5.0, 60.0), "start_timeout_s": 60.0}

_SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
import clusterenv as ce

envs = ce.ClusterEnv("CartPole-v1", 2, backend=ce.Loopback(nodes=1, folder=sys.argv[1], heartbeat_s=(0.2, 5.0, 60.0)))
envs.reset(seed=1)
where = sys.argv[2]
def send():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    if where == "twice":
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=send).start()
print("begun", flush=True)
try:
    if where == "learning":
        while True:
            sum(range(1000))
    elif where == "sleeping":
        time.sleep(60)
    while True:
        envs.step(np.zeros(2, dtype=np.int64))
finally:
    print("finally", flush=True)  # without close(): the interpreter's exit has to do
"""


@pytest.mark.parametrize("where", ["stepping", "learning", "sleeping", "twice"])
def test_the_script_ends_in_order_wherever_it_is(tmp_path, where):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path), where], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout == "begun\nfinally\n" and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "the run's folder is removed when its nodes were told to leave"


def test_it_is_pythons_own_again_when_the_run_is_closed():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with ce.ClusterEnv("CartPole-v1", 1, backend=ce.Loopback(nodes=1, **_FAST)) as envs:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        envs.reset(seed=1)
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
            envs.step(np.zeros(1, dtype=np.int64))
        assert caught.value.code == 143 and termination.is_terminated()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM, "a fork has no run to close"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_users_own_is_left_alone():
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        with ce.ClusterEnv("CartPole-v1", 1, backend=ce.Loopback(nodes=1, **_FAST)) as envs:
            envs.reset(seed=1)
            os.kill(os.getpid(), signal.SIGTERM)
            envs.step(np.zeros(1, dtype=np.int64))
        assert heard.is_set() and not termination.is_terminated()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_on_one_machine_nothing_has_to_be_closed():
    with ce.ClusterEnv("CartPole-v1", 1, backend=ce.Local(workers=1)):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
