"""Serve a run's `Source` over HTTP: `make_app(source, token)` returns the ASGI app.

Sources are read in the event loop: their calls copy what the run's monitor has, and every viewer needs the same. Give
the app a server of its own (`serve.py`), not one that has other work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import PurePath
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from clusterenv.monitor.encoding import to_json
from clusterenv.monitor.page.assets import HTML, read_assets
from clusterenv.monitor.page.data import Cursor, Updates
from clusterenv.monitor.page.guard import Guard
from clusterenv.monitor.prometheus import CONTENT_TYPE, render
from clusterenv.monitor.source import Source

__all__ = ["make_app"]

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_HEARTBEAT_S = 10.0
"""Proxies and tunnels close connections that are silent for long."""

T = TypeVar("T")


def make_app(
    source: Source,
    token: str,
    *,
    hosts: Iterable[str] = (),
    poll_s: float = 0.25,
    ending: asyncio.Event | None = None,
) -> ASGIApp:
    """Return the app.

    Args:
        source: the run.
        token: what every request has to bring; see `guard.py`.
        hosts: names beside those of loopback under which the page may be opened, without a port.
        poll_s: how often a stream looks for a new sample.
        ending: when it is set, streams end: a server that shuts down waits for them.
    """
    answers = _Answers(source, poll_s, asyncio.Event() if ending is None else ending)
    routes = [
        Route("/", answers.page),
        Route("/static/{name}", answers.static),
        Route("/api/state", answers.state),
        Route("/api/points", answers.points),
        Route("/api/events", answers.events),
        Route("/api/fragments", answers.fragments),
        Route("/metrics", answers.metrics),
        Route("/stream", answers.stream),
    ]
    return Guard(Starlette(routes=routes), token, hosts)


class _Answers:
    """The routes' functions."""

    def __init__(self, source: Source, poll_s: float, ending: asyncio.Event) -> None:
        self._source = source
        self._poll_s = poll_s
        self._ending = ending

    async def page(self, request: Request) -> Response:
        return _asset(HTML)

    async def static(self, request: Request) -> Response:
        return _asset(request.path_params["name"])

    async def state(self, request: Request) -> Response:
        return _json(_read(lambda: {"info": self._source.info(), "sample": self._source.sample()}))

    async def points(self, request: Request) -> Response:
        after_s = _after(request, float, 0.0)
        return _json(_read(lambda: self._source.points(after_s)))

    async def events(self, request: Request) -> Response:
        after = _after(request, int, -1)
        return _json(_read(lambda: self._source.events(after)))

    async def fragments(self, request: Request) -> Response:
        after_s = _after(request, float, 0.0)
        return _json(_read(lambda: self._source.fragments(after_s)))

    async def metrics(self, request: Request) -> Response:
        text = _read(lambda: render(self._source.info(), self._source.sample()))
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def stream(self, request: Request) -> Response:
        cursor = Cursor.parse(request.headers.get("last-event-id", ""))
        return StreamingResponse(self._messages(Updates(self._source, cursor)), media_type="text/event-stream")

    async def _messages(self, updates: Updates) -> AsyncIterator[bytes]:
        """Yield server-sent events: one for each new sample, until the run or the server ends."""
        loop = asyncio.get_running_loop()
        silent_since = loop.time()
        while not self._ending.is_set():
            try:
                update = _read(updates.read)
            except HTTPException as error:
                yield _message(to_json({"text": error.detail}), name="unreachable")
                return
            if update is not None:
                yield _message(to_json(update), identity=str(updates.cursor))
                if update.sample is not None and update.sample.is_over:
                    return
                silent_since = loop.time()
            elif loop.time() - silent_since > _HEARTBEAT_S:
                yield b": \n\n"
                silent_since = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._poll_s)


def _read(call: Callable[[], T]) -> T:
    """Return what a source's call returns; if the run cannot be read any more, the answer says so."""
    try:
        return call()
    except Exception as error:
        raise HTTPException(503, f"the run cannot be read: {type(error).__name__}: {error}") from error


def _message(data: bytes, *, identity: str = "", name: str = "") -> bytes:
    """Return a server-sent event. JSON has no line breaks outside of its strings' escapes, so one line is enough."""
    head = (f"event: {name}\n" if name else "") + (f"id: {identity}\n" if identity else "")
    return head.encode() + b"data: " + data + b"\n\n"


def _after(request: Request, kind: Callable[[str], T], default: T) -> T:
    text = request.query_params.get("after")
    if text is None:
        return default
    try:
        return kind(text)
    except ValueError:
        raise HTTPException(400, f"?after={text} is not a number") from None


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


def _asset(name: str) -> Response:
    text = read_assets().get(name)
    if text is None:
        raise HTTPException(404)
    return Response(text, media_type=_TYPES.get(PurePath(name).suffix, "text/plain"))
