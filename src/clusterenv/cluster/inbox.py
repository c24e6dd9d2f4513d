"""Messages of nodes that the caller has not read yet, limited to the size of the open requests' answers. Pure.

Filled by whichever thread listens, read by the caller's; the executor sets how large the answers may be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from clusterenv.cluster.flow import MESSAGE_BYTES
from clusterenv.errors import ProtocolError
from clusterenv.wire.frames import CONTROL_LIMIT
from clusterenv.wire.messages import SteppedAll


class Inbox:
    def __init__(self, shards: int) -> None:
        self._messages: deque[tuple[int, Any, list[Any]]] = deque()
        self.open_bytes = [0] * shards  # per shard: how many bytes the answers to its open requests may have
        self._late_bytes: dict[int, int] = {}
        # Two counters per shard instead of one: each is written by one thread only.
        self._put_bytes = [0] * shards
        self._read_bytes = [0] * shards

    def __len__(self) -> int:
        return len(self._messages)

    def limit(self, node: int, shards: Iterable[int]) -> int:
        """Return how large a message of a node with these shards may be: as large as all its answers together."""
        return CONTROL_LIMIT + self._late_bytes.get(node, 0) + sum(self.open_bytes[shard] for shard in shards)

    def put(self, message: Any, frames: list[Any]) -> None:
        """Keep a message for the caller. Raises ProtocolError if more waits than was requested."""
        shard, size = message.shard, size_of(message, frames)
        waiting = self._put_bytes[shard] - self._read_bytes[shard] + size
        if waiting > CONTROL_LIMIT:
            most = self.open_bytes[shard] + 2 * CONTROL_LIMIT
            if waiting > most:
                raise ProtocolError(f"{waiting} bytes that are not read yet, where at most {most} were requested")
        self._put_bytes[shard] += size
        self._messages.append((shard, message, frames))

    def next(self) -> tuple[int, Any, list[Any]] | None:
        """Return the oldest message: (shard, message, frames)."""
        if not self._messages:
            return None
        shard, message, frames = self._messages.popleft()
        self._read_bytes[shard] += size_of(message, frames)
        return shard, message, frames

    def left(self, node: int, shard: int) -> None:
        """Allow for answers that are under way from a shard that this node has to leave."""
        self._late_bytes[node] = max(self._late_bytes.get(node, 0), self.open_bytes[shard])

    def joined(self, node: int) -> None:
        """Begin a new session of this node: no answer of an old one is under way."""
        self._late_bytes.pop(node, None)


def size_of(message: Any, frames: Sequence[Any]) -> int:
    """Return approximately how many bytes of memory a message takes."""
    size = MESSAGE_BYTES + sum(map(len, frames))
    if not isinstance(message, SteppedAll):
        for name in ("text", "reason", "tail", "slots", "packed", "progress"):
            size += len(getattr(message, name, ()))
    return size
