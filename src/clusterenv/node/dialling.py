"""Find the head by a plain TCP connection, whose errors are immediate: ZeroMQ would try for ever."""

from __future__ import annotations

import platform
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

_DIAL_S = 3.0


class Unreachable(NamedTuple):
    """Why no connection to the head can be made."""

    text: str
    is_refusal: bool  # the head's machine answers, but nothing listens there


def resolve(address: str) -> str | Unreachable:
    """Return the address that answers: for a name with several addresses, ZeroMQ might choose another."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_DIAL_S) as found:
            host, port = found.getpeername()[:2]
    except OSError as error:
        text = (
            f"{address} cannot be reached from {platform.node()}: {error.strerror or error}. Either the run is "
            "over, or the head is behind a firewall or NAT: have it listen where nodes can dial it "
            "(bind=, port=), or name the address that is forwarded to it (advertise=)"
        )
        return Unreachable(text, isinstance(error, ConnectionRefusedError))
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
