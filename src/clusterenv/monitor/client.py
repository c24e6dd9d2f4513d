"""Watch a run of another process: a live one over its socket, or what is kept of one that has ended."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import msgspec

from clusterenv.errors import UsageError
from clusterenv.monitor import records
from clusterenv.monitor.sample import EventRecord, FragmentRecord, Point, RunInfo, Sample

__all__ = ["Client", "Kept", "find", "open_run"]


class Client:
    """A live run, and what is kept of it once it has ended. Any thread may call it.

    Raises ConnectionError while the run does not answer; later calls connect again.
    """

    def __init__(self, record: records.Live, timeout_s: float = 15.0) -> None:
        self._record = record
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._file: Any = self._connect()
        self._kept: Kept | None = None

    def _connect(self) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:  # stays open until its file is closed
            connection.settimeout(self._timeout_s)
            connection.connect(self._record.address)
            file = connection.makefile("rwb")
        file.write(f"{self._record.key}\n".encode())
        return file

    def _ask(self, kind: Any, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._kept is None:
                line = self._exchange(msgspec.json.encode([name, *arguments]) + b"\n")
            if self._kept is not None:
                if not hasattr(self._kept, name):
                    raise UsageError(f"the run {self._record.info.name} has ended")
                return getattr(self._kept, name)(*arguments)
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise UsageError(answer["error"])
        return msgspec.convert(answer["ok"], kind, str_keys=True)

    def _exchange(self, request: bytes) -> bytes:
        """Return the answer to a request. If the run has ended, set `_kept` instead, or raise ConnectionError."""
        problem = "it closed the connection"
        try:
            if self._file is None:
                self._file = self._connect()
            self._file.write(request)
            self._file.flush()
            if line := self._file.readline():
                return bytes(line)
        except OSError as error:
            problem = str(error)
        self._drop()  # a file whose read has timed out refuses every later one
        kept = records.read_finished(self._record.info.name)
        if kept is None or kept.info != self._record.info:
            raise ConnectionError(f"the run {self._record.info.name} does not answer: {problem}")
        self._kept = Kept(kept)
        return b""

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the run is gone, and with it what was not sent
                file.close()

    def info(self) -> RunInfo:
        return self._record.info

    def sample(self) -> Sample | None:
        found: Sample | None = self._ask(Sample | None, "sample")
        return found

    def points(self, after_s: float = 0.0) -> list[Point]:
        found: list[Point] = self._ask(list[Point], "points", after_s)
        return found

    def events(self, after: int = -1) -> list[EventRecord]:
        found: list[EventRecord] = self._ask(list[EventRecord], "events", after)
        return found

    def fragments(self, after_s: float = 0.0) -> list[FragmentRecord]:
        found: list[FragmentRecord] = self._ask(list[FragmentRecord], "fragments", after_s)
        return found

    def log(self, node: int) -> str:
        found: str = self._ask(str, "log", node)
        return found

    def stack(self, slot: int) -> str:
        found: str = self._ask(str, "stack", slot)
        return found

    def close(self) -> None:
        self._drop()


class Kept:
    """A run that has ended."""

    def __init__(self, run: records.Finished) -> None:
        self._run = run

    def info(self) -> RunInfo:
        return self._run.info

    def sample(self) -> Sample | None:
        return self._run.sample

    def points(self, after_s: float = 0.0) -> list[Point]:
        return [point for point in self._run.points if point.time_s > after_s]

    def events(self, after: int = -1) -> list[EventRecord]:
        return [event for event in self._run.events if event.number > after]

    def fragments(self, after_s: float = 0.0) -> list[FragmentRecord]:
        return [fragment for fragment in self._run.fragments if fragment.arrived_at > after_s]

    def close(self) -> None:
        pass


def find(name: str | None) -> records.Live:
    """Return the live run of this name (or a beginning of it); None: the only one. Raises UsageError."""
    found = _choose(name)
    if found is None:
        raise _not_found(name)
    return found


def open_run(name: str | None) -> Client | Kept:
    """Return a live run, or what is kept of one that has ended: by name; None: the only live one, or the last."""
    found = _choose(name)
    if found is not None:
        with contextlib.suppress(OSError):  # it has ended just now
            return Client(found)
    ended = records.finished()
    wanted = found.info.name if found is not None else name or (ended[-1] if ended else "")
    kept = records.read_finished(wanted)
    if kept is None:
        if found is not None:
            raise UsageError(f"the run {wanted} does not answer")
        raise _not_found(name)
    return Kept(kept)


def _choose(name: str | None) -> records.Live | None:
    """Return the live run that is meant; None: there is none. Raises UsageError if it cannot be told, or reached."""
    records.prune()
    runs = records.live()
    if name is None:
        chosen = [run for run in runs if records.is_here(run)] or runs
    else:
        chosen = [run for run in runs if run.info.name == name]
        chosen = chosen or [run for run in runs if run.info.name.startswith(name)]
    if len(chosen) > 1:
        names = ", ".join(run.info.name for run in chosen)
        raise UsageError(f"which run? {names}" if name is None else f"more than one run is named {name!r}...: {names}")
    if not chosen:
        return None
    if not records.is_here(chosen[0]):
        raise UsageError(f"the run {chosen[0].info.name} is on {chosen[0].info.host}: log in there")
    return chosen[0]


def _not_found(name: str | None) -> UsageError:
    alive, ended = [run.info.name for run in records.live()], records.finished()[-5:]
    text = "no run of yours is alive on this machine" if name is None else f"no run is named {name!r}"
    others = f"; alive: {', '.join(alive)}" if alive else "; no run of yours is alive" if name is not None else ""
    return UsageError(text + others + (f"; ended: {', '.join(ended)}" if ended else ""))
