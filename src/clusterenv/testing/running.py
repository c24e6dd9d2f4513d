"""What the tests of `clusterenv.testing.backends` do with a run: step it until something has happened, or run it in
another process, which a test kills or interrupts. Needs no pytest."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

import clusterenv as ce
from clusterenv.testing.envs import STEP

WAIT_S = 90.0
"""For a node to be replaced or to end; a slow scheduler must not fail the tests."""

Place = dict[str, Any]
"""What `Fragile.place` returns."""

_HEAD = """
import json, select, signal, sys
import cloudpickle
import numpy as np
import clusterenv as ce
from clusterenv.testing.envs import STEP, Fragile

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
with open(sys.argv[1], "rb") as file:
    backend, num_envs = cloudpickle.load(file)
with ce.ClusterEnv([Fragile] * num_envs, backend=backend) as envs:
    envs.reset(seed=1)
    print(json.dumps(envs.call("place")), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:  # until the test has ended
        envs.step(np.full(num_envs, STEP))
"""


class Head(NamedTuple):
    """A script with a run that steps without end."""

    process: subprocess.Popen[str]
    """The leader of its process group, as in a terminal."""
    places: Sequence[Place]
    log: Path
    """What it writes to stderr."""


@contextlib.contextmanager
def run_head(backend: Any, num_envs: int, folder: Path) -> Iterator[Head]:
    """Run `num_envs` environments in a process that is killed at the end of the block, with files in `folder`."""
    pickled, log = folder / "backend", folder / "head.log"
    pickled.write_bytes(cloudpickle.dumps((backend, num_envs)))
    command = [sys.executable, "-c", _HEAD, str(pickled)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("w") as file, subprocess.Popen(command, stderr=file, start_new_session=True, **pipes) as head:
        try:
            assert head.stdout is not None
            line = head.stdout.readline()
            assert line, f"the script ended before its environments ran: {log.read_text()}"
            yield Head(head, json.loads(line), log)
        finally:
            head.kill()


def actions(envs: ce.ClusterEnv, slot: int = 0, action: int = STEP) -> Any:
    """Return `STEP` for every environment but that of `slot`."""
    chosen = np.full(envs.num_envs, STEP)
    chosen[slot] = action
    return chosen


def start(envs: ce.ClusterEnv) -> Sequence[Place]:
    """Reset and step once, because a failure before the first step raises at once; return the environments' places."""
    envs.reset(seed=1)
    envs.step(actions(envs))
    return envs.call("place")


def step_until(envs: ce.ClusterEnv, condition: Callable[[], bool]) -> set[int]:
    """Step until the condition holds; return the slots that lost an episode on the way."""
    deadline, lost = time.monotonic() + WAIT_S, set[int]()
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {WAIT_S:.0f} s; events: {envs.events()}"
        infos = envs.step(actions(envs))[4]
        if "transition_valid" in infos:
            lost |= set(np.flatnonzero(~infos["transition_valid"]).tolist())
    return lost


def wait_for(condition: Callable[[], bool], text: str, detail: Callable[[], Any] = lambda: "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{text} after {WAIT_S:.0f} s {detail()}"
        time.sleep(0.1)


def places(envs: ce.ClusterEnv) -> Sequence[Place]:
    """Return the environments' places; empty while one of them waits to be rebuilt."""
    try:
        found: Sequence[Place] = envs.call("place")
    except ce.WorkerLostError:
        return ()
    return found


def agent(place: Place) -> tuple[Any, ...]:
    """Return what identifies the node agent of an environment."""
    return place["where"], place["agent"], place["began"]


def kinds(envs: ce.ClusterEnv) -> list[str]:
    return [event.kind for event in envs.events()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
