"""Run heads in separate processes, for tests that kill them, and the node agents that outlive them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from seed_ledger import environment

LEASE_S = 60.0

_HEAD = """
import functools, json, select, sys
import numpy as np
import clusterenv as ce
from seed_ledger import make

options = json.loads(sys.argv[1])
kind, journal, options = options.pop("kind"), options.pop("journal"), options
backend = getattr(ce, kind)(bind="127.0.0.1", oversubscribe=True, start_timeout_s=60.0, **options)
with ce.ClusterEnv(functools.partial(make, sys.argv[2]), 4, backend=backend, resume=journal) as envs:
    envs.reset(seed=1)
    envs.step(np.zeros(4, dtype=np.int64))
    print(json.dumps([[event.kind, event.reason] for event in envs.events()]), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        envs.step(np.zeros(4, dtype=np.int64))
    for line in sys.stdin.readline().split():
        exec(line)
"""


class Run:
    """Heads and node agents of one run, with files in `folder`."""

    def __init__(self, folder: Path, kind: str, nodes: int = 2, lease_s: float = LEASE_S, **options: Any) -> None:
        self.folder, self.ledger, self.journal = folder, folder / "ledger", folder / "journal"
        self.options = {
            "kind": kind,
            "nodes": nodes,
            "journal": str(self.journal),
            "folder": str(folder / "runs"),
            "heartbeat_s": [0.2, 5.0, lease_s],
            **options,
        }
        self.heads: list[subprocess.Popen[str]] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()

    def start(self, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _HEAD, json.dumps({**self.options, **options}), str(self.ledger)]
        with (self.folder / f"head-{len(self.heads)}.log").open("wb") as log:
            head = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
            )
        self.heads.append(head)
        return head

    def begun(self) -> dict[str, list[str]]:
        """Wait until the last head has stepped; return its events by kind."""
        head = self.heads[-1]
        assert head.stdout is not None
        line = head.stdout.readline()
        assert line, self.log()
        events: dict[str, list[str]] = {}
        for kind, reason in json.loads(line):
            events.setdefault(kind, []).append(reason)
        for reason in events["node_joined"]:
            self.pids.add(int(reason.partition("process ")[2].partition(",")[0]))
        return events

    def log(self) -> str:
        return (self.folder / f"head-{len(self.heads) - 1}.log").read_text()

    def key_files(self, nodes: int) -> list[Path]:
        wait_for(lambda: len(list(self.folder.glob("runs/*/node-*.key"))) >= nodes)
        return sorted(self.folder.glob("runs/*/node-*.key"))

    def start_agents(self, nodes: int = 2) -> None:
        for path in self.key_files(nodes):
            with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
                command = [sys.executable, "-m", "clusterenv", "node", "--join", str(path)]
                self.agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment()))

    def kill_head(self, number: signal.Signals = signal.SIGKILL) -> int:
        head = self.heads[-1]
        head.send_signal(number)
        return head.wait(60)

    def end(self) -> None:
        """End the last head normally."""
        head = self.heads[-1]
        head.communicate("\n", timeout=60)
        assert head.returncode == 0, self.log()


@contextlib.contextmanager
def run(folder: Path, kind: str, **options: Any) -> Iterator[Run]:
    it = Run(folder, kind, **options)
    try:
        yield it
    finally:
        for head in it.heads:
            head.kill()
            head.communicate()
        for agent in it.agents:
            agent.kill()
            agent.wait()
        for pid in it.pids:  # agents of `Loopback`, which are not children of this process
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if "--join" in process.cmdline():
                    process.kill()


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
