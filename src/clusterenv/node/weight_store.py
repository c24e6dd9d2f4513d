"""Store the weights of a machine: pulled from the head once for all shards, and read by all workers.

Called by the node agent with the head's messages; messages to the head leave by `send`. Shards ask whether weights
have arrived.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from clusterenv.errors import PolicyError
from clusterenv.events import emit
from clusterenv.executors.worker_processes import write_weights
from clusterenv.policy.weights.packing import unpack
from clusterenv.wire.frames import CHUNK
from clusterenv.wire.messages import Chunk, Offer, Pull, Withdrawn

_MOST = 4 << 20  # bytes that may be in flight at once: other messages wait behind them

_LEAST = 1 << 16
"""The same on a slow link: a connection without a whole frame for some seconds counts as dead."""

_AHEAD_S = 0.5  # the bytes in flight are those that arrive in this time, on average

Send = Callable[[Any, Sequence[Any]], None]


class _Pulling:
    """A transfer under way: bytes requested, bytes received, and their checksum."""

    def __init__(self, offer: Offer, now: float) -> None:
        self.offer = offer
        self.began_at = now
        self.asked = self.got = self.checksum = 0
        self.ends: deque[int] = deque()  # of the ranges asked for, which are sent in pieces of CHUNK
        self.window = _LEAST
        self.whole = bytearray() if offer.is_packed or offer.keep else None


class WeightStore:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._begin()

    def _begin(self) -> None:
        self.descriptor = os.memfd_create("clusterenv-weights")  # the memory that workers read weights from
        self._pulling: _Pulling | None = None
        self._offers: deque[Offer] = deque()  # to be pulled next
        self._lying: dict[int, int] = {}  # place → number of the complete weights there
        self._base = (0, b"")  # number and bytes of the last weights to be kept

    def awaits(self, weights: int) -> bool:
        """Return whether these were offered and have not arrived yet."""
        pulling = self._pulling
        return (pulling is not None and pulling.offer.weights == weights) or any(
            offer.weights == weights for offer in self._offers
        )

    def has(self, weights: int) -> bool:
        return weights in self._lying.values()

    def take(self, message: Offer | Chunk | Withdrawn, frames: Sequence[Any], now: float) -> None:
        """Handle a message of the head about weights."""
        if isinstance(message, Chunk):
            self.chunk(message, frames[0], now)
        elif isinstance(message, Offer):
            self.offer(message, now)
        else:
            self.withdrawn(message.weights, now)

    def offer(self, offer: Offer, now: float) -> None:
        if self._pulling is not None and self._pulling.offer.weights == offer.weights:  # the same, in another form
            self._pulling = None
            self._offers.appendleft(offer)
        else:
            self._offers.append(offer)
        self._pull_next(now)

    def withdrawn(self, weights: int, now: float) -> None:
        """Stop pulling these weights, which the head does not have. Workers cannot load them."""
        self._offers = deque(offer for offer in self._offers if offer.weights != weights)
        if self._pulling is not None and self._pulling.offer.weights == weights:
            self._pulling = None
            self._pull_next(now)

    def chunk(self, chunk: Chunk, data: Any, now: float) -> None:
        pulling = self._pulling
        if pulling is None or (pulling.offer.weights, pulling.got) != (chunk.weights, chunk.at) or not pulling.ends:
            return
        if len(data) != min(CHUNK, pulling.ends[0] - chunk.at):
            # The rest would not follow: without this check, the node would wait for it for ever.
            self._pull_again(pulling.offer, now)
            return
        pulling.got += len(data)
        if pulling.got == pulling.ends[0]:
            pulling.ends.popleft()
        rate = pulling.got / max(now - pulling.began_at, 1e-6)
        pulling.window = int(min(_MOST, max(_LEAST, rate * _AHEAD_S)))
        self._ask(pulling)
        if not pulling.offer.is_packed:
            write_weights(self.descriptor, data, pulling.offer.place + chunk.at)
        if pulling.whole is not None:
            pulling.whole += data
        pulling.checksum = zlib.crc32(data, pulling.checksum)
        if pulling.got >= pulling.offer.size:
            self._arrived(pulling, now)

    def reset(self) -> None:
        """Forget everything: after a new session begins, the head offers all weights again."""
        self.close()
        self._begin()

    def close(self) -> None:
        os.close(self.descriptor)

    def _pull_next(self, now: float) -> None:
        if self._pulling is None and self._offers:
            self._pulling = _Pulling(self._offers.popleft(), now)
            self._lying.pop(self._pulling.offer.place, None)
            self._ask(self._pulling)

    def _ask(self, pulling: _Pulling) -> None:
        left, in_flight = pulling.offer.size - pulling.asked, pulling.asked - pulling.got
        if left and in_flight <= pulling.window // 2:
            size = min(left, pulling.window - in_flight)
            self._send(Pull(pulling.offer.weights, pulling.asked, size), ())
            pulling.asked += size
            pulling.ends.append(pulling.asked)

    def _arrived(self, pulling: _Pulling, now: float) -> None:
        offer = pulling.offer
        if pulling.checksum != offer.checksum:
            self._pull_again(offer, now)
            return
        if pulling.whole is not None and not self._keep(offer, bytes(pulling.whole)):
            self._send(Pull(offer.weights, 0, -1), ())
            return
        self._lying[offer.place] = offer.weights
        self._send(Pull(offer.weights, offer.size, 0), ())
        self._pulling = None
        self._pull_next(now)

    def _pull_again(self, offer: Offer, now: float) -> None:
        emit(logging.WARNING, "weights arrived damaged and are pulled again")
        self._pulling = _Pulling(offer, now)
        self._ask(self._pulling)

    def _keep(self, offer: Offer, data: bytes) -> bool:
        """Unpack weights, or keep them as the base of later deltas. Returns False if their own base is not here."""
        if offer.is_packed:
            number, base = self._base
            try:
                data = unpack(data, base if offer.base == number and number else None)
            except PolicyError as error:
                emit(logging.WARNING, f"{error}: requesting the whole weights")
                return False
            write_weights(self.descriptor, data, offer.place)
        if offer.keep:
            self._base = (offer.weights, data)
        return True
