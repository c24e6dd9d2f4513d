"""The commands that watch runs, as a user of another terminal calls them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

import msgspec
import pytest

import clusterenv as ce
from clusterenv.cli import main
from clusterenv.cli.show import bytes_text, overview, span
from clusterenv.monitor import records
from clusterenv.monitor.client import Client
from clusterenv.monitor.sample import EventRecord, WorkerSample
from clusterenv.monitor.terminal import clean_lines


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("CLUSTERENV_HOME", str(tmp_path))


@pytest.fixture
def run():
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Loopback(nodes=2), name="watched") as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        deadline = time.monotonic() + 20
        while not records.live() or not collector.stats()["steps"]:
            collector.rollout(16)
            assert time.monotonic() < deadline
        yield collector


def test_status_shows_the_only_run_and_lists_several(run, capsys):
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "watched: 4 x CartPole-v1, Loopback" in shown and shown.count("  joined  ") == 2
    assert main(["status", "--json"]) == 0
    assert [info["name"] for info in json.loads(capsys.readouterr().out)] == ["watched"]
    assert main(["status", "watched", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["info"]["name"] == "watched" and len(data["sample"]["workers"]) == 2
    with ce.ClusterEnv("CartPole-v1", num_envs=1, backend=ce.Local(workers=1), name="other"):
        deadline = time.monotonic() + 20
        while len(records.live()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert main(["status"]) == 0
        shown = capsys.readouterr().out
        assert "watched" in shown and "other" in shown
        assert main(["stack", "0"]) == 2
        assert "which run? watched, other" in capsys.readouterr().err


def test_logs_and_mistakes(run, capsys):
    assert main(["logs", "1"]) == 0
    assert "joined the run" in capsys.readouterr().out
    for command, text in [
        (["logs", "2"], "there is no node 2: the run has 2"),
        (["page", "--port", "99999"], "not in the range"),
        (["top", "--every-s", "-1"], "not in the range"),
        (["doctor", "--worker", "1"], "--worker needs the name of a run"),
        (["doctor", "-", "--worker", "99"], "there is no worker 99: the run has 2"),
        (["report", "--to", "/nowhere/x.html"], "No such file or directory"),
        (["stack", "99", "--run", "watched"], "there is no slot 99"),
        (["stack", "0", "--run", "nobody"], "no run is named 'nobody'; alive: watched"),
        (["status", "nobody"], "no run is named 'nobody'"),
    ]:
        assert main(command) == 2, command
        assert text in capsys.readouterr().err


def test_a_run_that_has_ended_is_known_by_name(run, capsys):
    run._envs.close()
    assert main(["status", "watched"]) == 0
    assert ", over" in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "ended: watched" in capsys.readouterr().out
    assert main(["stack", "0", "--run", "watched"]) == 2


def test_top_ends_with_the_run():
    script = """
import time, clusterenv as ce
with ce.ClusterEnv("CartPole-v1", num_envs=2, backend=ce.Local(workers=1), name="short") as envs:
    collector = envs.collector(ce.RandomPolicy(), seed=1)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        collector.rollout(16)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        deadline = time.monotonic() + 30
        while not records.live():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        command = [sys.executable, "-m", "clusterenv", "top", "short", "--every-s", "0.2"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert shown.count("short: 2 x CartPole-v1") > 3
        assert process.wait() == 0


def test_the_demo_kills_a_worker_and_goes_on():
    command = [sys.executable, "-m", "clusterenv", "demo", "--seconds", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ}, check=True)
    assert "killing worker process" in ran.stdout and "1 worker restarted" in ran.stdout
    assert "worker_lost" in ran.stderr


def test_texts():
    assert [bytes_text(n) for n in (0, 999, 1500, 25_000, 3.2e9)] == ["0 B", "999 B", "1.5 kB", "25 kB", "3.2 GB"]
    assert [span(s) for s in (4, 99, 600, 9000)] == ["4 s", "99 s", "10 min", "2.5 h"]


def test_escape_sequences_of_environments_are_not_printed(run):
    (record,) = records.live()
    with contextlib.closing(Client(record)) as client:
        sample = client.sample()
    event = EventRecord(0, time_s=0.0, kind="env_error", reason="\x1b]0;title\x07\x1b[2J first\nsecond")
    shown = "\n".join(overview(record.info, sample, [event]))
    assert "first second" in shown and all(char.isprintable() or char == "\n" for char in shown)
    assert clean_lines("a\x1b[2J\n\tb\n") == "a [2J\n        b"


def test_an_overview_names_workers_that_stand_out(run):
    (record,) = records.live()
    with contextlib.closing(Client(record)) as client:
        newest = client.sample()
    stuck = WorkerSample(7, 0, (14, 15), "running", slot=15, phase="step", stuck_s=42.0, is_busy=True)
    sample = msgspec.structs.replace(newest, workers=[*newest.workers, stuck])
    lines = overview(record.info, sample, [], most=1)
    assert any("step of slot 15" in line and "42 s" in line for line in lines)
    assert "... and 2 more workers" in lines
