"""`make tour`: its counts find what they are made to find."""

from __future__ import annotations

import ast
import textwrap

from tools import tour


def _trees(file: str, text: str) -> tour.Trees:
    return {file: ast.parse(textwrap.dedent(text))}


def test_a_long_function_is_found_and_a_short_one_is_not() -> None:
    body = "    x = 1\n"
    trees = _trees("a.py", f"def long():\n{body * 60}def short():\n{body * 59}")
    assert [found.where for found in tour.long_functions(trees)] == ["a.py: long: 61"]


def test_constructors_are_counted_with_and_without_a_dataclass() -> None:
    names = [f"p{i}" for i in range(9)]
    fields = "\n".join(f"    {name}: int" for name in names)
    trees = _trees(
        "a.py",
        f"class A:\n    def __init__(self, {', '.join(names)}): ...\n"
        f"@dataclass(frozen=True)\nclass B:\n{fields}\n"
        f"@dataclass\nclass C:\n{fields} = field(init=False)\n"
        f"class D(NamedTuple):\n{fields}\n",
    )
    assert [found.where for found in tour.long_constructors(trees)] == ["a.py:A.__init__: 9", "a.py:B: 9"]


def test_protocols_of_callers_are_found_by_place_and_by_name() -> None:
    text = "class Host(Protocol): ...\nclass Executor(Protocol): ...\n"
    assert len(list(tour.caller_protocols(_trees("engine/a.py", text)))) == 2
    assert [found.where for found in tour.caller_protocols(_trees("a.py", text))] == ["a.py: Host"]


def test_no_exception_names_what_is_not_there() -> None:
    trees = tour.read_trees()
    names = {
        f"{file}:{node.name}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert {name.removesuffix(".__init__") for name in tour.MAY_HAVE_MORE_PARAMETERS} <= names
    assert not [found for found in tour.long_constructors(trees) if "exception" in found.what]
