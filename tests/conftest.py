"""A leaked process, thread, descriptor or piece of shared memory fails the test that leaked it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import hypothesis
import psutil
import pytest

import guarantees
import prefork
import real

# The same examples in every run: a failure is a finding of the change at hand, never of the dice.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("ci")

_home: list[tempfile.TemporaryDirectory[str]] = []


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except OSError:
            continue
    return found


def _resource_tracker() -> tuple[int | None, int | None]:
    """Process and descriptor of Python's own helper, which `multiprocessing` starts once and keeps."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return (None, None) if module is None else (module._resource_tracker._pid, module._resource_tracker._fd)


def _state() -> tuple[set[int], set[int | None], dict[str, str], set[str]]:
    tracker, its_pipe = _resource_tracker()
    forks, forks_pipe = prefork.own()
    children = {child.pid for child in psutil.Process().children(recursive=True)} - real.daemons() - {tracker, forks}
    threads = {thread.ident for thread in threading.enumerate()}
    kept = {str(its_pipe), forks_pipe}
    descriptors = {number: target for number, target in _descriptors().items() if number not in kept}
    # podman makes its locks when it is first used on a machine, and keeps them.
    shared = {name for name in os.listdir("/dev/shm") if not name.startswith("libpod_")}
    return children, threads, descriptors, shared


def _not_of_others(names: set[str]) -> set[str]:
    """Without the shared memory that processes of another test session, or of another user, have mapped."""
    if not names:
        return names
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) not in family:
            with contextlib.suppress(OSError):
                mapped = (entry / "maps").read_text()
                names = {name for name in names if f"/dev/shm/{name}" not in mapped}
    return {name for name in names if _is_own_file(Path("/dev/shm") / name)}


def _is_own_file(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_uid == os.getuid()
    return False


def _leaks(
    before: tuple[set[int], set[int | None], dict[str, str], set[str]],
) -> list[str]:
    children, threads, descriptors, shm = _state()
    leaks = [f"process {pid}" for pid in children - before[0]]
    leaks += [f"thread {ident}" for ident in threads - before[1]]
    leaks += [f"shared memory {name}" for name in _not_of_others(shm - before[3])]
    watched = ("socket:", "pipe:", "/memfd:", "anon_inode:")
    leaks += [
        f"descriptor {fd} -> {target}"
        for fd, target in descriptors.items()
        if target.startswith(watched) and before[2].get(fd) != target
    ]
    return leaks


def pytest_configure(config: pytest.Config) -> None:
    guarantees.configure(config)
    # Runs make themselves known there, and not in the home folder of whoever runs the tests.
    _home.append(tempfile.TemporaryDirectory(prefix="clusterenv-test-home-"))
    os.environ["CLUSTERENV_HOME"] = _home[-1].name
    # What a shell starts in the background ignores Ctrl-C, and so would the scripts that are interrupted here.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    guarantees.label(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    for module in {item.getparent(pytest.Module).obj for item in session.items}:
        # Workers would otherwise import it for an environment that it defines, and with it pytest, torch and more.
        cloudpickle.register_pickle_by_value(module)
    if not session.config.option.collectonly:
        if session.items:  # not the process that only hands tests out
            prefork.start()
        real.start({kind for kind in real.KINDS for item in session.items if item.get_closest_marker(kind)})


def pytest_sessionfinish() -> None:
    real.stop()
    prefork.stop()


def pytest_unconfigure() -> None:
    while _home:
        _home.pop().cleanup()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what modules that tests import leave is large: no need to look at it after each test
    before = _state()
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while leaks := _leaks(before):
        if time.monotonic() > deadline:
            pytest.fail("leaked: " + "; ".join(leaks))
        time.sleep(0.05)
