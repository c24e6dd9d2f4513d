"""Run node agents on SLURM, as queued jobs (`SlurmJobs`) or as steps of the script's own allocation (`SlurmSteps`).

Runs `sbatch`, `squeue`, `scancel` and `srun`. All jobs of a run share one name, by which they are found and cancelled,
also by `clusterenv gc` (`Slurm.collect_garbage`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterenv.backends.contract import Hopeless, Plan
from clusterenv.backends.launch.logs import read_tail, start_logged
from clusterenv.backends.launch.programs import NoAnswer, ask
from clusterenv.backends.slurm import Slurm, grace_options, job_script, log_file, script_body, srun_command
from clusterenv.errors import StartError

_OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
_HOPELESS = {
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
}
"""Reasons for which a job would wait forever."""

_ASK_S = 2.0  # how often SLURM is queried: its controller is shared by all users

_COMMAND_S = 30.0
_LAST_COMMAND_S = 3.0  # how long a pending `sbatch` or `scancel` may take once the run is being closed

_STEP_S = 2.0  # how long an `srun` may take to end its step before it is killed


class SlurmJobs:
    """Implement `Jobs` in SLURM's queue."""

    def __init__(self, slurm: Slurm, plan: Plan) -> None:
        self._slurm, self._plan = slurm, plan
        self._name = f"clusterenv-{plan.run}"
        self._logs = _make_logs(plan)
        self._job = [""] * len(plan.files)  # the last job of each node
        self._all: list[str] = []
        self._is_complete = True  # whether `_all` has every job; False after an `sbatch` was killed
        self._states: dict[str, tuple[str, str]] = {}  # job → state, reason
        self._seen: set[str] = set()
        self._ask_at = 0.0
        self._failure: StartError | None = None  # of the last query

    def note(self) -> dict[str, Any]:
        return {"name": self._name, "conf": os.environ.get("SLURM_CONF")}

    def look(self) -> dict[int, str]:
        if time.monotonic() >= self._ask_at:
            self._failure = None
            try:
                self._ask()
            except StartError as error:
                self._failure = error
            self._ask_at = time.monotonic() + _ASK_S
        if self._failure is not None:  # raised until the next query: older states are no longer valid
            raise self._failure
        over = {}
        for node, job in enumerate(self._job):
            if job in self._states:
                state, reason = self._states[job]
                if state in _OVER:
                    over[node] = f"ended: SLURM job {job} is {self.state(node)}"
                elif state == "PENDING" and reason in _HOPELESS:
                    over[node] = Hopeless(f"will never run: SLURM job {job} is {self.state(node)}")
            elif job in self._seen:
                over[node] = f"ended: SLURM no longer knows job {job}"
        return over

    def _ask(self) -> None:
        command = ["squeue", "--noheader", "--states=all", f"--name={self._name}", "--format=%i|%T|%r"]
        text = _run(command, closing=self._plan.closing)
        lines = [line.strip().split("|", 2) for line in text.splitlines()]
        self._states = {job: (state, reason) for job, state, reason in lines}
        self._seen |= self._states.keys()

    def start(self, node: int) -> None:
        self._cancel(node)  # the last job may wait forever
        command = self._plan.command(node, self._slurm.python, grace_options(self._slurm))
        script = job_script(self._slurm, self._name, command, log_file(self._plan, node), Path.cwd())
        try:
            answer = _run(["sbatch", "--parsable"], script, closing=self._plan.closing, patience_s=_LAST_COMMAND_S)
        except NoAnswer:
            self._is_complete = False
            raise
        job = answer.strip().split(";")[0]
        if not job.isdecimal():
            raise StartError(f"sbatch answered {job!r}, which is not a job id")
        self._job[node] = job
        self._all.append(job)

    def drop(self, node: int) -> None:
        self._cancel(node)
        self._job[node] = ""

    def _cancel(self, node: int) -> None:
        if self._job[node]:
            command = ["scancel", "--quiet", self._job[node]]  # not an error if it has ended
            _run(command, closing=self._plan.closing, patience_s=_LAST_COMMAND_S)

    def state(self, node: int) -> str:
        state, reason = self._states.get(self._job[node], ("", ""))
        return f"{state} ({reason})" if reason not in ("", "None") else state

    def log_tail(self, node: int) -> str:
        state = self.state(node)
        return f"SLURM job {self._job[node]}{': ' * bool(state)}{state}\n{read_tail(log_file(self._plan, node))}"

    def describe(self) -> str:
        return f"{len(self._all)} SLURM jobs named {self._name} ({_listed(self._all)}); logs in {self._logs}"

    def stop(self, deadline: float) -> None:
        cancel_named(self._name, deadline)
        if not self._is_complete:
            raise StartError("an sbatch did not answer: its job may still be submitted")


class SlurmSteps:
    """Implement `Jobs` within an allocation: one `srun` per node, as a child of this process.

    Steps end with the lease of their nodes, or with the allocation, so `clusterenv gc` has nothing to remove.
    """

    def __init__(self, slurm: Slurm, plan: Plan, hosts: list[str]) -> None:
        self._slurm, self._plan, self._hosts = slurm, plan, hosts
        self._logs = _make_logs(plan)
        self._steps: dict[int, subprocess.Popen[bytes]] = {}

    def look(self) -> dict[int, str]:
        codes = {node: step.poll() for node, step in self._steps.items()}
        return {node: f"ended: srun exited with {code}" for node, code in codes.items() if code is not None}

    def start(self, node: int) -> None:
        script = self._plan.folder / f"node-{node}.sh"
        command = self._plan.command(node, self._slurm.python, grace_options(self._slurm))
        script.write_text("\n".join(["#!/bin/bash", *script_body(self._slurm, command)]))
        step = srun_command(self._slurm, self._hosts[node], script)
        self._steps[node] = start_logged(step, log_file(self._plan, node))

    def state(self, node: int) -> str:
        return f"on {self._hosts[node]}"

    def log_tail(self, node: int) -> str:
        return read_tail(log_file(self._plan, node))

    def describe(self) -> str:
        return f"{len(self._steps)} steps on {_listed([self._hosts[i] for i in self._steps])}; logs in {self._logs}"

    def stop(self, deadline: float) -> None:
        """End the steps whose nodes do not leave by themselves: send SIGTERM to all at once, then SIGKILL."""
        self._await_steps(deadline - 2 * _STEP_S)
        for step in self._steps.values():
            if step.poll() is None:
                step.terminate()  # srun passes the signal on to its step
        self._await_steps(deadline - _STEP_S)
        stuck = [node for node, step in self._steps.items() if step.poll() is None]
        for node in stuck:
            self._steps[node].kill()
        self._await_steps(deadline)
        if stuck:
            hosts = _listed([self._hosts[node] for node in stuck])
            raise StartError(f"srun did not end its steps on {hosts}, and was killed")

    def _await_steps(self, deadline: float) -> None:
        for step in self._steps.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(max(0.0, deadline - time.monotonic()))


def cancel_named(name: str, deadline: float, env: Mapping[str, str] | None = None) -> None:
    """Cancel all jobs with this name, in any state, including those whose `sbatch` never answered."""
    command = ["scancel", "--quiet", f"--name={name}"]
    _run(command, env=env, timeout_s=max(0.1, deadline - time.monotonic()))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _make_logs(plan: Plan) -> Path:
    folder = log_file(plan, 0).parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def hosts_of_allocation(slurm: Slurm) -> list[str]:
    """Return the hosts of the script's own job, excluding the script's host unless `on_head_node`."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise StartError('Slurm(mode="srun") runs within an allocation (salloc, sbatch): SLURM_JOB_NODELIST is not set')
    hosts = _run(["scontrol", "show", "hostnames", listed]).split()
    own = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    if not slurm.on_head_node:
        hosts = [host for host in hosts if host != own]
    most = slurm.max_nodes or slurm.nodes
    if len(hosts) < most:
        what = "" if slurm.on_head_node else f" besides {own}, where this script runs (on_head_node=True counts it)"
        raise StartError(f"Slurm(nodes={most}): the allocation has {len(hosts)} nodes{what}")
    return hosts[:most]


def _run(
    command: list[str],
    stdin: str = "",
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = _COMMAND_S,
    closing: threading.Event | None = None,
    patience_s: float = 0.0,
) -> str:
    # A head within a job must not pass that job's settings to the jobs that it submits.
    own = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(("SLURM_", "SBATCH_"))}
    own.setdefault("PYTHONUNBUFFERED", "1")
    return ask(command, stdin, env={**own, **(env or {})}, timeout_s=timeout_s, closing=closing, patience_s=patience_s)
