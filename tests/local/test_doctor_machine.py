"""The doctor's checks of this machine, with fake schedulers on PATH, and its texts and JSON."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import fake_slurm
from clusterenv.monitor.doctor import (
    Cause,
    Finding,
    Severity,
    Status,
    Subject,
    as_json,
    check_machine,
    machine,
    print_report,
)
from clusterenv.monitor.doctor import checks as judge
from clusterenv.monitor.doctor.probe import Probe, is_here, parse_stat, state_of
from clusterenv.monitor.sample import NodeSample, Point, RunInfo, Sample, WorkerSample
from clusterenv.system.memory import GroupMemory

GB = 1 << 30


def by_name(checks):
    return {check.name: check for check in checks}


def fake(folder: Path, name: str, body: str, monkeypatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_this_machine_can_run_clusterenv():
    found = by_name(check_machine())
    for name in ("Python", "gymnasium", "numpy", "cloudpickle", "msgspec", "pyzmq"):
        assert found[name].status is Status.OK, found[name]
    assert re.search(r"\d+ cores", found["cores"].seen) and "free of" in found["memory"].seen
    assert all(check.advice for check in found.values() if check.status is not Status.OK)


def test_a_scheduler_that_answers_fails_or_hangs(tmp_path, monkeypatch):
    folder = fake_slurm.install(tmp_path / "fake", monkeypatch)
    assert by_name(check_machine())["SLURM"].status is Status.OK
    fake(
        tmp_path / "failing",
        "squeue",
        "echo 'slurm_load_jobs error: Unable to contact controller'; exit 1",
        monkeypatch,
    )
    check = by_name(check_machine())["SLURM"]
    assert check.status is Status.PROBLEM and "Unable to contact" in check.seen and "squeue" in check.advice
    monkeypatch.setattr(machine, "COMMAND_S", 0.5)
    # Its child keeps the pipe open: it has to end too.
    fake(tmp_path / "hanging", "squeue", "sleep 1000 & wait", monkeypatch)
    began = time.monotonic()
    check = by_name(check_machine())["SLURM"]
    assert time.monotonic() - began < 6 and check.status is Status.PROBLEM and "does not answer" in check.seen
    assert folder.exists()


def test_kubectl_without_a_cluster_is_a_warning(tmp_path, monkeypatch):
    fake(
        tmp_path / "fake",
        "kubectl",
        "echo 'The connection to the server localhost:8080 was refused'; exit 1",
        monkeypatch,
    )
    check = by_name(check_machine())["Kubernetes"]
    assert check.status is Status.WARNING and "refused" in check.seen


def test_a_ray_address_that_nobody_listens_on(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free.getsockname()[1]}")
        check = by_name(check_machine())["Ray"]
    assert check.status is Status.PROBLEM and "refused" in check.seen


def test_what_is_needed_is_what_the_package_declares():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = dict(re.match(r"([a-z]+)(.*)", text).groups() for text in project["dependencies"])
    assert {name: set(needed.split(",")) for name, needed in judge.NEEDED.items()} == {
        name: set(declared[name].split(",")) for name in judge.NEEDED
    }
    assert project["requires-python"] == ">=" + ".".join(map(str, judge.PYTHON))


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (judge.python((3, 10, 2)), Status.PROBLEM),
        (judge.packages({"gymnasium": "2.0.0"})[0], Status.PROBLEM),
        (judge.packages({"gymnasium": "1.2.0rc1"})[0], Status.OK),
        (judge.packages({})[1], Status.PROBLEM),
        (judge.cores(8, 0.5, 0.0, 8), Status.WARNING),
        (judge.cores(8, None, 30.0, 8), Status.WARNING),
        (judge.cores(8, None, 100.0, 128), Status.OK),
        (judge.cores(8, 4.0, 3.0, 8), Status.OK),
        (judge.memory(64 * GB, 60 * GB, None), Status.OK),
        (judge.memory(64 * GB, 60 * GB, GroupMemory(2 * GB, int(1.5 * GB))), Status.WARNING),
        (judge.memory(64 * GB, GB // 2, GroupMemory(8 * GB, 0)), Status.WARNING),
        (judge.memory(64 * GB, 60 * GB, GroupMemory(1 << 62, 0)), Status.OK),
        (judge.open_files(256, 256), Status.WARNING),
        (judge.open_files(256, 4096), Status.OK),
        (judge.open_files(-1, -1), Status.OK),
        (judge.shared_memory(None), Status.WARNING),
        (judge.shared_memory(10 << 20), Status.WARNING),
        (judge.disk("x", "/x", None, True), Status.PROBLEM),
        (judge.disk("x", "/x", GB, False), Status.PROBLEM),
        (judge.disk("x", "/x", 1 << 20, True), Status.PROBLEM),
        (judge.disk("x", "/x", GB // 2, True), Status.WARNING),
        (judge.address(None, "only loopback", None), Status.WARNING),
        (judge.address("10.0.0.1", "", (32768, 60999)), Status.OK),
    ],
)
def test_judgements(check, status):
    assert check.status is status and bool(check.advice) == (status is not Status.OK)


def test_the_processes_of_a_run_are_seen_also_stopped_and_hungry_ones():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            info = RunInfo("", "", 2, "Local", socket.gethostname(), os.getpid(), "", 0.0, "")
            node = NodeSample(0, "joined", host_name=info.host, pid=info.pid)
            workers = [WorkerSample(0, 0, (0, 1), "running", child.pid)]
            sample = Sample(Point(0.0), "", 0.0, [node], workers, [], [], [], {}, {})
            assert is_here(info)
            probe = Probe(info, sample)
            time.sleep(1.0)
            here = probe.measure(sample)
            os.kill(child.pid, 19)
            while state_of(child.pid) != "T":
                time.sleep(0.01)
            assert probe.measure(sample).workers[0].is_stopped
        finally:
            child.kill()
    worker = here.workers[0]
    assert worker.state == "R" and worker.cpu + worker.queued == pytest.approx(1.0, abs=0.3)
    assert here.own_cores >= worker.cpu and here.busy_cores >= here.own_cores - 0.2
    assert parse_stat("7 (a ) b) S 1 " + "0 " * 9 + "100 50 0").name == "a ) b"


def test_texts_and_json():
    finding = Finding(
        Severity.ERROR, Cause.CRASH_LOOP, Subject("slot", 3), "slot 3 failed \x1b[31m", "repair it", {"losses": 3}, 0.2,
        detail="Traceback\n" + "line\n" * 20 + "ValueError: x",
    )  # fmt: skip
    check = judge.Check("cores", Status.WARNING, "2 cores", "use more")
    out = io.StringIO()
    print_report([check], [finding], out)
    text = out.getvalue()
    assert "\x1b" not in text and "ValueError: x" in text and "lines left out" in text and "use more" in text
    plain = json.loads(as_json([check], [finding]))
    assert plain["run"][0]["cause"] == "crash_loop" and plain["run"][0]["subject"] == {"kind": "slot", "number": 3}
    assert plain["machine"][0]["status"] == "warning" and json.loads(as_json(None, []))["run"] == []
    out = io.StringIO()
    print_report(None, [], out)
    assert out.getvalue() == "nothing is wrong with the run\n"
