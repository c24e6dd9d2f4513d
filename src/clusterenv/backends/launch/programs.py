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

_LOOK_S = 0.1  # how often `closing`, and the end of the program, are checked
_PIPES_S = 1.0  # how long the output of a program is read after its end


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
    some sites, these programs are scripts. Those of a program that has ended are left alone, even if they keep its
    output open, as the connection that `ssh` shares (ControlPersist) does.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C in the terminal reaches the head alone
        )
    except OSError as error:
        raise StartError(f"{command[0]} cannot be run: {error}") from None
    began = time.monotonic()
    deadline, is_closing = began + timeout_s, False
    given: bytes | None = stdin.encode(errors="surrogateescape")
    has_ended = False
    with process:
        try:
            while True:
                if closing is not None and closing.is_set() and not is_closing and not has_ended:
                    deadline, is_closing = min(deadline, time.monotonic() + patience_s), True
                try:
                    out, err = process.communicate(given, timeout=min(_LOOK_S, max(0.0, deadline - time.monotonic())))
                    break
                except subprocess.TimeoutExpired as unfinished:
                    given = None  # the first call has sent it
                    if not has_ended and process.poll() is not None:
                        deadline, has_ended = time.monotonic() + _PIPES_S, True
                    elif time.monotonic() >= deadline and has_ended:
                        out, err = unfinished.output or b"", unfinished.stderr or b""
                        break
                    elif time.monotonic() >= deadline:
                        seconds = time.monotonic() - began
                        raise NoAnswer(f"{command[0]} did not answer within {seconds:.1f} s") from None
        except BaseException:
            if process.returncode is None:  # else its id may be another's by now
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            raise
    if process.returncode != 0:
        raise StartError(f"{command[0]} says: {_text(err).strip() or _text(out).strip()}")
    return _text(out)


def _text(output: bytes) -> str:
    """Return the output as text, whatever its encoding: ids are ASCII, and the rest is only shown."""
    return output.decode(errors="replace").replace("\r\n", "\n")
