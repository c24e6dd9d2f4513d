"""`Slurm`: one job per node, so that a lost or preempted one costs one node and is replaced alone.

What is submitted is made by pure functions (`job_script`, `srun_command`); `SlurmJobs` runs `sbatch`, `squeue` and
`scancel`. All jobs of a run have one name, by which they are found and cancelled, also by `clusterenv gc` (`collect`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterenv.backends.programs import NoAnswer, ask
from clusterenv.backends.remote import Remote
from clusterenv.errors import SpecError, StartError

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clusterenv.backends.network import Plan
    from clusterenv.events import EventLog
    from clusterenv.pool import Pool
    from clusterenv.recovery import Recovery
    from clusterenv.spec import Blueprint

__all__ = ["Slurm", "SlurmJobs", "collect", "job_script", "srun_command"]

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
"""A job that waits for such a reason would wait for ever."""

_LEAVE_S = 30
"""A node is told to leave so long before its time limit."""

_ASK_S = 2.0
"""How often SLURM is asked: its controller serves everybody."""

_COMMAND_S = 30.0
_LAST_COMMAND_S = 3.0
"""What `sbatch` or `scancel` still gets where it is under way when the run is closed."""

_STEP_S = 2.0
"""What an `srun` gets to end its step, before it is killed."""


@dataclass(frozen=True)
class Slurm(Remote):
    """Nodes as SLURM jobs.

    Args:
        nodes: how many; a job each. With `mode="srun"`, of the allocation that the script runs in.
        cpus_per_worker: cores that each environment process gets.
        mem: of a node, as `sbatch --mem` has it ("8G").
        partition, account, qos, time_limit, gres, constraint: as the site has them; `time_limit` is `--time`.
        interface: another name of `bind`.
        env_vars: set on the nodes, besides the environment of this process, which they have.
        setup: shell lines to run on a node before anything else ("module load ...").
        extra: further options of `sbatch`: {"exclusive": None, "nodelist": "n[1-4]"}.
        python: the interpreter on the nodes, with the same Python minor, Gymnasium and clusterenv as here; None: the
            path of this one.
        wrap: words to put before the command of a node, or a string that is split as a shell would: a container
            ("apptainer exec image.sif"), an environment ("conda run -n x"). They are quoted: `$HOME` is not expanded.
            What they start must see `folder` under the same path, use the host's network, and pass SIGTERM on.
        mode: "submit" submits jobs; "srun" starts steps within the allocation that this script runs in.
        on_head_node: with "srun": the node that this script runs on is one of `nodes`.
        folder: for keys, on a filesystem that nodes see. Logs stay in its `logs`.
        others: as in `Remote`, which see.
    """

    nodes: int
    cpus_per_worker: int = 1
    mem: str | int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | int | None = None
    gres: str | None = None
    constraint: str | None = None
    interface: InitVar[str | None] = None
    env_vars: Mapping[str, str | int | float] = field(default_factory=dict)
    setup: Sequence[str] = ()
    extra: Mapping[str, str | int | None] = field(default_factory=dict)
    mode: Literal["submit", "srun"] = "submit"
    on_head_node: bool = False
    python: str | None = field(default=None, kw_only=True)
    wrap: str | Sequence[str] = field(default=(), kw_only=True)
    folder: str | os.PathLike[str] | None = field(default="~/.clusterenv", kw_only=True)
    # The lease: Ctrl-Z must not cost a place in the queue.
    heartbeat: tuple[float, float, float] = field(default=(1.0, 10.0, 300.0), kw_only=True)

    def __post_init__(self, interface: str | None) -> None:
        if interface is not None:
            if self.bind not in (None, interface):
                raise SpecError(f"Slurm(interface={interface!r}, bind={self.bind!r}): two names of one thing: give one")
            object.__setattr__(self, "bind", interface)
        self._check(self.nodes)
        if "job-name" in self.extra:
            raise SpecError(
                f"Slurm(extra={{'job-name': {self.extra['job-name']!r}}}): jobs are named after their run, by which "
                "they are found and cancelled; use extra={'comment': ...} for words of your own"
            )
        if self.python == "":
            raise SpecError("Slurm(python=''): expected the path or name of an interpreter on the nodes")
        object.__setattr__(self, "wrap", _words(self.wrap))
        words = [("wrap", word) for word in self.wrap]
        for name, value in [*self.options().items(), *self.env_vars.items(), ("python", self.python), *words]:
            if value is not None and any(ord(letter) < 32 for letter in str(value)):
                raise SpecError(f"Slurm: {name}={value!r} has a line break or another control character")

    def options(self) -> dict[str, str | int | None]:
        """What the user asks of SLURM."""
        own: dict[str, str | int | None] = {
            "cpus-per-task": self.workers_per_node * self.cpus_per_worker,
            "mem": self.mem,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time_limit,
            "gres": self.gres,
            "constraint": self.constraint,
        }
        return {**{name: value for name, value in own.items() if value is not None}, **self.extra}

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Pool:
        for program in ("sbatch", "squeue", "scancel") if self.mode == "submit" else ("srun", "scontrol"):
            if shutil.which(program) is None:
                raise StartError(f"Slurm: there is no {program} on PATH: run this where SLURM's commands are")
        hosts = _hosts_of_allocation(self) if self.mode == "srun" else None

        def launch(plan: Plan) -> SlurmJobs | _Steps:
            return SlurmJobs(self, plan) if hosts is None else _Steps(self, plan, hosts)

        return self.start_with(self.nodes, launch, blueprint, mode, recovery, events)


def _words(wrap: str | Sequence[str]) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(wrap) if isinstance(wrap, str) else wrap)
    except (TypeError, ValueError) as error:
        raise SpecError(f"Slurm(wrap={wrap!r}): expected a string or a list of words ({error})") from None
    if not all(isinstance(word, str) for word in words):
        raise SpecError(f"Slurm(wrap={wrap!r}): expected a string or a list of words")
    return words


# -- what is submitted --------------------------------------------------------------------------------------------


def job_script(slurm: Slurm, name: str, command: Sequence[str], log: Path, folder: Path) -> str:
    """The batch script of one node: every value quoted, nothing secret in it."""
    options: dict[str, str | int | None] = {
        "job-name": name,
        "nodes": 1,
        "ntasks": 1,
        "output": str(log).replace("%", "%%"),
        "open-mode": "append",
        "chdir": str(folder),
        "signal": f"B:TERM@{_LEAVE_S}",
        **slurm.options(),
    }
    lines = ["#!/bin/bash"]
    for option, value in options.items():
        lines.append(f"#SBATCH --{option}" if value is None else f"#SBATCH --{option}={shlex.quote(str(value))}")
    return "\n".join([*lines, *_body(slurm, command)])


def _body(slurm: Slurm, command: Sequence[str]) -> list[str]:
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in slurm.env_vars.items()]
    # `exec`: signals of the scheduler reach the agent itself, or what it is wrapped in, and not a shell that would
    # drop them: the agent finishes its step and says goodbye.
    return [*exports, *slurm.setup, f"exec {shlex.join([*slurm.wrap, *command])}", ""]


def srun_command(slurm: Slurm, host: str, script: Path) -> list[str]:
    """A step on one node of the allocation."""
    cores = slurm.workers_per_node * slurm.cpus_per_worker
    own = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", f"--cpus-per-task={cores}", "--overlap", "--exact"]
    extra = [f"--{name}" if value is None else f"--{name}={value}" for name, value in slurm.extra.items()]
    memory = [] if slurm.mem is None else [f"--mem={slurm.mem}"]
    return ["srun", *own, *memory, *extra, "bash", str(script)]


# -- jobs ---------------------------------------------------------------------------------------------------------


class SlurmJobs:
    """`Jobs` in a queue."""

    def __init__(self, slurm: Slurm, plan: Plan) -> None:
        self._slurm, self._plan = slurm, plan
        self._name = f"clusterenv-{plan.run}"
        self._logs = _logs(plan)
        self._job = [""] * len(plan.files)  # the last one of each node
        self._all: list[str] = []
        self._is_sure = True  # that `_all` are all; not after an `sbatch` without an answer
        self._states: dict[str, tuple[str, str]] = {}  # job → state, reason
        self._seen: set[str] = set()
        self._ask_at = 0.0
        self._failure: StartError | None = None  # of the last question

    @property
    def note(self) -> dict[str, Any]:
        return {"slurm": {"name": self._name, "conf": os.environ.get("SLURM_CONF")}}

    def look(self) -> dict[int, str]:
        if time.monotonic() >= self._ask_at:
            self._failure = None
            try:
                self._ask()
            except StartError as error:
                self._failure = error
            self._ask_at = time.monotonic() + _ASK_S
        if self._failure is not None:  # also until it is asked again: what it said before is no answer
            raise self._failure
        over = {}
        for node, job in enumerate(self._job):
            if job in self._states:
                state, reason = self._states[job]
                if state in _OVER:
                    over[node] = f"ended: SLURM job {job} is {self.state(node)}"
                elif state == "PENDING" and reason in _HOPELESS:
                    over[node] = f"will never run: SLURM job {job} is {self.state(node)}"
            elif job in self._seen:
                over[node] = f"ended: SLURM knows job {job} no more"
        return over

    def _ask(self) -> None:
        command = ["squeue", "--noheader", "--states=all", f"--name={self._name}", "--format=%i|%T|%r"]
        text = _run(command, closing=self._plan.closing)
        lines = [line.strip().split("|", 2) for line in text.splitlines()]
        self._states = {job: (state, reason) for job, state, reason in lines}
        self._seen |= self._states.keys()

    def has_job(self, node: int) -> bool:
        return bool(self._job[node])

    def start(self, node: int) -> None:
        self._cancel(node)  # it may wait for what will never be
        command = self._plan.command(node, self._slurm.python)
        script = job_script(self._slurm, self._name, command, self._log(node), Path.cwd())
        try:
            answer = _run(["sbatch", "--parsable"], script, closing=self._plan.closing, patience_s=_LAST_COMMAND_S)
        except NoAnswer:
            self._is_sure = False
            raise
        job = answer.strip().split(";")[0]
        if not job.isdecimal():
            raise StartError(f"sbatch answered {job!r}, which is no job id")
        self._job[node] = job
        self._all.append(job)

    def drop(self, node: int) -> None:
        self._cancel(node)
        self._job[node] = ""

    def _cancel(self, node: int) -> None:
        if self._job[node]:
            command = ["scancel", "--quiet", self._job[node]]  # no error where it is over
            _run(command, closing=self._plan.closing, patience_s=_LAST_COMMAND_S)

    def state(self, node: int) -> str:
        state, reason = self._states.get(self._job[node], ("", ""))
        return f"{state} ({reason})" if reason not in ("", "None") else state

    def _log(self, node: int) -> Path:
        return self._logs / f"node-{node}.log"

    def log_tail(self, node: int) -> str:
        from clusterenv.backends.network import read_tail

        state = self.state(node)
        return f"SLURM job {self._job[node]}{': ' * bool(state)}{state}\n{read_tail(self._log(node))}"

    def describe(self) -> str:
        return f"{len(self._all)} SLURM jobs named {self._name} ({_listed(self._all)}); logs in {self._logs}"

    def stop(self, deadline: float) -> None:
        _cancel_named(self._name, deadline)
        if not self._is_sure:
            raise StartError("an sbatch did not answer: its job may still be submitted")


class _Steps:
    """`Jobs` within an allocation: an `srun` per node, children of this process."""

    def __init__(self, slurm: Slurm, plan: Plan, hosts: list[str]) -> None:
        self._slurm, self._plan, self._hosts = slurm, plan, hosts
        self._logs = _logs(plan)
        self._steps: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def note(self) -> dict[str, Any]:
        return {}  # steps end with the lease of their nodes, or with the allocation

    def look(self) -> dict[int, str]:
        codes = {node: step.poll() for node, step in self._steps.items()}
        return {node: f"ended: srun exited with {code}" for node, code in codes.items() if code is not None}

    def has_job(self, node: int) -> bool:
        return node in self._steps

    def start(self, node: int) -> None:
        script = self._plan.folder / f"node-{node}.sh"
        script.write_text("\n".join(["#!/bin/bash", *_body(self._slurm, self._plan.command(node, self._slurm.python))]))
        with (self._logs / f"node-{node}.log").open("ab") as log:
            self._steps[node] = subprocess.Popen(
                srun_command(self._slurm, self._hosts[node], script),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches the head alone, which then closes
            )

    def drop(self, node: int) -> None:
        return None  # its step ends by itself

    def state(self, node: int) -> str:
        return f"on {self._hosts[node]}"

    def log_tail(self, node: int) -> str:
        from clusterenv.backends.network import read_tail

        return read_tail(self._logs / f"node-{node}.log")

    def describe(self) -> str:
        return f"{len(self._steps)} steps on {_listed([self._hosts[i] for i in self._steps])}; logs in {self._logs}"

    def stop(self, deadline: float) -> None:
        """Nodes were told to leave. Steps that do not end are asked to, all at once, then killed."""
        self._await_steps(deadline - 2 * _STEP_S)
        for step in self._steps.values():
            if step.poll() is None:
                step.terminate()  # srun hands it on to its step
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


def collect(facts: Mapping[str, Any], deadline: float) -> str:
    """Cancel the jobs that a run's note names, and say so. Raises where that fails."""
    env = {} if facts["conf"] is None else {"SLURM_CONF": facts["conf"]}
    _cancel_named(facts["name"], deadline, env)
    return f"SLURM jobs named {facts['name']} are cancelled"


def _cancel_named(name: str, deadline: float, env: Mapping[str, str] | None = None) -> None:
    """Whatever state they are in; also those whose `sbatch` never answered."""
    command = ["scancel", "--quiet", f"--name={name}"]
    _run(command, env=env, timeout_s=max(0.1, deadline - time.monotonic()))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _logs(plan: Plan) -> Path:
    folder = plan.folder.parent / "logs" / plan.run
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _hosts_of_allocation(slurm: Slurm) -> list[str]:
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
    # A head within a job must not hand that job's own settings on to those that it submits.
    own = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(("SLURM_", "SBATCH_"))}
    own.setdefault("PYTHONUNBUFFERED", "1")
    return ask(command, stdin, env={**own, **(env or {})}, timeout_s=timeout_s, closing=closing, patience_s=patience_s)
