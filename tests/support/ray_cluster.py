"""Run a real Ray cluster of several nodes on this machine, on loopback; its processes are ended by id."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ports import free_ports

COMMAND = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=2", "--disable-usage-stats"]


class RayCluster:
    """Context manager; pass `address` to `ray.init`."""

    def __init__(self, nodes: int = 2) -> None:
        self._nodes = nodes
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RayCluster:
        os.environ.update(
            RAY_AUTH_MODE="disabled",  # a test on loopback; only for the started processes, Ray reads it when imported
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1",  # Ray takes several nodes on one loopback address for such a cluster
        )
        # The path is short, because Ray's sockets have long names below it.
        self.folder = Path(tempfile.mkdtemp(prefix="ce-ray-"))
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        try:
            self._start("--head", f"--port={port}", f"--temp-dir={self.folder}", "--include-dashboard=false")
            self._await(1)
            for _ in range(self._nodes - 1):
                self._start(f"--address={self.address}")
            self._await(self._nodes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, *options: str) -> None:
        with (self.folder / f"start-{len(self._started)}.out").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    [*COMMAND, "--node-ip-address=127.0.0.1", *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _await(self, nodes: int) -> None:
        """Wait until this many nodes report that they run; Ray itself may not know of them yet."""
        deadline = time.monotonic() + 60
        logs = list(self.folder.glob("start-*.out"))
        while sum("Ray runtime started" in path.read_text() for path in logs) < nodes:
            if time.monotonic() > deadline:
                raise RuntimeError("Ray did not come up:\n" + "\n".join(path.read_text()[-2000:] for path in logs))
            time.sleep(0.2)

    @property
    def pids(self) -> set[int]:
        found = {process.pid for process in self._started}
        for process in self._started:
            if process.poll() is None:
                found |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        return found

    def __exit__(self, *_: object) -> None:
        family = [psutil.Process(pid) for pid in self.pids if psutil.pid_exists(pid)]
        for process in reversed(self._started):
            process.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()
        for started in self._started:
            started.wait()
        self._started.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
