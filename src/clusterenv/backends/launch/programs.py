"""Run a scheduler's command-line program with a deadline, in its own session, and never leave it running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from clusterenv.errors import StartError

_LOOK_S = 0.1  # how often `closing` is checked


class NoAnswer(StartError):
    """The program was killed before it ended: it may or may not have had its effect."""


def ask(
    command: Sequence[str],
    stdin: str = "",
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float,
    closing: threading.Event | None = None,
    patience_s: float = 0.0,
) -> str:
    """Return what the program prints. Raises `StartError` if it fails, `NoAnswer` if it takes too long.

    Once `closing` is set it gets at most `patience_s`. A program that takes too long is killed with its children: on
    some sites, these programs are scripts.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,  # Ctrl-C in the terminal reaches the head alone
        )
    except OSError as error:
        raise StartError(f"{command[0]} cannot be run: {error}") from None
    began = time.monotonic()
    deadline, is_closing = began + timeout_s, False
    given: str | None = stdin
    with process:
        try:
            while True:
                if closing is not None and closing.is_set() and not is_closing:
                    deadline, is_closing = min(deadline, time.monotonic() + patience_s), True
                try:
                    wait_s = max(0.0, deadline - time.monotonic())
                    out, err = process.communicate(given, timeout=min(_LOOK_S, wait_s) if closing else wait_s)
                    break
                except subprocess.TimeoutExpired:
                    given = None  # the first call has sent it
                    if time.monotonic() >= deadline:
                        seconds = time.monotonic() - began
                        raise NoAnswer(f"{command[0]} did not answer within {seconds:.1f} s") from None
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            raise
    if process.returncode != 0:
        raise StartError(f"{command[0]} says: {err.strip() or out.strip()}")
    return out
