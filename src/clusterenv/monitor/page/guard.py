"""Refuse requests without the page's token, and those that another site's page makes in the user's browser.

The token comes as `?token=` (the URL that the user opens: it sets a cookie and redirects, so that the token does not
stay in the address bar and the history), as that cookie, or as `Authorization: Bearer`, for Prometheus.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware: checks the `Host` header, then the token, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._token = token
        self._hosts = {host.lower() for host in (*LOOPBACK, *hosts)}
        # Browsers send a cookie to every port of a host: the pages of two runs must not overwrite each other's.
        self._cookie = "clusterenv_" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await (self._answer(scope) or self._app)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """Return the answer to a request that does not reach the app; None if it may."""
        headers = Headers(scope=scope)
        # A foreign name that resolves to 127.0.0.1 (DNS rebinding) would make its page one of this origin.
        host = _without_port(headers.get("host", ""))
        if host not in self._hosts:
            return PlainTextResponse(
                f"This page is not served under the name {host!r}. Open it as http://127.0.0.1:PORT/, or add the name "
                "to `hosts`.\n",
                403,
            )
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given:
            return self._exchange(scope, query) if self._is_right(given[0]) else _REFUSED
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_right(bearer.strip()):
            return None
        return None if self._is_right(self._from_cookie(headers)) else _REFUSED

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def _from_cookie(self, headers: Headers) -> str:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return ""
        return cookies[self._cookie].value if self._cookie in cookies else ""

    def _exchange(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Answer `?token=` by the cookie and a redirect to the same URL without it.

        The redirect is relative, so that it also holds behind a proxy that adds a prefix. "Lax": with "strict", a link
        to the page in a notebook or a chat would not work.
        """
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        last = scope["path"].rpartition("/")[2]
        target = "./" + quote(last) + (f"?{rest}" if rest else "")
        response = Response(status_code=303, headers={"Location": target})
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
        return response


_REFUSED = PlainTextResponse(
    "This page needs its token: open the URL that the run printed, with ?token=..., or send it as "
    "'Authorization: Bearer TOKEN'.\n",
    403,
)


def _without_port(host: str) -> str:
    """Return the name in a `Host` header, in lower case: "[::1]:80" → "[::1]"."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
