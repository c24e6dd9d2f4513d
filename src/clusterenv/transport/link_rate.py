"""Measure how fast a link transfers large messages, from the kernel's counters of its TCP connection. Pure.

The kernel counts acknowledged bytes, and the time in which any were unacknowledged: pauses between messages do not
count. Only large messages are measured: over small ones, the time of a round trip would be taken for slowness.
"""

from __future__ import annotations

__all__ = ["LinkRate"]

_LARGE = 1 << 18
_ALMOST = 0.9  # share of a message that has to be acknowledged: its size on the wire is not known exactly
_HALF_LIFE = 16e6
"""After this many bytes, earlier measurements count half as much."""


class LinkRate:
    """The rate of one connection. Call `sending` before each message, and `read` from time to time after it."""

    def __init__(self) -> None:
        self._from: tuple[int, int] | None = None  # acknowledged bytes and busy time when the measurement began
        self._until = 0.0
        self._bytes = self._busy_us = 0.0

    @property
    def is_measuring(self) -> bool:
        return self._from is not None

    @property
    def bytes_per_s(self) -> float:
        """The rate of recent large messages; 0.0 if there was none."""
        return 1e6 * self._bytes / self._busy_us if self._busy_us else 0.0

    def sending(self, size: int, acked: int, busy_us: int) -> None:
        """Note a message of this size, with the counters as they are before it is sent.

        What is queued behind it does not prolong a measurement: on a link that is always full, none would end.
        """
        if self._from is None and size >= _LARGE:
            self._from, self._until = (acked, busy_us), acked + size * _ALMOST

    def read(self, acked: int, busy_us: int) -> bool:
        """Return whether the counters complete a measurement."""
        if self._from is None or acked < self._until:
            return False
        transferred, busy = acked - self._from[0], max(1, busy_us - self._from[1])
        kept = 0.5 ** (transferred / _HALF_LIFE)
        self._bytes, self._busy_us = kept * self._bytes + transferred, kept * self._busy_us + busy
        self._from = None
        return True
