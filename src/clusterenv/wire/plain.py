"""Convert plain data to bytes and back, for messages from machines that need not be trusted.

Nothing is executed or unpickled: messages hold built-in values, numpy arrays, Gymnasium's own spaces, and the named
tuples and enums that the codec knows. `format.py` describes the bytes. The memory that reading takes is counted before
it is allocated, and bounded by the message's length: `pack` pads a message of many small containers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal

from clusterenv.errors import NotPlainError, ProtocolError
from clusterenv.wire import format as wire
from clusterenv.wire.reading import Reader, why
from clusterenv.wire.writing import WRITERS, Refused, Writer, qualified, write_enum, write_struct

__all__ = ["PlainCodec"]


class PlainCodec:
    """Pack and unpack messages.

    Args:
        structs: the NamedTuple classes that may be sent, known by their class names.
        enums: the enums whose members may be sent, likewise.
    """

    def __init__(self, structs: Sequence[type], enums: Sequence[type[enum.Enum]] = ()) -> None:
        self._classes: dict[str, Any] = {}
        self._writers = {**WRITERS, **dict.fromkeys(structs, write_struct), **dict.fromkeys(enums, write_enum)}
        for kind in (*structs, *enums):
            if kind in structs and not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
                raise TypeError(f"{qualified(kind)} is no NamedTuple")
            if kind.__name__ in self._classes:
                raise ValueError(f"two classes are called {kind.__name__}")
            self._classes[kind.__name__] = kind

    def pack(self, value: Any, other: Literal["refuse", "repr"] = "refuse") -> bytes:
        """Return the value as bytes. What is not plain raises NotPlainError, or is replaced by its repr."""
        try:
            try:
                return self._pack(value, other == "repr")
            except (OverflowError, UnicodeEncodeError):  # an int past 64 bits, or half of a surrogate pair
                return self._pack(value, other == "repr", is_careful=True)
        except Refused as refused:
            path = "".join(reversed(refused.path)) or "the value"
            path = path if len(path) <= 300 else f"{path[:150]}...{path[-150:]}"
            raise NotPlainError(
                f"{path} is {refused.what} and cannot travel: "
                "return plain data: numbers, strings, arrays, None, lists, dicts"
            ) from None

    def _pack(self, value: Any, by_repr: bool, is_careful: bool = False) -> bytes:
        writer = Writer(self._writers, self._classes, by_repr, is_careful)
        node = writer.node(value, 0)
        return wire.join(node, writer.buffers, writer.cost)

    def unpack(self, data: bytes | memoryview) -> Any:
        """Return the value; raise ProtocolError for bytes that `pack` did not make."""
        try:
            return Reader(data, self._classes).read()
        except Exception as error:  # numpy and Gymnasium raise various exceptions
            reason = why(error)
        # Raised outside the handler: as its context, the other error would keep what was read so far alive.
        raise ProtocolError(
            f"a message from another machine cannot be read: {reason}. "
            "Do both machines have the same versions of clusterenv, numpy and gymnasium?"
        )
