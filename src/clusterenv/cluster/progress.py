"""Track what the workers of nodes are doing, and the load of their machines, from the nodes' beats. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clusterenv.errors import ProtocolError
from clusterenv.system.host_load import HostSample
from clusterenv.wire.messages import Beat


class WorkerProgress:
    def __init__(self) -> None:
        self._shard_of: dict[int, int] = {}  # worker → shard
        self._num_phases = 0
        self._known: dict[int, tuple[int, int, int, int]] = {}  # worker → pid, slot, phase, step
        self.loads: dict[int, HostSample] = {}
        """Node → the load of its machine."""

    def expect(self, shard_of: Sequence[int], num_phases: int) -> None:
        """Set which shard each worker belongs to, and how many phases there are."""
        self._shard_of, self._num_phases = dict(enumerate(shard_of)), num_phases

    def heard(self, node: int, beat: Beat, holder: Callable[[int], int | None]) -> None:
        """Keep the progress of a node's own workers. Raises ProtocolError if it is impossible."""
        if len(beat.progress) > len(self._shard_of):
            raise ProtocolError(f"the progress of {len(beat.progress)} workers, of a run with {len(self._shard_of)}")
        if beat.host is not None:
            if not beat.host.is_plausible():
                raise ProtocolError("an impossible load of its machine")
            self.loads[node] = beat.host
        for worker, pid, slot, phase, step in beat.progress:
            if not 0 <= phase < self._num_phases:
                raise ProtocolError(f"a worker in the unknown phase {phase}")
            shard = self._shard_of.get(worker)
            if shard is not None and holder(shard) == node:  # the node may have just left the shard
                self._known[worker] = (pid, slot, phase, step)

    def of(self, worker: int) -> tuple[int, int, int, int] | None:
        """Return (pid, slot, phase, step of a fragment) of a worker, if they are known."""
        return self._known.get(worker)

    def forget(self, worker: int) -> None:
        """Forget a worker whose process has ended."""
        self._known.pop(worker, None)
