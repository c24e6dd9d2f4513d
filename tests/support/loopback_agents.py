"""A loopback cluster for tests, whose node agents the test starts, delays, kills and replaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from clusterenv.backends.contract import Plan
from clusterenv.backends.loopback import AgentProcesses
from clusterenv.backends.remote import Remote

_GATED = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Agents(AgentProcesses):
    """`Jobs` on this host. `starts` counts the starts of each node; `change` may return another command, or [] if it
    started the node itself."""

    def __init__(self, plan: Plan, dead_after_s: float, change: Callable[[Agents, int], Any]) -> None:
        super().__init__(plan, dead_after_s)
        self.change = change
        self.starts: dict[int, int] = {}

    def start(self, node: int) -> None:
        self.starts[node] = self.starts.get(node, 0) + 1
        command = self.change(self, node)
        if command is None:
            super().start(node)
        elif command:
            self.run(node, command)

    def run(self, node: int, command: list[str], **env: str) -> None:
        with (self._plan.folder / f"node-{node}.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def command(self, node: int) -> list[str]:
        return [*self._plan.command(node), *self._options]

    def process(self, node: int) -> subprocess.Popen[bytes]:
        return self._agents[node]

    def hold_back(self, node: int, until: threading.Event) -> list[str]:
        """Return a command that becomes the agent once `until` is set."""
        gate = self._plan.folder / f"gate-{node}-{self.starts[node]}"
        watcher = threading.Thread(target=lambda: (until.wait(60), gate.touch()), daemon=True)
        watcher.start()
        return [sys.executable, "-c", _GATED, str(gate), *self.command(node)]


@dataclass(frozen=True)
class Loopback(Remote):
    """A backend over `Agents`; `jobs[0]` and `events[0]` exist once it starts."""

    nodes: int = 2
    change: Callable[[Agents, int], Any] = lambda agents, node: None
    jobs: list[Agents] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    bind: str | None = field(default="127.0.0.1", kw_only=True)
    start_timeout_s: float = field(default=60.0, kw_only=True)
    heartbeat_s: tuple[float, float, float] = field(default=(0.2, 10.0, 30.0), kw_only=True)
    oversubscribe: bool = field(default=True, kw_only=True)

    def start(self, *args: Any) -> Any:
        self.events[:] = [args[-1]]
        return super().start(*args)

    def launch(self, plan: Plan) -> Agents:
        self.jobs[:] = [Agents(plan, self.heartbeat_s[1], self.change)]
        return self.jobs[0]

    def count(self, *kinds: str) -> int:
        """Return the number of events of these kinds."""
        return sum(event.kind in kinds for log in self.events for event in log())


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in a thread during the block; an exception of it fails the test."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failures, failures
