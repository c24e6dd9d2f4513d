"""Make one virtual environment per peer, under `.cache/bench`, with pip on first use.

Enters: the name of a subject. Leaves: the interpreter to measure it with, or the reason why there is none. Called by
`benchmarks.__main__` once per subject, before the first round.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HOME = ROOT / ".cache" / "bench"
INSTALL_TIMEOUT_S = 1200

ENVIRONMENTS = "gymnasium[classic-control,box2d]"
REQUIREMENTS = {
    "sb3": ("stable-baselines3", ENVIRONMENTS),
    "ray": ("ray", ENVIRONMENTS),
    # RLlib pins an older Gymnasium, whose box2d extra builds box2d-py with swig. Box2D is the same module as a
    # wheel, and the one that every other environment here steps.
    "rllib": ("ray[rllib]", "torch", "gymnasium[classic-control]", "Box2D"),
    "torchrl": ("torchrl", ENVIRONMENTS),
    "torchrl-envpool": ("torchrl", "envpool", "treevalue", ENVIRONMENTS),
}
# Other subjects run in the project's own environment. EnvPool is one of them on purpose: alone and inside our workers
# it must be the same build, with the same numpy.
VENV_OF_SUBJECT = {
    "subproc": "sb3",
    "ray": "ray",
    "rllib": "rllib",
    "torchrl": "torchrl",
    "torchrl-envpool": "torchrl-envpool",
}


@dataclass(frozen=True)
class Missing:
    """A peer that cannot be measured, and why."""

    reason: str


def interpreter(subject: str) -> Path | Missing:
    """Return the Python that runs `subject`; its environment is installed on first use."""
    name = VENV_OF_SUBJECT.get(subject)
    if name is None:
        return Path(sys.executable)
    home = HOME / name
    python = home / "bin" / "python"
    marker = home / ".ready"
    wanted = "\n".join(REQUIREMENTS[name]) + "\n" + CONSTRAINTS.read_text()
    if marker.is_file() and marker.read_text() == wanted:
        return python
    if home.exists():
        shutil.rmtree(home)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [*pip, "-c", str(CONSTRAINTS), *REQUIREMENTS[name]],
    ):
        failure = _attempt(command)
        if failure is not None:
            return failure
    marker.write_text(wanted)
    return python


def why(output: str) -> str:
    """Return the most telling line of a failed command's output, without addresses and paths of this machine."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Libraries print while they shut down, after the error, so the last line is only the second choice.
    errors = [line for line in lines if re.match(r"ERROR\b|[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    line = (errors or lines or ["no reason given"])[-1]
    line = re.sub(r"\b[a-z]+://\S+", "<address>", line)
    line = re.sub(r"(?<![\w<])(?:/[\w.@+-]+){2,}/?", "<path>", line)
    return re.sub(r"(host=)'[^']*'", r"\1<address>", line)[:200]


def _attempt(command: list[str]) -> Missing | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Missing(f"not installed: no end after {INSTALL_TIMEOUT_S} s")
    if done.returncode != 0:
        return Missing(f"not installed: {why(done.stdout + done.stderr)}")
    return None
