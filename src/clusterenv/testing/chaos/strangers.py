"""Strangers: connections to the head from processes that have no valid key.

Run as a script: `python -m clusterenv.testing.chaos.strangers garbage|knock tcp://HOST:PORT AMOUNT SEED [HEAD_KEY]`.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import zmq

from clusterenv.backends.contract import Plan
from clusterenv.testing.chaos.faults import Fault, Kind
from clusterenv.testing.chaos.injector import Act, Later
from clusterenv.transport.keys import read_joining

__all__ = ["send_garbage", "knock", "stranger_acts"]

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
"""The 64 bytes that begin a ZeroMQ connection."""

_LASTS_S = 5.0


def send_garbage(address: str, amount: int, seed: int) -> None:
    """Open connections and send random bytes, some after a (partial) greeting or the header of a huge frame."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    draw = random.Random(seed)
    for i in range(8):
        begins = (b"", _GREETING, _GREETING + b"\x06" + b"\xff" * 8, _GREETING[: draw.randrange(64)])[i % 4]
        with socket.create_connection((host, int(port)), timeout=_LASTS_S) as connection:
            try:
                connection.sendall(begins + draw.randbytes(amount // 8))
                connection.settimeout(0.2)
                connection.recv(1)
            except OSError:
                continue  # the head has closed it


def knock(address: str, count: int, head_key: str) -> None:
    """Try to join with unknown keys."""
    with zmq.Context() as context:
        for _ in range(count):
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                stranger.curve_serverkey = head_key.encode()
                stranger.connect(address)
                stranger.send(b"hello")
                stranger.poll(20)


def stranger_acts(plan: Plan, popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> dict[Kind, Act]:
    """Return functions for the kinds of `NETWORK`: each starts a process, by `popen`, that dials the run's head."""
    head_key = read_joining(plan.files[0]).head_key

    def start(what: str, fault: Fault) -> Later:
        words = [what, plan.address, str(int(fault.amount)), str(fault.random), head_key]
        process = popen([sys.executable, __file__, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def end() -> None:
            process.kill()
            if process.wait() not in (0, -signal.SIGKILL):
                raise RuntimeError(f"the stranger failed: {' '.join(words)}")

        return _LASTS_S, end

    return {
        Kind.GARBAGE: lambda fault: start("garbage", fault),
        Kind.STRANGER: lambda fault: start("knock", fault),
    }


def main(what: str, address: str, amount: str, seed: str, head_key: str) -> None:
    if what == "garbage":
        send_garbage(address, int(amount), int(seed))
    else:
        knock(address, int(amount), head_key)


if __name__ == "__main__":
    main(*sys.argv[1:])
