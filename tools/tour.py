"""Measure readability: sizes, parameters, folders, protocols, and the functions that three walks call.

    python -m tools.tour            print the numbers
    python -m tools.tour --check    the same, and fail if a limit is exceeded
    python -m tools.tour --list     also print every function that the walks call

Lines include blank ones, except in the total.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.walks import ROOT, SOURCE, WALKS, Crossed, documented, trace

FILE_LINES = 400
FUNCTION_LINES = 60
COMPLEXITY = 12
PARAMETERS = 8
MODULES = 15
SOURCE_LINES = 16_248
WALK_LIMITS: dict[str, tuple[int, int | None]] = {
    "a local step": (14, None),
    "a network rollout under APS": (30, 15),
    "a killed worker": (18, 8),
}
"""Maximum number of functions, and of files."""

MAY_HAVE_MORE_PARAMETERS = {
    "backends/command.py:Command": "frozen configuration that users write by name",
    "backends/kubernetes.py:Kubernetes": "frozen configuration that users write by name",
    "backends/remote.py:Remote": "the part of that configuration that all remote backends share",
    "backends/slurm.py:Slurm": "frozen configuration that users write by name",
    "env.py:ClusterEnv.__init__": "what users write by name",
    "events.py:Event": "a frozen record that users read",
    "recovery.py:Recovery": "frozen configuration that users write by name",
    "rollout.py:Rollout": "frozen arrays that users read",
}
"""Constructors of the public API, each with the reason."""


class Finding(NamedTuple):
    what: str
    where: str


Trees = dict[str, ast.Module]


def read_trees() -> Trees:
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def count_lines() -> int:
    return sum(bool(line.strip()) for path in SOURCE.rglob("*.py") for line in path.read_text().splitlines())


def long_files() -> Iterator[Finding]:
    for path in sorted(SOURCE.rglob("*.py")):
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES:
            yield Finding(f"a file past {FILE_LINES} lines", f"{path.relative_to(SOURCE)}: {lines}")


def long_functions(trees: Trees) -> Iterator[Finding]:
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield Finding(f"a function past {FUNCTION_LINES} lines", f"{file}: {node.name}: {lines}")


def complex_functions() -> Iterator[Finding]:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--output-format", "json"]
    command += ["--config", f"lint.mccabe.max-complexity={COMPLEXITY}", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    for found in json.loads(done.stdout):
        where = f"{Path(found['filename']).relative_to(SOURCE)}: {found['message']}"
        yield Finding(f"complexity past {COMPLEXITY}", where)


def long_constructors(trees: Trees) -> Iterator[Finding]:
    """Find long `__init__`s, and dataclasses with many fields.

    NamedTuples do not count: they are messages, written field by field in one place and checked by the receiver.
    """
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            name, count = f"{file}:{node.name}", _num_fields(node)
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    arguments = each.args
                    name = f"{file}:{node.name}.__init__"
                    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
            if count > PARAMETERS and name not in MAY_HAVE_MORE_PARAMETERS:
                yield Finding(f"a constructor past {PARAMETERS} parameters", f"{name}: {count}")
            elif count <= PARAMETERS and name in MAY_HAVE_MORE_PARAMETERS:
                yield Finding("an exception that nothing needs", name)


def _num_fields(node: ast.ClassDef) -> int:
    """Return the number of fields that a dataclass's constructor takes; 0 for other classes."""
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return 0
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    own = [each for each in fields if "ClassVar" not in ast.unparse(each.annotation)]
    return sum(each.value is None or "init=False" not in ast.unparse(each.value) for each in own)


def full_folders() -> Iterator[Finding]:
    folders = Counter(path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    for folder, count in sorted(folders.items()):
        if count > MODULES:
            yield Finding(f"a folder of more than {MODULES} modules", f"{folder.relative_to(SOURCE.parent)}: {count}")


def caller_protocols(trees: Trees) -> Iterator[Finding]:
    """Find Protocols in the engine: they can only describe its callers, because what it calls itself has names."""
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or not any("Protocol" in ast.unparse(base) for base in node.bases):
                continue
            if file.startswith("engine/") or node.name in ("Host", "Home"):
                yield Finding("a protocol that describes the caller", f"{file}: {node.name}")


def imports_between_tests() -> Iterator[Finding]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = {path.stem for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            for name in names:
                if name.rpartition(".")[2] in tests:
                    yield Finding("a test that imports another", f"{path.relative_to(ROOT)}: {name}")


def large_source() -> Iterator[Finding]:
    lines = count_lines()
    print(f"src: {lines} lines that are not blank, in {len(list(SOURCE.rglob('*.py')))} files")
    if lines >= SOURCE_LINES:
        yield Finding("src is too large", f"{lines} lines, of fewer than {SOURCE_LINES}")


def look_at_walks(show_all: bool) -> Iterator[Finding]:
    """Apply the limits to the functions that the docs name, each of which must be called.

    The number of all functions called, however small, is printed too.
    """
    for name in WALKS:
        crossed = trace(name)
        named = documented(name)
        on_the_way = [each for each in crossed if any(each.is_called(one) for one in named)]
        num_files = len({each.file for each in on_the_way})
        print(f"{name}: {len(named)} functions in {num_files} files pass it on")
        print(f"    {len(crossed)} in {len({each.file for each in crossed})} files are called: {_by_folder(crossed)}")
        if show_all:
            for each in crossed:
                print(f"    {'>' if each in on_the_way else ' '} {each.file}:{each.line} {each.name}")
        for one in named:
            if not any(each.is_called(one) for each in crossed):
                yield Finding("a function that docs/architecture.md names and the walk does not call", f"{name}: {one}")
        most, most_files = WALK_LIMITS[name]
        if len(named) > most or (most_files is not None and num_files > most_files):
            limit = f"{most} functions" + (f" in {most_files} files" if most_files else "")
            where = f"{name}: {len(named)} functions in {num_files} files, of at most {limit}"
            yield Finding("a walk that crosses too much", where)


def _by_folder(crossed: list[Crossed]) -> str:
    counts = Counter(each.file.split("/")[0] for each in crossed)
    return ", ".join(f"{folder} {count}" for folder, count in counts.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure readability.")
    parser.add_argument("--check", action="store_true", help="fail if a limit is exceeded")
    parser.add_argument("--list", action="store_true", help="print every function that the walks call")
    arguments = parser.parse_args()
    trees = read_trees()
    findings = [
        *large_source(),
        *long_files(),
        *long_functions(trees),
        *complex_functions(),
        *long_constructors(trees),
        *full_folders(),
        *caller_protocols(trees),
        *imports_between_tests(),
        *look_at_walks(arguments.list),
    ]
    print()
    for what, number in Counter(finding.what for finding in findings).items():
        print(f"{what}: {number}")
        for finding in findings:
            if finding.what == what:
                print(f"    {finding.where}")
    if not findings:
        print("no limit is passed")
    return int(arguments.check and bool(findings))


if __name__ == "__main__":
    sys.exit(main())
