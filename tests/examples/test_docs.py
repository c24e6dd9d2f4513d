"""Every snippet of the README and the docs runs, and so does every docstring example."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clusterenv

pytestmark = pytest.mark.examples

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code, tmp_path):
    path = tmp_path / "snippet.py"
    path.write_text(code)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(clusterenv.__path__, "clusterenv.")
    if not name.endswith("__main__") and "forkserver" not in name
]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*Box.*precision lowered.*:UserWarning")
def test_docstring_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_every_page_link_exists():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
