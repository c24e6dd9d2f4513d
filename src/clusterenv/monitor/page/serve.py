"""Serve a run's page from a thread of this process: `start(source)` returns its URL and how to end it."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterable
from urllib.parse import quote

from clusterenv.errors import StartError
from clusterenv.monitor.source import Source

try:
    import uvicorn

    from clusterenv.monitor.page.app import make_app
except ImportError as error:
    raise StartError('The page needs starlette and uvicorn: pip install "clusterenv[dashboard]"') from error

__all__ = ["Served", "start"]

_GRACE_S = 1
"""For requests in progress when the server ends."""

_JOIN_S = 5.0


class Served:
    """A page that is being served.

    Attributes:
        url: what to open, with the token.
        port: the port it listens on.
        token: what every request has to bring, for Prometheus as `Authorization: Bearer`.
    """

    def __init__(self, server: _Server, listener: socket.socket, host: str, token: str) -> None:
        self.port: int = listener.getsockname()[1]
        self.token = token
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.port}/?token={quote(token)}"
        self._server = server
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="clusterenv-page", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Served(port={self.port})"  # without the token: representations end up in logs

    def close(self) -> None:
        """Stop serving; return after at most some seconds, even if the source hangs. May be called again."""
        self._server.should_exit = True
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with self._listener:
            self._server.run(sockets=[self._listener])


class _Server(uvicorn.Server):
    """A server that ends streams before it waits for them."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)


def start(
    source: Source, port: int = 0, *, host: str = "127.0.0.1", hosts: Iterable[str] = (), token: str | None = None
) -> Served:
    """Serve the page of this run.

    Args:
        source: the run.
        port: 0: any that is free.
        host: the address to listen on. The page has no encryption: leave it on loopback, and use an SSH tunnel.
        hosts: names beside those of loopback under which the page may be opened, without a port.
        token: what requests have to bring; default: a new one.

    Raises:
        StartError: the port cannot be had.
    """
    token = secrets.token_urlsafe() if token is None else token
    ending = asyncio.Event()
    config = uvicorn.Config(
        make_app(source, token, hosts=hosts, ending=ending),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise StartError(
            f"The page cannot listen on {host}, port {port}: {error}. Another program has the port: choose another "
            "one, or 0 for any that is free."
        ) from error
    return Served(_Server(config, ending), listener, host, token)
