"""A node agent that sends its messages in another order, as no TCP connection would; takes the options of
`clusterenv node`.

While the file named by CLUSTERENV_REORDER exists, up to three messages are kept back and sent in a random order. Beats
follow each other, so nothing is kept back for long. The file's size counts how often the order was changed.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterenv.cli import main
from clusterenv.transport.sockets import NodeSocket

_switch = Path(os.environ.get("CLUSTERENV_REORDER", "/nonexistent"))
_random = random.Random(1)
_send = NodeSocket.send


def _reorder(self: NodeSocket, frames: Sequence[Any]) -> None:
    kept: list[Sequence[Any]] = self.__dict__.setdefault("kept", [])
    # Copied: some are views of memory that the next step overwrites.
    kept.append([bytes(frame) for frame in frames])
    is_first = not self.__dict__.setdefault("has_sent", False)  # Hello, which nothing follows
    if _switch.exists() and not is_first and len(kept) < _random.choice((1, 2, 2, 3)):
        return
    self.__dict__["has_sent"] = True
    order = list(range(len(kept)))
    if _switch.exists():
        _random.shuffle(order)
    if order != sorted(order):
        with _switch.open("ab") as file:
            file.write(b"x")
    messages = [kept[i] for i in order]
    kept.clear()
    for message in messages:
        _send(self, message)


if __name__ == "__main__":
    NodeSocket.send = _reorder  # type: ignore[method-assign]
    sys.exit(main(["node", *sys.argv[1:]]))
