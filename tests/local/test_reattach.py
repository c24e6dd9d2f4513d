"""Nodes that outlive their head: the next one, with the same `resume=`, goes on with them. SIGTERM to a head."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from seed_ledger import environment, read, repeated

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
    """Heads and node agents of one run, in this folder."""

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
        """Wait until the last head has stepped; returns its events by kind."""
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
        """The last head ends in order."""
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
        for pid in it.pids:  # agents of `Loopback`, which are no children of this process
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if "--join" in process.cmdline():
                    process.kill()


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_nodes_that_outlive_a_killed_head_join_the_next_one(tmp_path):
    with run(tmp_path, "Manual") as it:
        it.start()
        it.start_agents()
        it.begun()
        for _ in range(2):
            assert it.kill_head() == -signal.SIGKILL
            it.start()
            events = it.begun()
            assert len(events["node_joined"]) == 2 and "nodes_not_resumed" not in events
        assert it.pids == {agent.pid for agent in it.agents}, "the same agents, never started again"
        assert "node 0 is wanted" not in it.log()
        it.end()
        assert [agent.wait(30) for agent in it.agents] == [0, 0], "told that the run is over"
        seeds = read(it.ledger)
        assert len(seeds) >= 12 and repeated(seeds) == []
        assert not it.journal.exists() and list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nodes_of_loopback_do_so_too(tmp_path, number):
    with run(tmp_path, "Loopback") as it:
        it.start()
        it.begun()
        before = set(it.pids)
        assert it.kill_head(number) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
        assert it.journal.exists() and all(psutil.pid_exists(pid) for pid in before)
        it.start()
        it.begun()
        assert it.pids == before
        it.end()
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in before))
        assert repeated(read(it.ledger)) == [] and not it.journal.exists()


def test_sigterm_to_a_head_without_a_journal_ends_everything(tmp_path):
    with run(tmp_path, "Manual", journal=None) as it:
        it.start()
        it.start_agents()
        it.begun()
        assert it.kill_head(signal.SIGTERM) == 143
        began = time.monotonic()
        assert [agent.wait(30) for agent in it.agents] == [1, 1]
        assert time.monotonic() - began < LEASE_S / 2, "they were told, and did not wait for their lease"
        assert list((tmp_path / "runs").iterdir()) == []


def test_sigterm_while_nodes_are_awaited_leaves_those_that_are_here(tmp_path):
    with run(tmp_path, "Manual") as it:
        it.start()
        it.start_agents(nodes=2)
        wait_for(lambda: b"joined the run" in (tmp_path / "agent-0.log").read_bytes())
        assert it.kill_head(signal.SIGTERM) == 143
        assert [agent.poll() for agent in it.agents] == [None, None]
        it.start()
        it.begun()
        assert it.pids == {agent.pid for agent in it.agents}
        it.end()


def test_nodes_that_are_gone_are_started_again(tmp_path):
    with run(tmp_path, "Loopback") as it:
        it.start()
        it.begun()
        it.kill_head()
        first, second = it.pids
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(first))
        it.start()
        it.begun()
        assert len(it.pids) == 3 and psutil.pid_exists(second), "one goes on, one is new"
        it.end()
        assert repeated(read(it.ledger)) == []


def test_a_head_that_cannot_listen_where_its_nodes_dial_starts_others(tmp_path):
    with run(tmp_path, "Loopback", lease_s=3.0) as it:
        it.start()
        it.begun()
        before = set(it.pids)
        it.kill_head()
        record = json.loads(it.journal.read_bytes().partition(b"\n")[2])
        with socket.socket() as squatter:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            squatter.bind(("127.0.0.1", record["cluster"]["port"]))
            squatter.listen()
            it.start()
            events = it.begun()
        assert "that port is in use" in events["nodes_not_resumed"][0]
        assert len(it.pids) == 4, "all are new"
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in before))
        it.end()
        assert repeated(read(it.ledger)) == [] and list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_was_scaled_is_resumed_as_it_was(tmp_path):
    with run(tmp_path, "Loopback", nodes=1, max_nodes=2) as it:
        head = it.start()
        it.begun()
        assert head.stdin is not None
        head.stdin.write("envs.scale(2) [envs.step(np.zeros(4,dtype=int))for(_)in(range(10**9))]\n")
        head.stdin.flush()
        wait_for(lambda: b'"invited":2' in it.journal.read_bytes())
        it.kill_head()
        it.start()
        assert len(it.begun()["node_joined"]) == 2
        it.end()
