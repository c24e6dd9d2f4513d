"""Judge what was seen on a machine: each function turns plain values into a `Check`. Pure; `machine.py` looks."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence

import msgspec

from clusterenv.system.memory import GroupMemory

__all__ = ["NEEDED", "PYTHON", "Check", "Status"]

PYTHON = (3, 11)
NEEDED = {
    "gymnasium": ">=1.2,<2",
    "numpy": ">=1.26",
    "cloudpickle": ">=3.0",
    "msgspec": ">=0.19",
    "psutil": ">=5.9",
    "pyzmq": ">=26",
    "click": ">=8.1",
}
"""As in pyproject.toml; a test compares them. The metadata is missing if the package runs from a source tree."""
OPTIONAL = ("torch", "onnxruntime", "zstandard", "rich", "ray", "kubernetes", "envpool", "stable-baselines3")

_LOW_MEMORY = 1 << 30
"""A worker needs about 50 MB, an environment of its own some 100 MB; below, the kernel may end processes."""
_LOW_DISK = 1 << 30
"""Journals and key files are small; logs, recordings and the packages sent to nodes are not."""
_NO_DISK = 64 << 20
_LOW_SHM = 64 << 20
"""What container runtimes give by default."""
_LOW_FILES = 1024
"""A run with a hundred workers has a few hundred files open."""


class Status(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Check(msgspec.Struct, frozen=True):
    """One thing about this machine."""

    name: str
    status: Status
    seen: str
    advice: str = ""
    """What to do; empty if nothing."""


def python(version: Sequence[int]) -> Check:
    seen = ".".join(map(str, version[:3]))
    if tuple(version[:2]) >= PYTHON:
        return Check("Python", Status.OK, seen)
    needed = ".".join(map(str, PYTHON))
    return Check("Python", Status.PROBLEM, seen, f"ClusterEnv needs Python {needed} or newer: make another environment")


def packages(versions: Mapping[str, str | None]) -> list[Check]:
    """Judge the packages that ClusterEnv needs; None: not installed."""
    return [_package(name, versions.get(name), NEEDED[name]) for name in NEEDED]


def optional_packages(versions: Mapping[str, str | None]) -> Check:
    found = [f"{name} {versions[name]}" for name in OPTIONAL if versions.get(name)]
    return Check("optional packages", Status.OK, ", ".join(found) or "none")


def _package(name: str, version: str | None, needed: str) -> Check:
    if version is None:
        return Check(name, Status.PROBLEM, "not installed", f"pip install '{name}{needed}'")
    if not fits(version, needed):
        return Check(name, Status.PROBLEM, version, f"ClusterEnv needs {name}{needed}: pip install '{name}{needed}'")
    return Check(name, Status.OK, version)


def fits(version: str, needed: str) -> bool:
    """Return whether a version satisfies requirements of the forms ">=1.2" and "<2", joined by commas."""
    for one in needed.split(","):
        matched = re.fullmatch(r"(>=|<)([\d.]+)", one.strip())
        if matched is None:
            raise ValueError(f"{needed!r}: expected >= and < only")
        is_at_least = _numbers(version) >= _numbers(matched[2])
        if is_at_least != (matched[1] == ">="):
            return False
    return True


def _numbers(version: str) -> list[int]:
    """Return the release numbers of a version: "2.1.0rc1" → [2, 1]; ones that are equal compare equal."""
    matched = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in matched[0].split(".")] if matched else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return numbers


def cores(affinity: int, quota: float | None, load: float | None, machine: int) -> Check:
    """Judge the cores; `machine`: all of the machine, to which its load belongs."""
    limit = min(affinity, quota or math.inf)
    seen = f"{affinity} cores" + (f", limited to {quota:g} CPUs by a control group" if quota is not None else "")
    if load is not None:
        seen += f", load {load:.1f}" + (f" on the {machine} cores of the machine" if machine != affinity else "")
    if limit < 1:
        advice = "less than one CPU: every process is throttled; raise the CPU limit of the container or job"
        return Check("cores", Status.WARNING, seen, advice)
    if load is not None and load > 1.5 * machine:
        advice = "other processes use the cores: environments will be slow"
        return Check("cores", Status.WARNING, seen, advice)
    return Check("cores", Status.OK, seen)


def memory(total: int, available: int, group: GroupMemory | None) -> Check:
    """Judge the memory of the machine and of the control group; None: it has no limit."""
    free, seen = available, f"{_size(available)} free of {_size(total)}"
    if group is not None and group.limit < total:
        free = min(available, group.free)
        seen = f"{_size(free)} free of {_size(group.limit)} (limit of the control group)"
    if free < _LOW_MEMORY:
        advice = "ask for more memory, or use fewer workers: the kernel ends processes when it runs out"
        return Check("memory", Status.WARNING, seen, advice)
    return Check("memory", Status.OK, seen)


def open_files(soft: int, hard: int) -> Check:
    """Judge the limits on open files; negative: unlimited."""
    texts = ["unlimited" if value < 0 else str(value) for value in (soft, hard)]
    seen = f"{texts[0]} (hard limit {texts[1]})"
    if 0 <= hard < _LOW_FILES:
        advice = "have the hard limit raised (limits.conf, LimitNOFILE=, --ulimit nofile=): many workers need more"
        return Check("open files", Status.WARNING, seen, advice)
    return Check("open files", Status.OK, seen)  # ClusterEnv raises the soft limit itself


def shared_memory(free: int | None) -> Check:
    name = "/dev/shm"
    if free is None:
        return Check(
            name, Status.WARNING, "not there", "Ray and torch's DataLoader need it; ClusterEnv itself does not"
        )
    if free < _LOW_SHM:
        advice = "Ray and torch's DataLoader may fail (docker run --shm-size=1g); ClusterEnv itself does not use it"
        return Check(name, Status.WARNING, f"{_size(free)} free", advice)
    return Check(name, Status.OK, f"{_size(free)} free")


def disk(name: str, path: str, free: int | None, is_writable: bool) -> Check:
    if free is None:
        return Check(name, Status.PROBLEM, f"{path}: not there", "create it, or set TMPDIR to a folder that exists")
    if not is_writable:
        return Check(name, Status.PROBLEM, f"{path}: not writable", "give yourself the right to write there")
    seen = f"{path}: {_size(free)} free"
    if free < _NO_DISK:
        return Check(name, Status.PROBLEM, seen, "free some space: key files and journals cannot be written")
    if free < _LOW_DISK:
        return Check(name, Status.WARNING, seen, "free some space")
    return Check(name, Status.OK, seen)


def address(found: str | None, reason: str, ports: tuple[int, int] | None) -> Check:
    """Judge the address that nodes would dial; `reason`: why there is none, or why it cannot be listened on."""
    name = "address for nodes"
    if found is None or reason:
        advice = "only runs on this machine work (Local, Loopback); for others: bind='eth0' or bind='10.0.0.1'"
        return Check(name, Status.WARNING, reason or "none", advice)
    seen = found + (f", any port of {ports[0]}-{ports[1]} (port=... chooses one)" if ports else "")
    return Check(name, Status.OK, seen)


class Answer(msgspec.Struct, frozen=True):
    """What an external command did."""

    is_installed: bool
    code: int | None = None
    """None: it did not end in time."""
    text: str = ""


def scheduler(name: str, answer: Answer, limit_s: float, advice: str) -> Check:
    if not answer.is_installed:
        return Check(name, Status.OK, "not installed")
    if answer.code is None:
        return Check(name, Status.PROBLEM, f"does not answer within {limit_s:g} s", advice)
    lines = answer.text.strip().splitlines()
    if answer.code != 0:  # the last line says why
        reason = lines[-1][:200] if lines else "no message"
        return Check(name, Status.PROBLEM, f"fails with status {answer.code}: {reason}", advice)
    return Check(name, Status.OK, lines[0][:200] if lines else "answers")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"
