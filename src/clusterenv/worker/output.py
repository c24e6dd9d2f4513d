"""Split what environments print into lines of bounded length, and mark each with the slot that was running.

A worker marks what goes through `sys.stdout` and `sys.stderr`; what is written to the descriptors directly (by C
libraries, by child processes) reaches the fork server without a mark.
"""

from __future__ import annotations

import io
import os
import re

__all__ = ["LineBuffer", "MarkedOutput", "read_mark"]

_LINE_BYTES = 8_000
"""An unfinished line is passed on in pieces of this size."""

_MARK = re.compile("^\x00(-?\\d+)\x00(.*)$", re.DOTALL)


class LineBuffer:
    """Turn bytes into whole lines. A carriage return overwrites what precedes it, as on a terminal: only the last state
    of a progress bar is kept."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, without line endings."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts, self._size = [], 0
            lines = [_last_state(line) for line in lines]
        start = _last_return(rest)
        if start or (rest and self._parts and self._parts[-1].endswith(b"\r")):
            self._parts, self._size = [], 0
        if rest := rest[start:]:
            self._parts.append(rest)
            self._size += len(rest)
        if self._size >= _LINE_BYTES:
            whole = b"".join(self._parts)
            end = len(whole) - len(whole) % _LINE_BYTES
            lines += [whole[at : at + _LINE_BYTES] for at in range(0, end, _LINE_BYTES)]
            self._parts, self._size = [whole[end:]], len(whole) - end
        return lines

    def flush(self) -> list[bytes]:
        """Return the unfinished line, if there is one."""
        rest = _last_state(b"".join(self._parts))
        self._parts, self._size = [], 0
        return [rest] if rest else []


def _last_return(data: bytes) -> int:
    """Return where the text after the last carriage return begins; one at the very end may be part of a line ending."""
    return data.rfind(b"\r", 0, max(0, len(data) - 1)) + 1


def _last_state(line: bytes) -> bytes:
    line = line.removesuffix(b"\r")
    return line[line.rfind(b"\r") + 1 :]


class MarkedOutput(io.TextIOBase):
    """Serve as a worker's sys.stdout or sys.stderr: mark each line with the slot that was running when it ended."""

    def __init__(self, fd: int, progress: memoryview) -> None:
        self._fd = fd
        self._at = progress
        self._lines = LineBuffer()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        self._write_lines(self._lines.feed(text.encode(errors="replace")))
        return len(text)

    def end_line(self) -> None:
        """Write the unfinished line, if there is one: nothing more follows."""
        self._write_lines(self._lines.flush())

    def _write_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            os.write(self._fd, b"\x00%d\x00%b\n" % (self._at[0], line))


def read_mark(line: str) -> tuple[int | None, str]:
    """Split a line into the slot that it is marked with, if any, and its text."""
    match = _MARK.match(line)
    if match is None:
        return None, line
    slot = int(match[1])
    return (slot if slot >= 0 else None), match[2]
