"""Send a worker's answers to a head on another machine: as plain data, in parts, within the limits of the head.

Called by the worker's loop: `begin` with each request, `send` with its answers. What cannot be sent becomes a fault of
an environment, or is left out and named.
"""

from __future__ import annotations

import math
import mmap
import socket
from collections.abc import Callable, Iterator
from typing import Any, Literal

from clusterenv.errors import NotPlainError
from clusterenv.memory.fragments import Arena, ArenaLayout, FragmentArrays, Side
from clusterenv.memory.rows import Layout
from clusterenv.memory.transfer import fragment_sizes, row_bytes
from clusterenv.wire import infos as info_columns
from clusterenv.wire import requests
from clusterenv.wire.channel import (
    brings_of,
    encode_plain,
    plain,
    with_plain_ends,
    with_plain_infos,
    with_portable_spaces,
)
from clusterenv.wire.parts import BESIDE_BYTES, RECORD_BYTES, RESULT_BYTES, size_of, split
from clusterenv.wire.requests import Built, Fault, FragmentResult, PlayedEpisode, Reply
from clusterenv.worker.compressing import FragmentPacker

__all__ = ["NetworkAnswers"]

_LONGEST_TEXT = 100_000

_END_BYTES = BESIDE_BYTES // 4
"""Limit of the final infos of all episodes of an evaluation."""


class NetworkAnswers:
    """Encode and send the answers of one worker.

    Args:
        other: what to do with values that are not plain data.
        map_fragments: maps the memory of fragments.
    """

    def __init__(
        self,
        channel: socket.socket,
        other: Literal["refuse", "repr"],
        map_fragments: Callable[[], mmap.mmap],
        packer: FragmentPacker,
    ) -> None:
        self._channel = channel
        self._other: Literal["refuse", "repr"] = other
        self._map_fragments = map_fragments
        self._packer = packer
        self._sides: list[Side] = []
        self._request: Any = None
        self._rows: Layout | None = None
        self._fragments: ArenaLayout | None = None

    def begin(self, request: Any) -> None:
        """Begin a request: what is sent from now on answers it."""
        self._request = request
        if isinstance(request, requests.Attach):
            self._rows = request.layout
        elif isinstance(request, requests.MapArena):
            self._fragments = request.layout
            self._sides = Arena(request.layout, self._map_fragments()).sides

    def send(self, reply: Reply | Built) -> None:
        for data in self._encoded(reply):
            self._channel.sendall(data)

    def _encoded(self, reply: Reply | Built) -> Iterator[bytes]:
        brings = brings_of(self._request, reply)
        reply = _shortened(reply)
        if isinstance(reply, Reply):
            reply, packed = self._packed(self._within_limits(reply))
            for part in split(reply):
                try:
                    data = encode_plain(part, self._other, brings, packed)
                except NotPlainError as error:
                    yield encode_plain(self._without(reply, f"{error}"), self._other, brings, packed)
                    return
                size = len(data) - sum(map(len, packed.values()))
                if not isinstance(part.result, list) and size > self._limit(reply):
                    text = f"infos and objects take {size} bytes, and at most {self._limit(reply)} can be sent"
                    yield encode_plain(self._without(reply, text), self._other, brings, packed)
                    return
                yield data
            return
        try:
            yield encode_plain(with_portable_spaces(reply), self._other, brings)
        except NotPlainError as error:
            yield encode_plain(Reply(reply.request, [], faults=[_fault(-1, f"{error}")]), brings=brings)

    def _packed(self, reply: Reply) -> tuple[Reply, dict[int, bytes]]:
        """Pack the observations of a fragment where that is worth it."""
        if not isinstance(self._request, requests.RunFragment) or not reply.slots:
            return reply, {}
        side, done = self._sides[self._request.side], reply.result.num_steps
        columns = slice(reply.slots[0], reply.slots[-1] + 1)
        packed, result = self._packer.pack(FragmentArrays(side.specs, side.part(done, columns)), reply.result)
        return reply._replace(result=result), packed

    def _limit(self, reply: Reply) -> int:
        """Return how many bytes may be sent beside the rows of an answer."""
        if isinstance(self._request, requests.RunFragment) and self._fragments is not None:
            sizes = fragment_sizes(self._fragments, len(reply.slots), self._request.num_steps)
            return BESIDE_BYTES + 2 * sum(sizes)
        return BESIDE_BYTES + (0 if self._rows is None else 2 * row_bytes(self._rows) * len(reply.slots))

    def _within_limits(self, reply: Reply) -> Reply:
        """Replace results of a call that are too large by a fault; leave out infos of episodes that cannot be sent."""
        if isinstance(self._request, requests.Evaluate) and isinstance(reply.result, list):
            reply = reply._replace(result=with_plain_ends(reply.result, self._other, _END_BYTES))
        for item in reply.result if isinstance(reply.result, list) else ():
            most = RECORD_BYTES if isinstance(item, PlayedEpisode) else RESULT_BYTES
            size = size_of(item)
            if size > most - (1 << 20):
                what = (
                    f"the frames of episode {item.number} take" if isinstance(item, PlayedEpisode) else "a result takes"
                )
                phase = "evaluate" if isinstance(self._request, requests.Evaluate) else "call"
                fault = _fault(-1, f"{what} {size} bytes, and at most {most} can be sent", phase)
                return Reply(reply.request, [], faults=[fault])
        return reply

    def _without(self, reply: Reply, why: str) -> Reply:
        """Return the answer without what cannot be sent.

        The rows of a fragment are complete; the head must get them, or it would wait for ever. In any other answer it
        becomes a fault of the slots that it came from: those whose values are not plain data, or the largest ones.
        """
        if isinstance(reply.result, FragmentResult):
            result = with_plain_infos(reply.result)
            if not result.not_sent:  # the infos are plain, but too large
                episodes: list[Any] = [(*episode[:4], {}) for episode in result.episodes]
                result = result._replace(infos={}, episodes=episodes, not_sent=why[:900])
            return reply._replace(result=result)
        if not reply.slots:
            return Reply(reply.request, [], faults=[_fault(-1, why)])
        known = {fault.slot for fault in reply.faults}
        sizes = {slot: _size(reply, slot) for slot in reply.slots if slot not in known}
        failed: list[int] = []
        for slot in sorted(sizes, key=lambda slot: sizes[slot], reverse=True):
            if failed and sum(sizes.values()) <= self._limit(reply) // 2:
                break
            failed.append(slot)
            del sizes[slot]
        objects = [entry for entry in reply.objects or () if entry[0] in sizes]
        infos = info_columns.select(reply.infos, {slot: slot for slot in sizes}) if reply.infos else None
        faults = [*reply.faults, *(_fault(slot, why) for slot in sorted(failed))]
        return reply._replace(infos=infos, objects=objects or None, faults=faults)


def _size(reply: Reply, slot: int) -> float:
    """Return the size of a slot's infos and objects as plain data; infinite if they are not plain."""
    infos = info_columns.select(reply.infos, {slot: slot}) if reply.infos else {}
    try:
        return len(plain().pack([infos, [entry for entry in reply.objects or () if entry[0] == slot]]))
    except NotPlainError:
        return math.inf


def _fault(slot: int, text: str, phase: str = "step") -> Fault:
    return Fault(slot, phase, text, "", None, 0, 0)


def _shortened(reply: Any) -> Any:
    """Shorten the texts of faults to what the head accepts: an error may show whole arrays."""
    if all(len(fault.error) <= _LONGEST_TEXT and len(fault.traceback) <= _LONGEST_TEXT for fault in reply.faults):
        return reply
    faults = [
        fault._replace(error=_clipped(fault.error), traceback=_clipped(fault.traceback)) for fault in reply.faults
    ]
    return reply._replace(faults=faults)


def _clipped(text: str) -> str:
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[: half - 100]}\n[...]\n{text[-half + 100 :]}"
