"""Limit the rate of messages that answer no request: beats, output, pulls. Pure: the clock is passed in.

The head drops a node that sends more; a node limits its workers' output to less.
"""

from __future__ import annotations

MESSAGE_BYTES = 1024
"""Added to the size of each message, for the time that reading it takes."""


class Flow:
    """A rate with a burst.

    Args:
        rate: bytes per second.
        burst: bytes that may come at once.
    """

    def __init__(self, rate: float = 4 << 20, burst: float = 16 << 20) -> None:
        self._rate, self._burst = rate, burst
        self._left = burst
        self._at = 0.0

    def spend(self, size: int, now: float, read_all_at: float = 0.0) -> bool:
        """Return whether a message of this size is within the rate.

        `read_all_at`: when nothing was left to read. What came since may have waited: a reader that was held up for
        long finds much at once.
        """
        if self._at < read_all_at <= now:
            self._left = min(self._left + self._rate * (read_all_at - self._at), self._burst)
            self._at = read_all_at
        self._left += self._rate * (now - self._at)
        self._at = now
        if self._left < size + MESSAGE_BYTES:
            return False
        self._left -= size + MESSAGE_BYTES
        return True
