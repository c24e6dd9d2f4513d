"""Hold weights that nodes may pull, and answer their pulls. Pure: messages to be sent are returned.

Filled by the caller's thread, read by whichever thread listens: the table is replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clusterenv.errors import ProtocolError
from clusterenv.wire.frames import CHUNK
from clusterenv.wire.messages import Chunk, Pull, Withdrawn

_ATTEMPTS = 3
"""How often a node may begin to pull the same weights: what it requests and does not read is queued in the head."""


@dataclass
class _Entry:
    session: int  # of the node that may pull them
    data: bytes
    is_packed: bool
    given: int = 0  # bytes in this attempt; the next range begins here
    attempts: int = 1


class WeightServer:
    def __init__(self) -> None:
        self._table: dict[int, _Entry] = {}  # by the weights' number in the ledger

    def put(self, number: int, session: int, data: bytes, is_packed: bool) -> None:
        """Allow these weights to be pulled in this session, from their beginning."""
        self._table = {**self._table, number: _Entry(session, data, is_packed)}

    def keep(self, sessions: set[int]) -> None:
        """Drop the weights of other sessions, which are over."""
        if any(entry.session not in sessions for entry in self._table.values()):
            self._table = {number: entry for number, entry in self._table.items() if entry.session in sessions}

    def is_repeated(self, pull: Pull, session: int) -> bool:
        """Return whether this begins to pull weights again: those that arrived did not match their checksum."""
        entry = self._table.get(pull.weights)
        return entry is not None and entry.session == session and pull.size > 0 and pull.at == 0 < entry.given

    def answer(self, pull: Pull, session: int) -> Iterator[tuple[Any, list[Any]]]:
        """Return messages with their frames; weights that are not in the table are withdrawn.

        Each range is sent once, in order; a node whose weights arrived damaged begins again, three times at most.
        """
        entry = self._table.get(pull.weights)
        if entry is None or entry.session != session:
            # Without an answer, the node would wait for ever.
            return iter([(Withdrawn(pull.weights), [])])
        size = len(entry.data)
        if pull.size <= 0:
            if entry.given != size or (pull.size < 0 and not entry.is_packed):
                raise ProtocolError("the end of weights that were not pulled")
            self._table = {number: kept for number, kept in self._table.items() if number != pull.weights}
            return iter(())
        if self.is_repeated(pull, session):
            entry.given = 0
            entry.attempts += 1
        if entry.attempts > _ATTEMPTS:
            raise ProtocolError(f"weights that arrived with a wrong checksum {_ATTEMPTS} times")
        if pull.at != entry.given or pull.at + pull.size > size:
            raise ProtocolError(f"{pull.size} bytes of weights from {pull.at} on, after {entry.given} were sent")
        begin, entry.given = pull.at, pull.at + pull.size
        end, view = entry.given, memoryview(entry.data)
        return ((Chunk(pull.weights, at), [view[at : min(at + CHUNK, end)]]) for at in range(begin, end, CHUNK))
