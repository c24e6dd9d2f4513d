"""Record which guarantees of docs/guarantees.md a test run has checked, where, and what it measured.

A test names its guarantees with `@pytest.mark.guarantee(1, 16)` and reports figures with pytest's `record_property`
(names: `FIGURES` of tools/guarantees.py). With CLUSTERENV_GUARANTEES=FILE, the results are appended to that file, for
`python -m tools.guarantees`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

PLACES = {"slurm": "SLURM", "gridengine": "Grid Engine", "kubernetes": "Kubernetes", "ray": "Ray"}

CONTRACT = {
    "test_a_killed_worker_is_replaced": (1,),
    "test_a_killed_node_is_replaced": (3,),
    "test_gc_removes_what_a_killed_head_left": (13,),
    "test_nothing_runs_after_its_head_was_killed": (13,),
    "test_close_is_bounded_and_leaves_nothing": (15, 16),
    "test_ctrl_c_leaves_nothing": (15,),
    "test_a_node_that_is_asked_to_leave": (17,),
    "test_a_node_that_joins_late": (19,),
}
"""Tests of `clusterenv.testing.backends`, which other packages run too: they get their marks here."""


class Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "guarantees" not in properties or (report.when != "call" and report.passed):
            return
        figures = {name: value for name, value in properties.items() if name not in ("guarantees", "place")}
        row = {
            "test": report.nodeid.partition("[")[0].removeprefix("tests/"),
            "place": properties["place"],
            "guarantees": properties["guarantees"],
            "outcome": report.outcome,
            "figures": figures,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def configure(config: pytest.Config) -> None:
    path = os.environ.get("CLUSTERENV_GUARANTEES")
    if path and not hasattr(config, "workerinput"):  # with several processes, the one that receives all reports
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Recorder(Path(path)))


def label(items: list[pytest.Item]) -> None:
    """Attach to each test its guarantees and the place where it runs. Called before `-m` selects by marks."""
    for item in items:
        name = getattr(item, "originalname", item.name)
        if item.nodeid.startswith("tests/clusters/test_contract.py") and name in CONTRACT:
            item.add_marker(pytest.mark.guarantee(*CONTRACT[name]))
        numbers = {number for mark in item.iter_markers("guarantee") for number in mark.args}
        if numbers:
            item.user_properties += [("guarantees", sorted(numbers)), ("place", _place(item))]


def _place(item: pytest.Item) -> str:
    for kind, place in PLACES.items():
        if item.get_closest_marker(kind):
            return place
    asked = item.get_closest_marker("guarantee")
    if asked is not None and "place" in asked.kwargs:
        return str(asked.kwargs["place"])
    return "namespaces" if "net" in getattr(item, "fixturenames", ()) else "local"
