"""Mutate valid messages, byte by byte and frame by frame. Works with hypothesis' `st.randoms()`, too."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return these bytes with one to four changes; parts of `others` may be put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randint(0, len(changed))
        span = rng.randint(1, 12)
        kind = rng.randint(0, 7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randint(0, 7)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 127, 128, 255, rng.randint(0, 255)))
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + span]
        elif kind == 4:
            changed[at:at] = changed[at : at + span]
        elif kind == 5:
            changed[at:at] = bytes(rng.randint(0, 255) for _ in range(span))
        elif kind == 6:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, len(changed)))
            changed[at : at + 4] = struct.pack("<I", number)
        elif others:
            other = rng.choice(others)
            begin = rng.randint(0, len(other))
            changed[at : at + rng.randint(0, 12)] = other[begin : begin + rng.randint(0, 40)]
    return bytes(changed)


def mutate_frames(frames: Sequence[bytes], rng: random.Random, others: Sequence[bytes] = ()) -> list[bytes]:
    """Return the frames of a message with one of them mutated, left out, repeated or exchanged."""
    changed = [bytes(frame) for frame in frames]
    at = rng.randint(0, len(changed) - 1)
    kind = rng.randint(0, 7)
    if kind == 0:
        del changed[at]
    elif kind == 1:
        changed.insert(at, changed[at])
    elif kind == 2:
        other = rng.randint(0, len(changed) - 1)
        changed[at], changed[other] = changed[other], changed[at]
    else:
        changed[at] = mutate(changed[at], rng, others)
    return changed
