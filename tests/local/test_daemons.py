"""Simulators that environments start as daemons end with the worker that started them, and with no other."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import psutil
import pytest

import clusterenv as ce
from survivors import survivors
from toys import Trouble


class Echo:
    """A daemon (setsid, two forks, no variable of its parent's environment) that writes back what it reads.

    It holds both ends of its input, so that it never reads an end of file and outlives whoever started it.
    """

    def __init__(self, executes: bool) -> None:
        to_read, self.write_end = os.pipe()
        self.read_end, to_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            pids = [os.getpid()]
            if not executes and (grandchild := os.fork()):
                pids.append(grandchild)
            elif not executes:
                os.setsid()
                signal.pause()
            os.write(to_write, " ".join(map(str, pids)).encode() + b"\n")
            os.dup2(to_read, 0)
            os.dup2(to_write, 1)
            os.set_inheritable(self.write_end, True)
            if executes:
                os.execve("/bin/cat", ["cat"], {})
            while True:
                os.write(1, os.read(0, 100))
        os.waitpid(child, 0)
        os.close(to_read)
        os.close(to_write)
        self.pids = list(map(int, self._read().split()))

    def _read(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self.read_end, 1)
            if not byte:
                raise RuntimeError("the daemon is gone")
            line += byte
        return line

    def ask(self) -> bytes:
        os.write(self.write_end, b"hello\n")
        return self._read()


class WithDaemons(Trouble):
    """Starts one daemon that executes a program and one that forks another, and talks to both in each step."""

    def __init__(self, slot):
        super().__init__(slot, length=1000)
        self.daemons = [Echo(executes) for executes in (True, False)]

    def step(self, action):
        assert [daemon.ask() for daemon in self.daemons] == [b"hello\n"] * 2
        return super().step(action)

    def pids(self):
        return os.getpid(), [pid for daemon in self.daemons for pid in daemon.pids]


@pytest.mark.parametrize("network", [False, True])
def test_a_workers_daemons_end_with_it_and_with_no_other(network):
    backend = ce.Loopback(nodes=1, workers_per_node=2) if network else ce.Local(workers=2)
    with ce.ClusterEnv([lambda i=i: WithDaemons(i) for i in range(2)], backend=backend) as envs:
        envs.reset(seed=0)
        envs.step([0, 0])
        (worker, first), (_, second) = envs.call("pids")
        first, second = ([psutil.Process(pid) for pid in pids] for pids in (first, second))
        os.kill(worker, signal.SIGKILL)
        valid = []
        while len(valid) < 3 or first[0].is_running():  # the lost row, the replacement's first row, then steps
            valid.append(envs.step([0, 0])[4].get("transition_valid", np.ones(2, dtype=bool)).tolist())
            assert valid[-1][1], envs.events()
        assert valid[0] == [False, True]
        alive = survivors(first, 10)
        assert not alive
        (_, replaced), (_, still) = envs.call("pids")
        assert still == [process.pid for process in second]
        second += [psutil.Process(pid) for pid in replaced]
    alive = survivors(second, 10)
    assert not alive


STARTS_ONE = """
import subprocess
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""


def test_what_a_module_starts_when_it_is_imported_ends_with_the_last_worker(tmp_path, monkeypatch):
    (tmp_path / "starts_one.py").write_text(STARTS_ONE)
    monkeypatch.syspath_prepend(tmp_path)
    backend = ce.Local(workers=2, preload=("starts_one",))

    def make():
        import starts_one

        class Imported(Trouble):
            def pids(self):
                return os.getpid(), starts_one.daemon.pid

        return Imported()

    assert "starts_one" not in sys.modules
    with ce.ClusterEnv(make, 2, backend=backend) as envs:
        envs.reset()
        envs.step([0, 0])
        worker, daemon = envs.call("pids")[0]
        process = psutil.Process(daemon)
        os.kill(worker, signal.SIGKILL)
        for _ in range(3):
            envs.step([0, 0])
        assert process.status() != psutil.STATUS_ZOMBIE
    alive = survivors([process], 10)
    assert not alive
