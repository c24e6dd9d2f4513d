"""`Slurm`: run one job per node, so that losing or preempting a job costs one node, which is replaced alone.

Pure functions here (`job_script`, `srun_command`) make what `slurm_jobs.py` submits.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from clusterenv.backends.contract import Jobs, Plan
from clusterenv.backends.launch.placeholders import check_variables, split_words
from clusterenv.backends.remote import Remote
from clusterenv.backends.slurm_template import (
    END_SIGNAL,
    check_template,
    fill_template,
    header_options,
    option_line,
    read_template,
)
from clusterenv.errors import SpecError, StartError

_SIGNAL_S = 60  # SLURM's default for `--signal=TERM` without a time


@dataclass(frozen=True)
class Slurm(Remote):
    """Run nodes as SLURM jobs.

    Args:
        nodes: number of nodes, one job each; with `mode="srun"`, nodes of the allocation in which the script runs.
        cpus_per_worker: cores for each environment process.
        mem: memory of a node, as for `sbatch --mem` ("8G").
        partition, account, qos, time_limit, gres, constraint: the site's values; `time_limit` is `--time`.
        interface: another name for `bind`.
        env_vars: environment variables for the nodes, in addition to those of this process, which they inherit.
        setup: shell lines to run on a node before anything else ("module load ...").
        extra: further options of `sbatch`: {"exclusive": None, "nodelist": "n[1-4]"}.
        python: the interpreter on the nodes, with the same Python minor version, Gymnasium and clusterenv as here;
            None: the path of this interpreter.
        wrap: words to put before a node's command, or a string to split as a shell would: a container ("apptainer exec
            image.sif"), an environment ("conda run -n x"). They are quoted: `$HOME` is not expanded. The wrapped
            command must see `folder` under the same path, use the host's network, and receive SIGTERM.
        grace_s: seconds from SIGTERM to SIGKILL in which a node hands over its results; SIGTERM is sent this long
            before the time limit (`--signal`). Preemption and `scancel` use the site's settings (GraceTime, KillWait).
        template: your site's own batch script, as text or as the path of a file, with `exec {command}` where the node
            starts; {name}, {log} and {cores} may be used too. Options that it does not set itself are added to its
            `#SBATCH` lines; what `setup` and `env_vars` would do belongs in its text.
        mode: "submit" submits jobs; "srun" starts steps within the allocation in which this script runs.
        on_head_node: with "srun": count the node on which this script runs as one of `nodes`.
        folder: for keys, on a file system that the nodes can see. Logs stay in its `logs`.
        others: as in `Remote`.
    """

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
    grace_s: int = field(default=30, kw_only=True)
    template: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    folder: str | os.PathLike[str] | None = field(default="~/.clusterenv", kw_only=True)
    # The lease is long because suspending the script (Ctrl-Z) must not end jobs that would have to queue again.
    heartbeat_s: tuple[float, float, float] = field(default=(1.0, 10.0, 300.0), kw_only=True)
    name: ClassVar[str] = "slurm"
    can_reattach: ClassVar[bool] = True

    def __post_init__(self, interface: str | None) -> None:
        if interface is not None:
            if self.bind not in (None, interface):
                raise SpecError(f"Slurm(interface={interface!r}, bind={self.bind!r}): these are one option: give one")
            object.__setattr__(self, "bind", interface)
        super().__post_init__()
        if "job-name" in self.extra:
            raise SpecError(
                f"Slurm(extra={{'job-name': {self.extra['job-name']!r}}}): jobs are named after their run, so that "
                "they can be found and cancelled; use extra={'comment': ...} for your own text"
            )
        if self.python == "":
            raise SpecError("Slurm(python=''): expected the path or name of an interpreter on the nodes")
        object.__setattr__(self, "wrap", split_words("Slurm", "wrap", self.wrap))
        check_variables("Slurm", self.env_vars)
        words = [("wrap", word) for word in self.wrap]
        for name, value in [*self.options().items(), *self.env_vars.items(), ("python", self.python), *words]:
            if value is not None and any(ord(letter) < 32 for letter in str(value)):
                raise SpecError(f"Slurm: {name}={value!r} has a line break or another control character")
        if self.template is not None:
            self._read_template(self.template)

    def _read_template(self, template: str | os.PathLike[str]) -> None:
        """Replace `template` by its text, so that a file that is changed later does not change this run."""
        for name, is_given in (("setup", self.setup), ("env_vars", self.env_vars), ("mode", self.mode != "submit")):
            if is_given:
                where = "it is for jobs that are submitted" if name == "mode" else "write those lines in the template"
                raise SpecError(f"Slurm(template=..., {name}={getattr(self, name)!r}): {where}")
        text = read_template(template)
        chosen = [name for name in self.options() if name != "cpus-per-task" or self.cpus_per_worker != 1]
        check_template(text, chosen)
        object.__setattr__(self, "template", text)

    def options(self) -> dict[str, str | int | None]:
        """Return the `sbatch` options that the user chose."""
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

    def launch(self, plan: Plan) -> Jobs:
        for program in ("sbatch", "squeue", "scancel") if self.mode == "submit" else ("srun", "scontrol"):
            if shutil.which(program) is None:
                raise StartError(f"Slurm: there is no {program} on PATH: run this where SLURM's commands are available")
        from clusterenv.backends.slurm_jobs import SlurmJobs, SlurmSteps, hosts_of_allocation

        return SlurmJobs(self, plan) if self.mode == "submit" else SlurmSteps(self, plan, hosts_of_allocation(self))

    def script(self, plan: Plan) -> str:
        command, log = plan.command(0, self.python, grace_options(self)), log_file(plan, 0)
        return job_script(self, f"clusterenv-{plan.run}", command, log, Path.cwd())

    @staticmethod
    def collect_garbage(note: Mapping[str, Any], deadline: float) -> str:
        from clusterenv.backends.slurm_jobs import cancel_named

        cancel_named(note["name"], deadline, {} if note["conf"] is None else {"SLURM_CONF": note["conf"]})
        return f"SLURM jobs named {note['name']} are cancelled"


def log_file(plan: Plan, node: int) -> Path:
    """Return the path of a node's log, which is not removed with the run."""
    return plan.folder.parent / "logs" / plan.run / f"node-{node}.log"


# -- scripts and commands -----------------------------------------------------------------------------------------


def job_script(slurm: Slurm, name: str, command: Sequence[str], log: Path, folder: Path) -> str:
    """Return the batch script of one node, with every value quoted and without secrets."""
    options: dict[str, str | int | None] = {
        "job-name": name,
        "nodes": 1,
        "ntasks": 1,
        "output": str(log).replace("%", "%%"),
        "open-mode": "append",
        "chdir": str(folder),
        "signal": f"B:TERM@{slurm.grace_s}",
        **slurm.options(),
    }
    if isinstance(slurm.template, str):
        values = {"command": shlex.join([*slurm.wrap, *command]), "name": name, "log": shlex.quote(str(log))}
        values["cores"] = str(slurm.workers_per_node * slurm.cpus_per_worker)
        return fill_template(slurm.template, options, values)
    lines = ["#!/bin/bash", *(option_line(option, value) for option, value in options.items())]
    return "\n".join([*lines, *script_body(slurm, command)])


def grace_options(slurm: Slurm) -> list[str]:
    """Return the options that tell an agent how long it has after the signal; a user's own `--signal` comes first."""
    header = header_options(slurm.template) if isinstance(slurm.template, str) else {}
    own = str(slurm.extra.get("signal") or header.get("signal") or "")
    given = END_SIGNAL.fullmatch(own)
    seconds = slurm.grace_s if given is None else int(given["seconds"] or _SIGNAL_S)
    return ["--grace-s", str(seconds)]


def script_body(slurm: Slurm, command: Sequence[str]) -> list[str]:
    """Return the shell lines that start an agent with this command."""
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in slurm.env_vars.items()]
    # `exec`: the scheduler's signals must reach the agent or its wrapper, not a shell that would drop them.
    return [*exports, *slurm.setup, f"exec {shlex.join([*slurm.wrap, *command])}", ""]


def srun_command(slurm: Slurm, host: str, script: Path) -> list[str]:
    """Return the command that starts a step on one node of the allocation."""
    cores = slurm.workers_per_node * slurm.cpus_per_worker
    own = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", f"--cpus-per-task={cores}", "--overlap", "--exact"]
    extra = [f"--{name}" if value is None else f"--{name}={value}" for name, value in slurm.extra.items()]
    memory = [] if slurm.mem is None else [f"--mem={slurm.mem}"]
    return ["srun", *own, *memory, *extra, "bash", str(script)]
