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
    """A live run. Any thread may call it. Raises ConnectionError when the run is gone."""

    def __init__(self, record: records.Live, timeout_s: float = 15.0) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(record.address)
        except OSError:
            self._socket.close()
            raise
        self._file = self._socket.makefile("rwb")
        self._file.write(f"{record.key}\n".encode())

    def _ask(self, kind: Any, *request: Any) -> Any:
        with self._lock:
            try:
                self._file.write(msgspec.json.encode(request) + b"\n")
                self._file.flush()
                line = self._file.readline()
            except (OSError, ValueError) as error:
                raise ConnectionError(f"the run {self._record.info.name} does not answer: {error}") from error
        if not line:
            raise ConnectionError(f"the run {self._record.info.name} has ended")
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise UsageError(answer["error"])
        return msgspec.convert(answer["ok"], kind, str_keys=True)

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
        with contextlib.suppress(OSError):  # the run is gone, and with it what was not sent
            self._file.close()
        self._socket.close()


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
    records.prune()
    runs = records.live()
    names = [run.info.name for run in runs]
    if name is None:
        if len(runs) == 1:
            return runs[0]
        raise UsageError(f"which run? {', '.join(names)}" if runs else "no run of yours is alive on this machine")
    chosen = [run for run in runs if run.info.name == name] or [run for run in runs if run.info.name.startswith(name)]
    if len(chosen) != 1:
        alive = f"; alive: {', '.join(names)}" if names else "; no run of yours is alive"
        raise UsageError(f"{'no' if not chosen else 'more than one'} run is named {name!r}{alive}")
    if chosen[0].info.host != socket.gethostname():
        raise UsageError(f"the run {chosen[0].info.name} is on {chosen[0].info.host}: log in there")
    return chosen[0]


def open_run(name: str | None) -> Client | Kept:
    """Return a live run, or what is kept of one that has ended: by name; None: the only live one, or the last."""
    try:
        return Client(find(name))
    except (UsageError, OSError) as error:
        ended = records.finished()
        kept = records.read_finished(name or (ended[-1] if ended else ""))
        if kept is None:
            if isinstance(error, UsageError) and ended:
                raise UsageError(f"{error}; ended: {', '.join(ended[-5:])}") from None
            raise UsageError(str(error)) from None
        return Kept(kept)
