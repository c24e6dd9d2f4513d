"""`Command`: run one job per node on any scheduler that has commands to submit, to list and to cancel jobs.

Pure functions here (`job_script`, `submit_command`) make what `command_jobs.py` submits. The class methods have the
commands of common schedulers; docs/schedulers.md says which of them were tested.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from clusterenv.backends.contract import Jobs, Plan
from clusterenv.backends.launch.placeholders import (
    check_placeholders,
    check_variables,
    fill_words,
    split_words,
)
from clusterenv.backends.remote import Remote
from clusterenv.errors import SpecError, StartError

_OF_A_RUN = ("name", "run")
_OF_A_NODE = (*_OF_A_RUN, "script", "log", "node", "cores")
_PLACEHOLDERS = {
    "submit": _OF_A_NODE,
    "status": (*_OF_A_RUN, "jobs"),
    "cancel": (*_OF_A_RUN, "job", "jobs"),
    "reason": (*_OF_A_RUN, "job"),
}


@dataclass(frozen=True)
class Command(Remote):
    """Run nodes as jobs of a scheduler, through its own commands; see docs/schedulers.md.

    Commands are lists of words, or strings to split as a shell would; they do not run in a shell.

    Args:
        submit: submits one job and prints its id. Placeholders: {script} (a file; without it, the script is given on
            standard input), {name} and {run} (of the run), {node} (its number), {log} (a file), {cores}.
        status: lists jobs, at least all of this run, one line each. If it fails, the scheduler counts as absent and
            nothing is replaced. {name}, {run}, {jobs} (the ids) may be used.
        cancel: ends jobs: {jobs} stands for the ids of several, {job} for one.
        job_id: regular expression that finds the id in what `submit` prints; its first group, if it has one.
        status_line: regular expression for a line of `status`, with the groups `job` and `state`, or `job` alone.
            Other lines are ignored. A job that is no longer listed has ended.
        is_over: regular expression for the states of jobs that have ended but are still listed; None: there are none.
        is_stuck: regular expression for the states of jobs that will never run (in an error state, held); None: none.
        is_pending: regular expression for the states of jobs that wait, for which `reason` is asked.
        reason: prints why the job {job} waits or is stuck. (): nothing does.
        poll_s: seconds between two calls of `status`.
        end_signal: the signal with which the scheduler announces the end of a job to all its processes, some time
            before it kills them. TERM and INT reach the node; any other ("USR2") is translated by the script.
        cpus_per_worker: cores for each environment process; {cores} is this times `workers_per_node`.
        env_vars: environment variables for the nodes. Whether they inherit those of this process is up to `submit`.
        setup: shell lines to run on a node before anything else ("module load ...").
        python, wrap: as in `Slurm`.
        grace_s: seconds from `end_signal` to SIGKILL in which a node hands over its results: the site's value.
        folder: for keys and scripts, on a file system that the nodes can see. Logs stay in its `logs`.
        others: as in `Remote`.
    """

    submit: str | Sequence[str] = field(kw_only=True)
    status: str | Sequence[str] = field(kw_only=True)
    cancel: str | Sequence[str] = field(kw_only=True)
    job_id: str = field(default=r"\d+", kw_only=True)
    status_line: str = field(default=r"\s*(?P<job>\S+)\s+(?P<state>.*)", kw_only=True)
    is_over: str | None = field(default=None, kw_only=True)
    is_stuck: str | None = field(default=None, kw_only=True)
    is_pending: str = field(default=r"(?i)^[pqiwh]", kw_only=True)
    reason: str | Sequence[str] = field(default=(), kw_only=True)
    poll_s: float = field(default=5.0, kw_only=True)
    end_signal: str = field(default="TERM", kw_only=True)
    cpus_per_worker: int = field(default=1, kw_only=True)
    env_vars: Mapping[str, str | int | float] = field(default_factory=dict, kw_only=True)
    setup: Sequence[str] = field(default=(), kw_only=True)
    python: str | None = field(default=None, kw_only=True)
    wrap: str | Sequence[str] = field(default=(), kw_only=True)
    grace_s: int = field(default=30, kw_only=True)
    folder: str | os.PathLike[str] | None = field(default="~/.clusterenv", kw_only=True)
    # As in `Slurm`: suspending the script must not end jobs that would have to queue again.
    heartbeat_s: tuple[float, float, float] = field(default=(1.0, 10.0, 300.0), kw_only=True)
    name: ClassVar[str] = "command"
    can_reattach: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("submit", "status", "cancel", "reason", "wrap"):
            object.__setattr__(self, name, split_words("Command", name, getattr(self, name)))
        for name, known in _PLACEHOLDERS.items():
            self._check_command(name, known)
        for name in ("job_id", "status_line", "is_over", "is_stuck", "is_pending"):
            _check_pattern(name, getattr(self, name))
        if "job" not in re.compile(self.status_line).groupindex:
            raise SpecError(
                f"Command(status_line={self.status_line!r}): expected a group (?P<job>...), which is the id"
            )
        if self.poll_s <= 0:
            raise SpecError(f"Command(poll_s={self.poll_s}): expected a time above 0")
        if not re.fullmatch("[A-Z0-9]+", self.end_signal.removeprefix("SIG")):
            raise SpecError(f"Command(end_signal={self.end_signal!r}): expected the name of a signal, such as 'USR2'")
        if self.python == "":
            raise SpecError("Command(python=''): expected the path or name of an interpreter on the nodes")
        check_variables("Command", self.env_vars)
        for name, value in [*self.env_vars.items(), ("python", self.python), *(("wrap", word) for word in self.wrap)]:
            if value is not None and any(ord(letter) < 32 for letter in str(value)):
                raise SpecError(f"Command: {name}={value!r} has a line break or another control character")

    def _check_command(self, name: str, known: Sequence[str]) -> None:
        words = getattr(self, name)
        if not words and name != "reason":
            raise SpecError(f"Command({name}=...) is empty: expected the scheduler's command")
        used = set[str]()
        for word in words:
            if "\n" in word or "\0" in word:
                raise SpecError(f"Command({name}=...): {word!r} has a line break")
            used |= check_placeholders("Command", name, word, {*known, "job", "jobs"})
        if name == "status" and "job" in used:
            raise SpecError(
                "Command(status=...) has {job}: it must list all jobs of the run at once, so that the scheduler is "
                "asked once, and so that a job that has ended differs from a scheduler that does not answer"
            )
        if not used <= set(known):
            raise SpecError(f"Command({name}=...) has {{{min(used - set(known))}}}, which is not known there")
        if name == "cancel" and not used & {"job", "jobs"}:
            raise SpecError("Command(cancel=...) names no job: write {jobs} where the ids belong, or {job} for one")
        if name == "reason" and words and "job" not in used:
            raise SpecError("Command(reason=...) names no job: write {job} where its id belongs")

    # -- common schedulers ------------------------------------------------------------------------------------

    @classmethod
    def sge(cls, nodes: int, options: str | Sequence[str] = (), **others: Any) -> Command:
        """Return the backend for Grid Engine (SGE and its successors); `options`: further ones of `qsub`."""
        own = ["qsub", "-terse", "-notify", "-S", "/bin/bash", "-N", "{name}", "-j", "y", "-o", "{log}"]
        pattern = r"s/^scheduling info: *//p; s/^error reason.*\]: *//p"
        given: dict[str, Any] = {
            "submit": [*own, *split_words("Command", "options", options), "{script}"],
            "status": "qstat",
            "cancel": "qdel {jobs}",
            "status_line": r"\s*(?P<job>\d+)\s+\S+\s+\S+\s+\S+\s+(?P<state>\S+)",
            "is_stuck": "^E",
            "reason": ["sh", "-c", f"qstat -j \"$0\" | sed -n '{pattern}'", "{job}"],
            "end_signal": "USR2",  # of `-notify`; without it, Grid Engine kills at once
        }
        return cls(nodes, **{**given, **others})

    @classmethod
    def pbs(cls, nodes: int, options: str | Sequence[str] = (), **others: Any) -> Command:
        """Return the backend for OpenPBS and PBS Professional; `options`: further ones of `qsub`."""
        # PBS writes its own output file when the job ends, over what is there.
        own = ["qsub", "-S", "/bin/bash", "-N", "ce-{run}", "-j", "oe", "-o", "{log}.out"]
        own += ["-l", "select=1:ncpus={cores}"]
        given: dict[str, Any] = {
            "submit": [*own, *split_words("Command", "options", options), "{script}"],
            "status": "qstat",
            "cancel": "qdel {jobs}",
            "status_line": r"\s*(?P<job>\d+)\S*\s+\S+\s+\S+\s+\S+\s+(?P<state>[A-Z])\b",
            "is_over": "^[CFX]",
            "is_stuck": "^H",
            "reason": ["sh", "-c", "qstat -f \"$0\" | sed -n 's/^ *comment = //p'", "{job}"],
            "grace_s": 10,  # kill_delay
        }
        return cls(nodes, **{**given, **others})

    @classmethod
    def lsf(cls, nodes: int, options: str | Sequence[str] = (), **others: Any) -> Command:
        """Return the backend for LSF; `options`: further ones of `bsub`."""
        own = ["bsub", "-J", "{name}", "-o", "{log}.out", "-n", "{cores}", "-R", "span[hosts=1]"]
        given: dict[str, Any] = {
            "submit": [*own, *split_words("Command", "options", options), "bash", "{script}"],
            "status": ["bjobs", "-a", "-noheader", "-o", "jobid stat"],  # -a: without jobs to list, bjobs fails
            "cancel": "bkill {jobs}",
            "job_id": r"<(\d+)>",
            "is_over": "^(DONE|EXIT)",
            "is_stuck": "^PSUSP",
            "is_pending": "^PEND",
            "reason": ["sh", "-c", 'bjobs -p "$0" | sed 1,2d', "{job}"],
            "grace_s": 10,  # JOB_TERMINATE_INTERVAL
        }
        return cls(nodes, **{**given, **others})

    @classmethod
    def htcondor(cls, nodes: int, options: str | Sequence[str] = (), **others: Any) -> Command:
        """Return the backend for HTCondor with a shared file system; `options`: further `name=value` to submit with."""
        own = ["condor_submit", "-terse", "-batch-name", "{name}", "executable={script}", "output={log}.out"]
        own += ["error={log}.err", "request_cpus={cores}", "should_transfer_files=NO"]
        letters = 'substr("?IRXCH>S",JobStatus,1)'
        given: dict[str, Any] = {
            "submit": [*own, *split_words("Command", "options", options), "-queue", "1"],
            "status": ["condor_q", "-af", "ClusterId", letters, "HoldReason"],
            "cancel": "condor_rm {jobs}",
            "is_over": "^[XC]",
            "is_stuck": "^H",
            "is_pending": "^I",
        }
        return cls(nodes, **{**given, **others})

    # -- the contract of a backend ----------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Jobs:
        for name in ("submit", "status", "cancel"):
            program = getattr(self, name)[0]
            if shutil.which(program) is None:
                raise StartError(
                    f"Command({name}=...): there is no {program} on PATH: run this where the scheduler's commands are"
                )
        from clusterenv.backends.command_jobs import CommandJobs

        return CommandJobs(self, plan)

    def script(self, plan: Plan) -> str:
        return job_script(self, plan, 0, Path.cwd())

    @staticmethod
    def collect_garbage(note: Mapping[str, Any], deadline: float) -> str:
        from clusterenv.backends.command_jobs import cancel_noted

        return cancel_noted(note, deadline)


def _check_pattern(name: str, pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise SpecError(f"Command({name}={pattern!r}): expected a regular expression ({error})") from None


# -- scripts and commands -----------------------------------------------------------------------------------------


def log_file(plan: Plan, node: int) -> Path:
    """Return the path of a node's log, which is not removed with the run."""
    return plan.folder.parent / "logs" / plan.run / f"node-{node}.log"


def script_file(plan: Plan, node: int) -> Path:
    return plan.folder / f"node-{node}.sh"


def values_of_run(plan: Plan) -> dict[str, str]:
    return {"name": f"clusterenv-{plan.run}", "run": plan.run}


def submit_command(command: Command, plan: Plan, node: int) -> list[str]:
    """Return the command that submits the job of this node."""
    values = {
        **values_of_run(plan),
        "script": str(script_file(plan, node)),
        "log": str(log_file(plan, node)),
        "node": str(node),
        "cores": str(command.workers_per_node * command.cpus_per_worker),
    }
    return fill_words(command.submit, values, {})


def job_script(command: Command, plan: Plan, node: int, folder: Path) -> str:
    """Return the script of one node, with every value quoted and without secrets."""
    agent = plan.command(node, command.python, ["--grace-s", str(command.grace_s)])
    variables = {"PYTHONUNBUFFERED": 1, **command.env_vars}
    return "\n".join(
        [
            "#!/bin/bash",
            f"# submitted by: {shlex.join(submit_command(command, plan, node))}",
            # Some schedulers deliver a job's output only when it has ended.
            f"exec >> {shlex.quote(str(log_file(plan, node)))} 2>&1",
            f"cd {shlex.quote(str(folder))}",
            *(f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()),
            *command.setup,
            *_run_lines(shlex.join([*command.wrap, *agent]), command.end_signal.removeprefix("SIG")),
            "",
        ]
    )


def _run_lines(agent: str, end_signal: str) -> list[str]:
    """Return the shell lines that run the agent, so that it gets SIGTERM when the job gets `end_signal`."""
    if end_signal in ("TERM", "INT"):
        return [f"exec {agent}"]  # the signal must reach the agent or its wrapper, not a shell that would drop it
    return [
        f"trap '' USR1 {end_signal}  # inherited by the node, which these signals would kill",
        f"{agent} &",
        "agent=$!",
        f"trap 'kill -TERM $agent' TERM {end_signal}",
        "wait $agent; code=$?",
        # A signal interrupts `wait`.
        "while kill -0 $agent 2> /dev/null; do wait $agent; code=$?; done",
        "exit $code",
    ]
