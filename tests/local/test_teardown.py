"""A run ends completely, whichever thread closes it, and whatever interrupts that."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import psutil
import pytest

import clusterenv as ce
import fake_slurm
import prefork
from clusterenv.system.teardown import OwnThread, Teardown
from loopback_agents import Loopback, wait_for

pytestmark = pytest.mark.guarantee(15)


def in_listening_thread(envs, action):
    """Have the thread that listens to the nodes call `action` once, when it next looks at the clock."""
    roster = envs._driver.executor._head.roster
    tick, has_run = roster.tick, threading.Event()

    def ticking(*args):
        if threading.current_thread().name == "clusterenv-head" and not has_run.is_set():
            has_run.set()
            action()
        return tick(*args)

    roster.tick = ticking
    return has_run


def folders(tmp_path):
    return list(tmp_path.glob("clusterenv-*"))


def test_garbage_collection_in_the_listening_thread_closes(tmp_path):
    """Its thread, its socket and its processes: the leak detector of the tests looks for them."""
    envs = ce.ClusterEnv("CartPole-v1", 2, backend=Loopback(1, folder=str(tmp_path)))
    envs.reset(seed=1)
    before = children()
    has_run = in_listening_thread(envs, gc.collect)
    envs.itself = envs
    gc.disable()
    try:
        del envs
        assert has_run.wait(30)
        wait_for(lambda: not folders(tmp_path) and not before & children())
    finally:
        gc.enable()


def children():
    return {child.pid for child in psutil.Process().children()} - {prefork.own()[0]}


def test_close_in_the_listening_thread(tmp_path):
    envs = ce.ClusterEnv("CartPole-v1", 2, backend=Loopback(1, folder=str(tmp_path)))
    envs.reset(seed=1)
    failures = []

    def close():
        try:
            envs.close()
        except BaseException as error:
            failures.append(error)

    assert in_listening_thread(envs, close).wait(30)
    wait_for(lambda: not folders(tmp_path))
    assert not failures
    with pytest.raises(ce.ClosedError):
        envs.reset()


def test_what_fails_in_the_listening_thread_is_raised_by_the_next_call(tmp_path):
    with ce.ClusterEnv("CartPole-v1", 2, backend=Loopback(1, folder=str(tmp_path))) as envs:
        envs.reset(seed=1)
        head = envs._driver.executor._head

        def fail():
            raise KeyError("a defect")

        assert in_listening_thread(envs, fail).wait(30)
        wait_for(lambda: "clusterenv-head" not in {thread.name for thread in threading.enumerate()})
        for call in (lambda: envs.step(np.zeros(2, dtype=np.int64)), lambda: envs.reset(seed=1)):
            with pytest.raises(ce.ClusterEnvError, match=r"listens to the nodes failed .*a defect") as caught:
                call()
            told = "".join(traceback.format_exception(caught.value))
            assert 'raise KeyError("a defect")' in told and not head._is_closed
    assert not folders(tmp_path)


INTERRUPTED = """
import sys, time
import numpy as np
import clusterenv as ce

backend = ce.Slurm(nodes=1, interface="lo", folder=sys.argv[1], heartbeat_s=(0.2, 1.5, 4.0))
with ce.ClusterEnv("CartPole-v1", 1, backend=backend) as envs:
    envs.reset(seed=1)
    print("running", flush=True)
    while True:
        envs.step(np.zeros(1, np.int64))
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.3, 0.6, 1.0])
def test_a_second_interrupt_while_closing_leaves_no_key_and_no_job(tmp_path, monkeypatch, delay_s):
    slurm = fake_slurm.install(tmp_path / "slurm", monkeypatch)
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "keys")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as head:
        assert head.stdout is not None and head.stdout.readline() == b"running\n"
        head.send_signal(signal.SIGINT)
        time.sleep(delay_s)
        head.send_signal(signal.SIGINT)
        _, told = head.communicate(timeout=60)
    assert b"KeyboardInterrupt" in told
    assert (slurm / "scancelled").exists(), told.decode()
    assert not list((tmp_path / "keys").glob("clusterenv-*")), "its key files"


NEVER_COMES = """
import sys
import clusterenv as ce

backend = ce.Slurm(nodes=1, interface="lo", folder=sys.argv[1], python="false")
ce.ClusterEnv("CartPole-v1", 1, backend=backend)
"""


@pytest.mark.parametrize("delay_s", [0.02, 0.3])
def test_a_second_interrupt_while_a_start_is_given_up(tmp_path, monkeypatch, delay_s):
    slurm = fake_slurm.install(tmp_path / "slurm", monkeypatch)
    with subprocess.Popen([sys.executable, "-c", NEVER_COMES, str(tmp_path / "keys")], stderr=subprocess.PIPE) as head:
        wait_for(lambda: list((slurm / "jobs").iterdir()))
        head.send_signal(signal.SIGINT)
        time.sleep(delay_s)
        head.send_signal(signal.SIGINT)
        _, told = head.communicate(timeout=60)
    assert b"KeyboardInterrupt" in told
    assert (slurm / "scancelled").exists(), told.decode()
    assert not list((tmp_path / "keys").glob("clusterenv-*")), "its key files"


# -- Teardown itself ------------------------------------------------------------------------------------------------


def test_it_is_done_once_and_awaited_by_all_who_call():
    goes_on, calls = threading.Event(), []
    teardown = Teardown(lambda: (calls.append(threading.current_thread()), goes_on.wait(30)), 30)
    waiting = [threading.Thread(target=teardown) for _ in range(2)]
    for thread in waiting:
        thread.start()
    wait_for(lambda: calls)
    assert teardown.has_begun and all(thread.is_alive() for thread in waiting)
    goes_on.set()
    teardown()
    for thread in waiting:
        thread.join()
    (thread,) = calls
    assert isinstance(thread, OwnThread)


def test_a_thread_of_the_run_does_not_wait_for_it():
    goes_on = threading.Event()
    teardown = Teardown(lambda: goes_on.wait(30), 30)
    own = OwnThread(teardown, "clusterenv-test")
    own.start()
    own.join(30)
    assert not own.is_alive() and not goes_on.is_set()
    goes_on.set()
    teardown()


def test_where_no_thread_can_be_started_it_is_done_in_the_callers(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    calls = []
    Teardown(lambda: calls.append(threading.current_thread()), 30)()
    assert calls == [threading.current_thread()]


LIBRARY = """
import atexit
from clusterenv.system.teardown import Teardown, precede_exit_handlers

first = Teardown(lambda: print("first"), 30)
atexit.register(print, "library")
{then}
"""


@pytest.mark.guarantee(15)
@pytest.mark.parametrize(
    ("then", "order"),
    [
        ("", "library first"),
        ("precede_exit_handlers()", "first library"),
        ("second = Teardown(lambda: print('second'), 30)", "second first library"),
    ],
)
def test_at_exit_it_precedes_the_handlers_of_what_backends_import(then, order):
    """That of the Kubernetes client deletes certificates, without which pods would be left behind."""
    done = subprocess.run([sys.executable, "-c", LIBRARY.format(then=then)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == order.split(), done.stderr


def test_what_it_raises_is_raised_where_it_is_awaited():
    def fail():
        raise OSError("no such socket")

    teardown = Teardown(fail, 30)
    with pytest.raises(OSError, match="no such socket"):
        teardown()
    teardown()


def test_an_interrupt_ends_the_wait_and_not_the_work():
    goes_on, done = threading.Event(), []
    teardown = Teardown(lambda: (goes_on.wait(30), done.append(1)), 30)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        teardown()
    timer.join()
    assert not done
    goes_on.set()
    teardown()
    assert done == [1]
