"""Run a head in a separate process, and close it while its scheduler hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_HEAD = """
import sys, time
import numpy as np
import clusterenv as ce
from clusterenv import Command, Kubernetes, Ray, Slurm

envs = ce.ClusterEnv("CartPole-v1", {num_envs}, backend={backend!r})
envs.reset(seed=1)
envs.step(np.zeros({num_envs}, np.int64))
print("running", flush=True)
sys.stdin.readline()
start = time.monotonic()
envs.close()
print(time.monotonic() - start, flush=True)
"""


class Closed(NamedTuple):
    seconds: float
    """Duration of `close`."""
    exit_seconds: float
    """Time from the end of `close` to the end of the process."""
    told: str


def close_while(
    hanging: Callable[[], contextlib.AbstractContextManager[Any]], backend: Any, num_envs: int, kills: bool = False
) -> Closed:
    """Start a run, close it within the context `hanging`, and there wait for its process to end, or kill it."""
    code = _HEAD.format(backend=backend, num_envs=num_envs)
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as head:
        assert head.stdin is not None and head.stdout is not None and head.stderr is not None
        try:
            line = head.stdout.readline()
            assert line == "running\n", head.stderr.read()
            with hanging():
                head.stdin.write("\n")
                head.stdin.flush()
                seconds = float(head.stdout.readline())
                if kills:
                    head.kill()
                since = time.monotonic()
                told = head.stderr.read()  # until it has ended
                head.wait(60)
                return Closed(seconds, time.monotonic() - since, told)
        finally:
            head.kill()


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop these processes (SIGSTOP) within the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
