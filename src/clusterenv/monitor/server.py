"""Serve a run's data over a Unix socket that only its user can reach: one JSON line asks, one answers.

The first line of a connection is the run's key. Requests are lists, `["points", 12.5]`: a name of `SERVED` and its
arguments; answers are `{"ok": ...}` or `{"error": "..."}`.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import secrets
import shutil
import socket
import socketserver
import tempfile
from pathlib import Path
from typing import Any, Protocol

import msgspec

from clusterenv.events import emit
from clusterenv.monitor.encoding import to_json
from clusterenv.monitor.source import Source
from clusterenv.system.teardown import OwnThread

__all__ = ["Served", "Server"]

SERVED = ("info", "sample", "points", "events", "fragments", "log", "stack")
_LONGEST = 10_000  # bytes of a request
_LONGEST_FOLDER = 70  # characters: the path of a socket may have 107
_POLL_S = 0.2  # the longest that the end of the server takes


class Served(Source, Protocol):
    """A run that answers questions, beside showing its data."""

    def log(self, node: int) -> str:
        """Return the end of a node's log."""

    def stack(self, slot: int) -> str:
        """Return where the environment of this slot is right now."""


class Server:
    """Answer the clients of one run until it is closed."""

    def __init__(self, run: Served) -> None:
        self.key = secrets.token_hex(16)
        # Not in the home folder: it may be on a network, where sockets do not work, and its path may be too long.
        short = len(tempfile.gettempdir()) < _LONGEST_FOLDER
        self._folder = Path(tempfile.mkdtemp(prefix="clusterenv-run-", dir=None if short else "/tmp"))
        self.address = str(self._folder / "socket")
        try:
            self._server = _Listener(self.address, run, self.key)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = OwnThread(functools.partial(self._server.serve_forever, _POLL_S), "clusterenv-monitor-socket")
        self._thread.start()

    def close(self) -> None:
        """End all connections and the thread."""
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        self._thread.join(2.0)
        shutil.rmtree(self._folder, ignore_errors=True)


class _Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = True

    def __init__(self, address: str, run: Served, key: str) -> None:
        self.run, self.key = run, key
        self._connections: set[Any] = set()
        super().__init__(address, _Connection)
        Path(address).chmod(0o600)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        for request in list(self._connections):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no error of the run."""


class _Connection(socketserver.StreamRequestHandler):
    server: _Listener

    def handle(self) -> None:
        if not hmac.compare_digest(self.rfile.readline(_LONGEST).strip(), self.server.key.encode()):
            return
        while line := self.rfile.readline(_LONGEST):
            self.wfile.write(self._answer(line) + b"\n")

    def _answer(self, line: bytes) -> bytes:
        try:
            name, *arguments = msgspec.json.decode(line, type=list[Any])
            if name not in SERVED:
                raise ValueError(f"unknown request {name!r}")
            return to_json({"ok": getattr(self.server.run, name)(*arguments)})
        except Exception as error:  # whatever a client asks for, the run goes on
            emit(logging.DEBUG, f"a request to the monitor failed: {error!r}")
            return to_json({"error": f"{type(error).__name__}: {error}"})
