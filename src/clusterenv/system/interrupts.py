"""Defer Ctrl-C while state is being changed.

Within a call that is marked `uninterrupted`, a Ctrl-C is deferred to the next `checkpoint` (where a call waits) or to
the end of the call. The user's own code in it is marked `interruptible`.

As in trio, the marks belong to code objects, and the signal handler looks for them on the stack: a mark adds no cost
to a step, and calls in other threads defer nothing. The handler replaces Python's own while environments are open.
Another handler (a notebook's, a launcher's) is replaced only during a call, and is called instead of raising
KeyboardInterrupt.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
import weakref
from _signal import getsignal  # type: ignore[import-not-found]  # `signal.getsignal` makes enums: 100 times slower
from collections.abc import Callable, Generator
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar, overload

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SIGINT = int(signal.SIGINT)

_PATIENCE_S = 5.0
"""A second Ctrl-C interrupts a call that has not reached a checkpoint this long after the first."""

_is_protected: dict[CodeType, bool] = {}


class _State:
    __slots__ = ("frame", "handler", "instead", "open", "pending", "since_s")

    def __init__(self) -> None:
        self.pending = False  # whether a Ctrl-C is deferred
        self.frame: FrameType | None = None  # where the deferred Ctrl-C arrived
        self.since_s = 0.0
        self.handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler
        self.instead: Callable[[], None] | None = None
        """Called instead of the handler of Ctrl-C; set by `strike`."""
        self.open: weakref.WeakSet[Any] = weakref.WeakSet()


STATE = _State()


def uninterrupted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Defer a Ctrl-C within this function to its next `checkpoint` or its end."""
    _is_protected[function.__code__] = True

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if getsignal(_SIGINT) is not _on_interrupt:
            return _with_handler(function, *args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            if STATE.pending and not _is_within_protected(sys._getframe(1)):
                checkpoint()

    return call


def interruptible(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let Ctrl-C interrupt this function, wherever it is called: it runs the user's code."""
    _is_protected[function.__code__] = False
    return function


def uninterrupted_generator(
    function: Callable[_P, Generator[_R, None, None]],
) -> Callable[_P, Generator[_R, None, None]]:
    """Defer a Ctrl-C within this generator, which calls `checkpoint` before each `yield` and at its end."""
    _is_protected[function.__code__] = True
    return function


@overload
def checkpoint() -> None: ...
@overload
def checkpoint(value: _R) -> _R: ...
@interruptible
def checkpoint(value: Any = None) -> Any:
    """Handle a deferred Ctrl-C; return `value`. Called where the state is consistent, and where a call waits."""
    if STATE.pending and _is_main_thread():
        _handle(STATE.frame)
    return value


def environments_opened(owner: Any) -> None:
    """Keep our handler installed for the environments of this owner, until `environments_closed`."""
    STATE.open.add(owner)


def environments_closed(owner: Any) -> None:
    """Forget the environments of this owner, from any thread; call `restore_handler` next. Idempotent."""
    STATE.open.discard(owner)


def restore_handler() -> None:
    """Restore Python's handler of Ctrl-C if all environments are closed. Only works in the main thread."""
    if not STATE.open and _is_main_thread() and getsignal(_SIGINT) is _on_interrupt:
        signal.signal(_SIGINT, signal.default_int_handler)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _is_within_protected(frame) or (STATE.pending and now - STATE.since_s > _PATIENCE_S):
        _handle(frame)
    elif not STATE.pending:
        STATE.pending, STATE.frame, STATE.since_s = True, frame, now


def strike(action: Callable[[], None], frame: FrameType | None) -> None:
    """Call `action`, which raises, when a Ctrl-C would be handled: now or deferred. Called by a signal handler."""
    STATE.instead = action
    _on_interrupt(_SIGINT, frame)


def _handle(frame: FrameType | None) -> None:
    STATE.pending, STATE.frame = False, None
    instead, STATE.instead = STATE.instead, None
    if instead is not None:
        instead()
    handler, STATE.handler = STATE.handler, signal.default_int_handler  # another's handler may call ours in turn
    try:
        handler(_SIGINT, frame)
    finally:
        STATE.handler = handler


def _is_within_protected(frame: FrameType | None) -> bool:
    while frame is not None:
        mark = _is_protected.get(frame.f_code)
        if mark is not None:
            return mark
        frame = frame.f_back
    return False


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _with_handler(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call an uninterrupted function while a handler other than ours is set."""
    handler = getsignal(_SIGINT)
    if not _is_main_thread() or not callable(handler):
        return function(*args, **kwargs)  # no KeyboardInterrupt is raised here
    is_default = handler is signal.default_int_handler
    STATE.handler = handler
    signal.signal(_SIGINT, _on_interrupt)
    try:
        return function(*args, **kwargs)
    finally:
        # Our handler may stay in place of Python's: outside of such calls it does the same.
        if getsignal(_SIGINT) is _on_interrupt and not (is_default and STATE.open):
            signal.signal(_SIGINT, handler)
        try:
            checkpoint()
        finally:
            STATE.handler = signal.default_int_handler


_is_protected[_with_handler.__code__] = True  # an exception before its last line would leave our handler installed
