"""The executor for workers in separate processes of this machine, over shared memory.

It encodes requests, and sends and awaits whole steps; `WorkerProcesses` manages the processes.
"""

from __future__ import annotations

from typing import Any

from clusterenv.engine.collecting.weights import Transfer
from clusterenv.engine.requests import Request
from clusterenv.executors.contract import Processes, is_plain
from clusterenv.executors.output import OutputLog
from clusterenv.executors.worker_processes import WorkerProcesses, write_weights
from clusterenv.spec import Blueprint
from clusterenv.system import interrupts
from clusterenv.wire.channel import encode
from clusterenv.worker.setup import WorkerConfig

__all__ = ["ProcessExecutor", "write_weights"]


class ProcessExecutor(WorkerProcesses):
    nodes = None

    def __init__(self, blueprint: Blueprint, slots_of: list[list[int]], config: WorkerConfig) -> None:
        super().__init__(blueprint, len(slots_of), config)
        self._workers = range(len(slots_of))
        self._output = OutputLog(slots_of)
        interrupts.environments_opened(self)

    @property
    def processes(self) -> Processes:
        return self

    def put_weights(self, transfer: Transfer) -> bool:
        write_weights(self._shared.weights, transfer.weights.data, transfer.offset)
        return True

    def send(self, index: int, message: Any, request: Request | None = None) -> None:
        self.forward(index, encode(message))

    def step_all(self, number: int) -> tuple[int, list[tuple[int, Any]]] | None:
        """Make every worker step all its slots; see the contract.

        Workers are awaited in order: waking up for the first to finish would take the core from those still working.
        """
        usual = self.ring(number)
        links, scratch, state = self._links, self._scratch, interrupts.STATE
        heard: list[tuple[int, Any]] = []
        done = 0
        try:
            for index in self._workers:
                link = links.get(index)
                if state.pending or link is None or link.lost_at is not None:
                    break
                try:
                    size = link.sock.recv_into(scratch)
                except (BlockingIOError, ConnectionError):
                    break  # silent for a while, or gone: `poll` finds out
                if size != len(usual) or link.reader.buffer or not scratch.startswith(usual):
                    messages = self._messages(index, link, size)
                    heard += [(index, message) for message in messages]
                    if len(messages) != 1 or not is_plain(messages[0], number):
                        break
                done += 1
        except BaseException:
            replied = {index for index, _ in heard}
            self._events += [(index, number) for index in range(done) if index not in replied] + heard
            raise
        return None if done == len(self._workers) and not heard else (done, heard)

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Return (worker, message) pairs: an int is a quick reply, an `Exit` the end of that worker. May be empty."""
        return self._output.show(super().poll(timeout_s))

    def stats(self) -> dict[str, Any]:
        return {"output_lines_dropped": list(self._output.dropped)}

    def close(self, timeout_s: float) -> None:
        """End all processes within about `timeout_s` + 4 s, whatever their state. Idempotent."""
        try:
            super().close(timeout_s)
        finally:
            interrupts.environments_closed(self)
