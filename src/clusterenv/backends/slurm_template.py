"""Fill a site's own batch script, `Slurm(template=...)`: the command of the agent, and the options that a run needs.

Pure but for `read_template`. `slurm.py` calls it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from clusterenv.backends.launch.placeholders import check_placeholders, fill
from clusterenv.errors import SpecError

PLACEHOLDERS = ("command", "name", "log", "cores")

_LONG = {
    "A": "account",
    "a": "array",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "e": "error",
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
}
_OURS = {
    "job-name": "jobs are named after their run, so that they can be found and cancelled; use --comment",
    "array": "each node is a job of its own",
    "output": "errors quote a node's log, which is in `logs` of the run's folder",
    "error": "errors quote a node's log, which is in `logs` of the run's folder",
    "open-mode": "a node that is started again appends to its log",
}
"""Options of `sbatch` that a template may not set, and why."""

END_SIGNAL = re.compile(r"(?:\w+:)?(?:SIG)?(?:TERM|15|INT|2)(?:@(?P<seconds>\d+))?", re.IGNORECASE)
"""Values of `--signal` on which a node leaves: "B:TERM@60"."""
# A comment begins with a # at the beginning of a word that is not quoted.
_COMMENT = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?P<comment>(?<![^\s;&|()])#.*)""")


def read_template(template: str | os.PathLike[str]) -> str:
    """Return the text of a template: the value itself if it has several lines, else the content of that file."""
    if isinstance(template, str) and "\n" in template:
        return template
    path = Path(template).expanduser()
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"Slurm(template={os.fspath(template)!r}): expected the text of a batch script, or a file: {error}"
        ) from None


def check_template(text: str, chosen: Collection[str]) -> None:
    """Raise SpecError if this text is no usable template; `chosen`: options of `sbatch` that the backend sets too."""
    check_placeholders("Slurm", "template", text, PLACEHOLDERS)
    if not text.startswith("#!"):
        raise SpecError("Slurm(template=...): a batch script begins with its interpreter, such as #!/bin/bash")
    lines = [_COMMENT.sub(lambda match: "" if match["comment"] else match[0], line) for line in text.splitlines()]
    if not any("command" in check_placeholders("Slurm", "template", line, PLACEHOLDERS) for line in lines):
        raise SpecError(
            "Slurm(template=...) does not start the node: write `exec {command}` where its command belongs "
            "(`exec`, so that SLURM's signals reach the node; `${command}` is a variable of the shell)"
        )
    given = header_options(text)
    for option, why in _OURS.items():
        if option in given:
            raise SpecError(f"Slurm(template=...) sets --{option}: leave it out, {why}")
    for option in ("nodes", "ntasks"):
        if given.get(option, "1") != "1":
            raise SpecError(
                f"Slurm(template=...) sets --{option}={given[option]}: each node is a job of its own, with 1"
            )
    if "signal" in given and not END_SIGNAL.fullmatch(given["signal"] or ""):
        raise SpecError(
            f"Slurm(template=...) sets --signal={given['signal']}: nodes leave on TERM and INT, and other signals kill "
            "them. Write --signal=B:TERM@60, where 60 is the time in seconds before the job's end"
        )
    for option in chosen:
        if option in given:
            raise SpecError(f"Slurm: --{option} is in the template and among the options: give it once")


def header_options(text: str) -> dict[str, str | None]:
    """Return the options in the `#SBATCH` lines of a batch script, by their long names."""
    found: dict[str, str | None] = {}
    for line in text.splitlines()[: _end_of_header(text)]:
        if line.startswith("#SBATCH"):
            words = _split(line)
            for word, after in zip(words, [*words[1:], "-"], strict=True):
                value = None if after.startswith("-") else after
                if word.startswith("--"):
                    name, equals, text_of = word.removeprefix("--").partition("=")
                    found[name] = text_of if equals else value
                elif word.startswith("-") and word[1:2] in _LONG:
                    found[_LONG[word[1]]] = word[2:].removeprefix("=") or value
    return found


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError as error:
        raise SpecError(f"Slurm(template=...): the line {line!r} cannot be read: {error}") from None


def fill_template(text: str, options: Mapping[str, str | int | None], values: Mapping[str, str]) -> str:
    """Return the batch script: the template with its placeholders filled, and with the options that it does not set."""
    given = header_options(text)
    lines = fill(text, values).splitlines()
    own = [option_line(name, value) for name, value in options.items() if name not in given]
    at = max((i for i in range(_end_of_header(text)) if lines[i].startswith("#SBATCH")), default=0) + 1
    return "\n".join([*lines[:at], *own, *lines[at:], ""])


def option_line(name: str, value: str | int | None) -> str:
    return f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _end_of_header(text: str) -> int:
    """Return the number of lines before the first command, after which `sbatch` reads no options."""
    lines = text.splitlines()
    return next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
