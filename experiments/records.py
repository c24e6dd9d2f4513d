"""The raw lines as the report reads them: by task and arm, as scores and savings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.arms import TASKS, Arm

__all__ = ["Records", "Runs", "fewer", "fewer_pulls", "read", "score"]

Records = list[dict[str, Any]]


def read(path: Path) -> Records:
    """The lines of a file, but those of a task that has other settings by now."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if _is_current(record := json.loads(line))]


def _is_current(record: dict[str, Any]) -> bool:
    """Lines of the time before settings were written down were removed by hand where they had changed."""
    return "setting" not in record or record["setting"] == asdict(TASKS[record["task"]])


class Runs:
    """Records by task and arm, seeds ascending."""

    def __init__(self, records: Records) -> None:
        self._by: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for record in records:
            arm = Arm.of(record)
            self._by.setdefault((arm.task, arm.name), {})[record["seed"]] = record

    def of(self, task: str, arm: str) -> Records:
        found = self._by.get((task, arm), {})
        return [found[seed] for seed in sorted(found)]

    def arms(self, task: str) -> list[str]:
        return sorted((arm for at, arm in self._by if at == task), key=_order)

    @property
    def tasks(self) -> list[str]:
        return [task for task in TASKS if any(at == task for at, _ in self._by)]

    def pairs(self, task: str, arm: str, base: str) -> tuple[Records, Records]:
        """Runs of both with the same seeds."""
        a, b = self._by.get((task, arm), {}), self._by.get((task, base), {})
        both = sorted(a.keys() & b.keys())
        return [a[seed] for seed in both], [b[seed] for seed in both]


def score(record: dict[str, Any], of: Literal["area", "late"] = "area") -> float:
    """0 for a random policy, 1 for one that has solved the task; the limits stand in arms.py.

    "area" is the mean return over the whole run, by steps; "late" that of the episodes in its last tenth. Parts of the
    run in which no episode ended lie on the line between their neighbours.
    """
    task = TASKS[record["task"]]
    if of == "late":
        value = record["late_return"]
    else:
        curve = np.array(record["curve"], dtype=np.float64)
        known = np.flatnonzero(~np.isnan(curve))
        value = np.interp(np.arange(len(curve)), known, curve[known]).mean()
    return float((value - task.worst) / (task.best - task.worst))


def fewer(record: dict[str, Any], beside: Sequence[str] = ()) -> float:
    """Bytes of pushing every version whole to every node, over all bytes that really went from head to nodes.

    Args:
        beside: what else is counted: "drift_bytes", the samples that APS and "auto" need (other rules are watched by
            them here, and could do without); "fragment_bytes", which come back in any case.
    """
    pushed, sent = record["versions"] * record["nodes"] * record["policy_bytes"], record["sent_bytes"]
    if "drift_bytes" in beside and (record["rule"].startswith("APS") or record["codec"] == "auto"):
        sent += record["drift_bytes"]
    if "fragment_bytes" in beside:
        pushed, sent = pushed + record["fragment_bytes"], sent + record["fragment_bytes"]
    return float(pushed / sent)


def fewer_pulls(record: dict[str, Any]) -> float:
    return float(record["versions"] * record["nodes"] / record["pulls"])


def _order(arm: str) -> tuple[int, float, str]:
    name, _, rest = arm.partition("(")
    kinds = ("Always", "Every", "APS", "Shuffled", "Random", "Never")
    number = re.match(r"[\d.]+", rest)
    return kinds.index(name.split(" ")[0]), float(number.group()) if number else 0.0, arm
