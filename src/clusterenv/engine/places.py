"""Places for weights in shared memory. Pure: a place is not written again while a worker has yet to read it."""

from __future__ import annotations

__all__ = ["Shelf"]


class Shelf:
    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []  # offset, room
        self._readers: dict[int, tuple[int, int]] = {}  # request → worker, offset

    def place(self, size: int, keep: int | None) -> int:
        """An offset where `size` bytes may be written; `keep` is one that later readers are still sent to."""
        busy = {offset for _, offset in self._readers.values()} | {keep}
        for offset, room in self._places:
            if offset not in busy and room >= size:
                return offset
        end = sum(room for _, room in self._places)
        self._places.append((end, size))
        return end

    def reads(self, worker: int, request: int, offset: int) -> None:
        self._readers[request] = (worker, offset)

    def has_read(self, request: int) -> None:
        self._readers.pop(request, None)

    def forget(self, worker: int) -> None:
        """It died: it will not read."""
        self._readers = {request: entry for request, entry in self._readers.items() if entry[0] != worker}
