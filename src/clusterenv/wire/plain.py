"""Plain data to bytes and back, for messages from machines that need not be trusted.

Nothing executable and no pickle: what is read is made of built-in values, numpy arrays, Gymnasium's own spaces, and
those named tuples and enums that the codec was told of.

A message is a version byte and one value; a value is a tag byte and its content, all little-endian. What reading takes
in memory is counted before it is taken, and bounded by the message's length. `pack` appends zeros where a message of
many small containers would take more: whoever wants memory here has to send as much.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal

from clusterenv.errors import NotPlainError, ProtocolError
from clusterenv.wire import format as wire
from clusterenv.wire.reading import Damaged, Reader, why
from clusterenv.wire.writing import WRITERS, Refused, Write, Writer, qualified, write_enum, write_struct
from clusterenv.wire.writing_spaces import SPACE_WRITERS

__all__ = ["Codec"]


class Codec:
    """Packs and unpacks messages.

    Args:
        structs: the NamedTuple classes that may travel, known by their class names.
        enums: the enums whose members may travel, likewise.
    """

    def __init__(self, structs: Sequence[type], enums: Sequence[type[enum.Enum]] = ()) -> None:
        self._words = wire.Words()
        self._words.writers.update({**WRITERS, **SPACE_WRITERS})
        for struct in structs:
            fields = getattr(struct, "_fields", None)
            if fields is None or not issubclass(struct, tuple):
                raise TypeError(f"{qualified(struct)} is no NamedTuple")
            self._learn(struct, self._words.structs, write_struct, wire.STRUCT)
            self._words.heads[struct] += bytes((len(fields),))
        for kind in enums:
            self._learn(kind, self._words.enums, write_enum, wire.ENUM)

    def _learn(self, kind: type, known: dict[bytes, Any], write: Write, tag: int) -> None:
        name = kind.__name__.encode()
        if name in known:
            raise ValueError(f"two classes are called {kind.__name__}")
        known[name] = kind
        self._words.writers[kind] = write
        self._words.heads[kind] = bytes((tag,)) + wire.short(name)

    def pack(self, value: Any, other: Literal["refuse", "repr"] = "refuse") -> bytes:
        """The value as bytes. What is not plain raises NotPlainError, or its repr travels in its place."""
        writer = Writer(self._words, other == "repr")
        try:
            writer.write(value, 0)
        except Refused as refused:
            path = "".join(reversed(refused.path)) or "the value"
            path = path if len(path) <= 300 else f"{path[:150]}...{path[-150:]}"
            raise NotPlainError(
                f"{path} is {refused.what} and cannot travel: "
                "return plain data: numbers, strings, arrays, None, lists, dicts"
            ) from None
        data = b"".join(writer.chunks)
        owed = writer.cost - wire.FREE - wire.PER_BYTE * len(data)
        return data + bytes(owed // wire.PER_BYTE + 1) if owed > 0 else data

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value; ProtocolError for bytes that `pack` did not make."""
        try:
            if not isinstance(data, bytes):
                view = memoryview(data)
                data = view.tobytes() if view.nbytes < wire.IN_PLACE else view.cast("B")
            if data[:1] != wire.VERSION:
                raise Damaged("it is of another version, or none of ours")
            reader = Reader(data, 1, self._words)
            value = reader.read(0)
            if bytes(data[reader.at :]).strip(b"\0"):
                raise Damaged("more follows its value")
            return value
        except Exception as error:  # numpy and Gymnasium refuse what they are given with whatever they like
            reason = why(error)
        # Not in the handler: as the cause of this one, the other would keep what was read so far.
        raise ProtocolError(
            f"a message from another machine cannot be read: {reason}. "
            "Are clusterenv, numpy and gymnasium of the same versions there as here?"
        )
