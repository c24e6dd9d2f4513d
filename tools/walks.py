"""Trace which functions of `src/clusterenv` three walks call, in the head, its workers and its node agents.

Used by `tools.tour`. Every Python process of a walk imports our `sitecustomize`, which sets a profile function. It
records each function once, while a byte in a shared file says that the walk is running. Starting and closing are not
part of a walk: they run before and after.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "clusterenv"
FOLDER = "CLUSTERENV_WALK"
"""Name of the environment variable with the folder to record a walk in; unset: nothing is recorded."""

_HOOK = """
import mmap, os, sys, threading

def _install(folder, source):
    # Unbuffered and opened to append: forked processes write to the same file, and some of them are killed.
    out = os.open(f"{folder}/crossed", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    out = os.dup2(out, 1000, inheritable=False)
    with open(f"{folder}/on", "rb") as file:
        on = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    seen = set()

    def note(frame, event, _):
        # Also on return: a function that waits for a message was called before the walk began.
        if not on[0] or event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            if code.co_filename.startswith(source) and not code.co_name.startswith("<"):
                fields = (code.co_filename, code.co_qualname, str(code.co_firstlineno))
                os.write(out, ("\\t".join(fields) + "\\n").encode())

    threading.setprofile(note)
    sys.setprofile(note)

if os.environ.get("CLUSTERENV_WALK"):
    _install(os.environ["CLUSTERENV_WALK"], os.environ["CLUSTERENV_WALK_SOURCE"])
"""


class Crossed(NamedTuple):
    """A function that a walk called."""

    file: str
    name: str
    line: int

    def is_called(self, name: str) -> bool:
        """Return whether `name` means this function: `Class.method`, or `module.function`."""
        return name in (self.name, f"{Path(self.file).stem}.{self.name}")


def trace(name: str, timeout_s: float = 300.0) -> list[Crossed]:
    """Run a walk in a separate process; return the functions that it called."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_HOOK)
        Path(folder, "on").write_bytes(b"\0")
        path = os.pathsep.join([folder, str(SOURCE.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, FOLDER: folder, f"{FOLDER}_SOURCE": f"{SOURCE}{os.sep}"}
        subprocess.run([sys.executable, "-m", "tools.walks", name], env=env, cwd=ROOT, check=True, timeout=timeout_s)
        lines = Path(folder, "crossed").read_text().splitlines()
    found = {tuple(line.split("\t")) for line in lines}
    return sorted(Crossed(os.path.relpath(file, SOURCE), name, int(number)) for file, name, number in found)


def documented(name: str) -> list[str]:
    """Return the functions that docs/architecture.md names for this walk, each once."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = page.partition(f"\n### A{name[1:]}\n")[2].partition("\n##")[0]
    if not walk:
        raise SystemExit(f"docs/architecture.md does not tell the walk {name!r}")
    return list(dict.fromkeys(re.findall(r"`(\w+\.\w+)`", walk)))


@contextlib.contextmanager
def _walk() -> Iterator[None]:
    with Path(os.environ[FOLDER], "on").open("r+b") as file, mmap.mmap(file.fileno(), 1) as on:
        on[0] = 1
        try:
            yield
        finally:
            on[0] = 0


def walk_step() -> None:
    """Step local workers with actions from the head."""
    import clusterenv as ce

    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Local(workers=2)) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            envs.step(envs.action_space.sample())
        with _walk():
            for _ in range(3):
                envs.step(envs.action_space.sample())


def walk_rollout() -> None:
    """Collect a rollout under APS from two nodes that must pull weights for it."""
    import torch

    import clusterenv as ce

    torch.manual_seed(1)
    last = torch.nn.Linear(16, 2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), last)
    policy = ce.TorchPolicy(net, dist="categorical")
    with ce.ClusterEnv("CartPole-v1", num_envs=4, backend=ce.Loopback(nodes=2)) as envs:
        collector = envs.collector(policy, sync=ce.APS(), seed=1)
        collector.rollout(16)
        collector.rollout(16)
        before = collector.stats()["pulls"]
        with torch.no_grad():
            last.bias.add_(torch.tensor([3.0, -3.0]))
        with _walk():
            collector.rollout(16)
        if collector.stats()["pulls"] == before:
            raise SystemExit("no node pulled: this was not the walk")


def walk_killed() -> None:
    """Kill one of the local workers, and step until its slots are rebuilt."""
    import clusterenv as ce

    with ce.ClusterEnv([_with_pid] * 4, backend=ce.Local(workers=2)) as envs:
        envs.reset(seed=1)
        actions = envs.action_space.sample()
        envs.step(actions)
        pid = envs.call("pid")[0]
        envs.step(actions)
        with _walk():
            os.kill(pid, signal.SIGKILL)
            truncated = False
            while not truncated:
                truncated = bool(envs.step(actions)[3][0])
            envs.step(actions)
        if envs.call("pid")[0] == pid:
            raise SystemExit("no worker was replaced: this was not the walk")


def _with_pid() -> Any:
    import gymnasium as gym

    class WithPid(gym.Wrapper[Any, Any, Any, Any]):
        def pid(self) -> int:
            return os.getpid()

    return WithPid(gym.make("CartPole-v1"))


WALKS: dict[str, Callable[[], None]] = {
    "a local step": walk_step,
    "a network rollout under APS": walk_rollout,
    "a killed worker": walk_killed,
}


if __name__ == "__main__":
    WALKS[sys.argv[1]]()
