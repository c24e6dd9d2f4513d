"""How much of its workers' output a node passes on. Pure: the clock comes in."""

from __future__ import annotations

from clusterenv.cluster.flow import Flow
from clusterenv.wire.messages import Output

__all__ = ["OutputLimit"]

_LONGEST = 1 << 18


class OutputLimit:
    """A rate with a burst, a quarter of what a head listens to; what is left out is told with what comes next."""

    def __init__(self, rate: float = 1 << 20, burst: float = 4 << 20) -> None:
        self._flow = Flow(rate, burst)
        self._left_out = 0
        self._lines_left_out = 0

    def passes(self, output: Output, now: float) -> bool:
        """Return whether this may be sent; its text is shortened, and says how much was left out before."""
        size = len(output.text)
        if not self._flow.spend(min(size, _LONGEST), now, now):
            self._left_out += size
            self._lines_left_out += output.dropped + output.text.count("\n") + 1
            return False
        output.dropped += self._lines_left_out
        self._lines_left_out = 0
        if size > _LONGEST:
            output.text = output.text[:_LONGEST]
            self._left_out += size - _LONGEST
        if self._left_out:
            output.text += f"\n[{self._left_out} bytes of output were left out: they came too fast to be sent]"
            self._left_out = 0
        return True
