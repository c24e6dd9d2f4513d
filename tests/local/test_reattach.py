"""Nodes that outlive their head: the next one, with the same `resume=`, goes on with them. SIGTERM to a head."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import psutil
import pytest

from killed_heads import LEASE_S, run, wait_for
from seed_ledger import read, repeated

pytestmark = pytest.mark.guarantee(13)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
