"""docs/guarantees.md: made from recorded results, complete, and about tests that exist."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tools.guarantees import PAGE, Result, merge, read_lines, read_promises, read_results, render

TESTS = Path(__file__).resolve().parents[1]
CLUSTERS = (1, 3, 13, 15, 17, 19)
"""Guarantees that real clusters must show too."""


def test_the_page_is_what_the_results_make():
    page = PAGE.read_text()
    assert page == render(page, read_promises(), read_results()), "run `python -m tools.guarantees`"


@pytest.mark.parametrize("number", range(1, 31))
def test_every_guarantee_was_tested_and_held(number):
    assert number in read_promises()
    results = [result for result in read_results() if number in result.guarantees]
    assert sum(result.passed for result in results) and not any(result.failed for result in results)
    places = {result.place for result in results if result.passed}
    assert number not in CLUSTERS or places >= {"SLURM", "Kubernetes", "Ray"}


def _functions(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_page_exists():
    contract = TESTS.parent / "src" / "clusterenv" / "testing"
    inherited = {name for path in contract.glob("**/*.py") for name in _functions(path)}
    for result in read_results():
        path, *_, name = result.test.split("::") if "::" in result.test else (result.test, "")
        assert path.startswith("tools.soak") or name in _functions(TESTS / path) | inherited, result.test


def line(test, place, outcome="passed", **figures):
    return json.dumps({"test": test, "place": place, "guarantees": [1], "outcome": outcome, "figures": figures})


def test_cases_of_one_test_are_added_and_later_runs_replace_earlier_ones():
    first = read_lines([line("a", "local", detected_s=0.2), line("a", "local", detected_s=0.1), line("a", "Ray")])
    assert first[0] == Result("a", "local", [1], passed=2, figures={"detected_s": [0.1, 0.2]})
    merged = merge(first, read_lines([line("a", "local", "failed"), line("b", "local")]))
    assert [(r.test, r.place, r.passed, r.failed) for r in merged] == [
        ("a", "Ray", 1, 0),
        ("a", "local", 0, 1),
        ("b", "local", 1, 0),
    ]
