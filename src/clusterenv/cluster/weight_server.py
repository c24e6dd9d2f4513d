"""Weights that seats may pull, and what they are given of them. Pure: what is to be sent leaves as messages."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from clusterenv.events import emit
from clusterenv.wire.frames import CHUNK
from clusterenv.wire.messages import Chunk, Offer, Pull, Withdrawn

__all__ = ["Offers", "Weights"]


class Weights(NamedTuple):
    """What a seat may pull."""

    offer: Offer
    data: bytes
    whole: bytes
    """The same, if that is packed."""


class Offers:
    def __init__(self, seats: int) -> None:
        self._weights: dict[tuple[int, int], Weights] = {}  # (seat, number)
        self._offered_at = [0.0] * seats
        self.pull_s: list[float | None] = [None] * seats
        """How long each seat's last pull took."""

    def put(self, weights: Weights, keep: set[int], now: float) -> None:
        """These may be pulled by their seat from now on, and those with the numbers `keep`; no others."""
        seat, number = weights.offer.seat, weights.offer.offer
        self._weights = {key: kept for key, kept in self._weights.items() if key[0] != seat or key[1] in keep}
        self._weights[seat, number] = weights
        self._offered_at[seat] = now

    def forget(self, seat: int) -> None:
        """Somebody else has it now."""
        self._weights = {key: kept for key, kept in self._weights.items() if key[0] != seat}

    def answer(self, pull: Pull, now: float) -> Iterator[tuple[Any, list[Any]]] | None:
        """Messages with their frames; None where it asks for bytes that there are not."""
        weights = self._weights.get((pull.seat, pull.offer))
        if weights is None:  # silence would leave the seat waiting for ever, and all that waits behind these weights
            return iter([(Withdrawn(pull.seat, pull.offer), [])])
        if pull.size < 0:
            return iter([(self._whole(weights), [])])
        if not 0 <= pull.at <= pull.at + pull.size <= len(weights.data):
            return None
        if not pull.size:
            self.pull_s[pull.seat] = now - self._offered_at[pull.seat]
        end = pull.at + pull.size
        return (
            (Chunk(pull.seat, pull.offer, at), [memoryview(weights.data)[at : min(at + CHUNK, end)]])
            for at in range(pull.at, end, CHUNK)
        )

    def _whole(self, weights: Weights) -> Offer:
        """The seat could not unpack them."""
        whole = weights.whole
        plain = {"size": len(whole), "checksum": zlib.crc32(whole), "is_packed": False, "base": 0}
        offer = msgspec.structs.replace(weights.offer, **plain)
        emit(logging.WARNING, f"seat {offer.seat} could not unpack its weights: it gets them whole")
        self._weights[offer.seat, offer.offer] = Weights(offer, whole, whole)
        return offer
