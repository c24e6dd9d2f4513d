"""Show checks and findings as text for a terminal, or as JSON. Colours only on a terminal, and only with `rich`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import IO, Any

import msgspec

from clusterenv.monitor.doctor.checks import Check, Status
from clusterenv.monitor.doctor.findings import Finding, Severity
from clusterenv.monitor.encoding import to_json
from clusterenv.monitor.terminal import clean

__all__ = ["as_json", "print_report", "text_of_checks", "text_of_findings"]

_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.ADVICE: "cyan",
    Status.PROBLEM: "bold red",
    Status.WARNING: "yellow",
    Status.OK: "green",
}
_DETAIL_LINES = 12
"""Lines of a traceback that are shown; `as_json` has all."""


def as_json(checks: Sequence[Check] | None, findings: Sequence[Finding] | None) -> str:
    """Return both as one JSON object; None: not looked at."""
    found = None if findings is None else [_finding(finding) for finding in findings]
    return msgspec.json.format(to_json({"machine": checks, "run": found}), indent=2).decode()


def _finding(finding: Finding) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(finding)
    # The name of a cause is what scripts compare; its value is a sentence.
    return {**plain, "cause": finding.cause.name.lower(), "cause_text": finding.cause.value}


def text_of_checks(checks: Sequence[Check]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in _check_lines(checks))


def text_of_findings(findings: Sequence[Finding]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in _finding_lines(findings))


def print_report(
    checks: Sequence[Check] | None, findings: Sequence[Finding] | None, file: IO[str] | None = None
) -> None:
    """Write both to a file; default: stdout."""
    out = sys.stdout if file is None else file
    lines: list[_Line] = []
    if findings is not None:
        lines += _finding_lines(findings)
    if checks is not None:
        lines += [[("", "")]] * bool(lines) + _check_lines(checks)
    if out.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.text import Text

        console = Console(file=out, highlight=False)
        for line in lines:
            console.print(Text.assemble(*line), soft_wrap=True)
    else:
        for line in lines:
            out.write("".join(text for text, _ in line) + "\n")


_Line = list[tuple[str, str]]
"""Pieces of a line, each with its style."""


def _check_lines(checks: Sequence[Check]) -> list[_Line]:
    width = max((len(check.name) for check in checks), default=0)
    lines: list[_Line] = []
    for check in checks:
        mark = (f"{check.status.value:<8}", _STYLES[check.status])
        lines.append([mark, (f" {check.name:<{width}}  {clean(check.seen)}", "")])
        if check.advice:
            lines.append([(f"{'':<8} {'':<{width}}  → {clean(check.advice)}", "")])
    return lines


def _finding_lines(findings: Sequence[Finding]) -> list[_Line]:
    if not findings:
        return [[("nothing is wrong with the run", "green")]]
    lines: list[_Line] = []
    for number, finding in enumerate(findings, 1):
        mark = (f"{finding.severity.value:<8}", _STYLES[finding.severity])
        cost = f"  [costs about {finding.lost:.0%}]" if finding.lost >= 0.01 else ""
        lines.append([(f"{number}. ", ""), mark, (f" {clean(finding.text)}", "bold"), (cost, "dim")])
        evidence = ", ".join(f"{name} {_value(value)}" for name, value in finding.evidence.items())
        lines.append([(f"   {finding.subject}: {clean(evidence)}", "dim")])
        lines.append([(f"   → {clean(finding.advice)}", "")])
        lines += [[(f"   | {clean(line)}", "dim")] for line in _shortened(finding.detail)]
    return lines


def _shortened(detail: str) -> list[str]:
    """Return the end of a traceback, or the beginning of a stack of faulthandler, where the last call is the first."""
    lines = detail.strip().splitlines()
    left_out = [f"[{len(lines) - _DETAIL_LINES} lines left out]"] if len(lines) > _DETAIL_LINES else []
    if "most recent call first" in detail:
        return lines[:_DETAIL_LINES] + left_out
    return left_out + lines[-_DETAIL_LINES:]


def _value(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
