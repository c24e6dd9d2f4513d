"""Queue the output of nodes' workers until it is shown: bounded, and dropped lines are counted.

Filled by the head's listening thread while the learner computes, maybe for hours; `RemoteExecutor` shows it.
"""

from __future__ import annotations

from collections import deque

from clusterenv.wire.messages import Output

_BYTES = 4 << 20
_MESSAGES = 10_000


class OutputQueue:
    """The output of one node's workers."""

    def __init__(self) -> None:
        self.messages: deque[Output] = deque()
        self._bytes = 0

    def put(self, message: Output) -> None:
        """Keep these lines, or only their number if too many wait already."""
        if self._bytes + len(message.text) <= _BYTES and len(self.messages) < _MESSAGES:
            self.messages.append(message)
            self._bytes += len(message.text)
            return
        dropped = max(0, message.dropped) + message.num_lines
        last = self.messages[-1]
        if (last.worker == message.worker and not last.text) or len(self.messages) >= 2 * _MESSAGES:
            last.dropped += dropped
        else:
            self.messages.append(Output(message.shard, message.worker, "", dropped))
