"""Run the examples as a reader would, and parse their output; shared by their tests."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: object, timeout_s: float = 100.0) -> str:
    """Run an example and return its output; any warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def summary(output: str, name: str) -> float:
    """Return the number on the line of this name."""
    match = re.search(rf"^{re.escape(name)} +(-?[\d.]+)", output, re.MULTILINE)
    assert match, output
    return float(match[1])


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interrupt(name: str, *options: object) -> None:
    """Send Ctrl-C after the first line: the example must exit with 130 and a message, without a traceback."""
    # In a new session, so that the signal reaches the whole process group, like a terminal's Ctrl-C.
    command = [sys.executable, str(EXAMPLES / name), *map(str, options)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert " steps " in process.stdout.readline(), "the first line says that training has begun"
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert errors.endswith("interrupted; the environments are closed\n")
    assert "Traceback" not in errors
