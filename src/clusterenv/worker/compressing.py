"""Choose how the observations of a worker's fragments are sent to a head on another machine, and pack them.

Enters: fragments, and the speed of the link that the node agent measured. Leaves: packed arrays, and for each leaf a
text that says how it is sent, or why as it is. What packing costs and saves is measured on the fragments themselves,
again from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from clusterenv.memory import stacks
from clusterenv.memory.compression import CODECS, Form, installed_codecs, pack, pack_finals
from clusterenv.memory.fragments import FragmentArrays
from clusterenv.memory.stacks import Stack
from clusterenv.wire.requests import FragmentResult

__all__ = ["Compress", "FragmentPacker", "Measured", "choose"]

Compress = Literal["auto", "always", "never"]

_GAIN = 0.8
"""Pack only if that takes at most this share of the time that sending takes otherwise."""

_CPU = 2.0
"""How much longer a second of packing counts than one of sending: environments need the CPU, and in a stream they step
while earlier fragments are sent."""

_LEAST_BYTES = 1 << 14
"""Smaller arrays are sent as they are."""

_MOST_BYTES = 1 << 31
"""Packed arrays of one answer, at most; larger ones stay in shared memory. The answer's length is sent as 32 bits."""

_SAMPLE_BYTES = 2 << 20
"""How much of a fragment is packed to measure a form."""

_AGAIN_S, _AGAIN_COST = 10.0, 200
"""When to measure again: after this time, or this many times as long as measuring took."""

_INCOMPRESSIBLE = "off: it does not compress"
_UNLIMITED = 1.0  # seconds for a byte, with which only the size matters


class Measured(NamedTuple):
    """What packing in one form costs and saves, for each byte of the array."""

    seconds: float
    share: float
    """Bytes that are sent."""


def choose(measured: Mapping[Form, Measured], byte_s: float) -> Form | None:
    """Return the form in which an array is sent soonest, if the link takes `byte_s` for a byte; None: as it is."""

    def cost(form: Form) -> float:
        return _CPU * measured[form].seconds + measured[form].share * byte_s

    best = min(measured, key=cost, default=None)
    return None if best is None or cost(best) > _GAIN * byte_s else best


class _Leaf:
    """What is known about one leaf of the observations."""

    def __init__(self) -> None:
        self.measured: dict[Form, Measured] = {}
        self.measure_at = float("-inf")

    def update(self, form: Form, now: Measured) -> None:
        before = self.measured.get(form, now)
        self.measured[form] = now._replace(seconds=(before.seconds + now.seconds) / 2)  # times vary, sizes do not


class FragmentPacker:
    """Pack the fragments of one worker.

    Args:
        codecs: the compressors that this machine and the head have.
        link_bytes_per_s: returns this worker's share of the link; 0.0: not measured yet.
        clock: returns seconds.
        cpu_clock: returns the seconds that this thread has run: others may take the CPU while it packs.
    """

    def __init__(
        self,
        mode: Compress,
        codecs: Sequence[str],
        link_bytes_per_s: Callable[[], float],
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
    ) -> None:
        self._mode = mode
        self._codec = next((name for name in CODECS if name in codecs), "")
        self._link_bytes_per_s = link_bytes_per_s
        self._clock, self._cpu_clock = clock, cpu_clock
        self._leaves: list[_Leaf] = []
        self._lacks = ""
        if self._codec != CODECS[0]:
            where = "at the head" if CODECS[0] in installed_codecs() else "on this node"
            self._lacks = f" ({CODECS[0]} is missing {where})"

    def pack(self, arrays: FragmentArrays, result: FragmentResult) -> tuple[dict[int, bytes], FragmentResult]:
        """Return the packed arrays of a fragment by their position, and its result with packed final observations.

        Args:
            arrays: the worker's columns, only those steps that are done.
        """
        packed: dict[int, bytes] = {}
        finals, forms = list(result.finals.leaves), []
        first = len(arrays.arrays) - len(arrays.obs)  # observations come last
        self._leaves = self._leaves or [_Leaf() for _ in arrays.obs]
        for i, (leaf, rows) in enumerate(zip(self._leaves, arrays.obs, strict=True)):
            assert arrays.specs[first + i].field == "obs"
            form, text = self._form_of(leaf, rows, arrays.starts)
            if form is not None:
                data = self._timed(leaf, form, rows)
                if len(data) >= rows.nbytes:
                    text = _INCOMPRESSIBLE
                elif sum(map(len, packed.values())) + len(data) > _MOST_BYTES:
                    text = "off: too large"
                else:
                    packed[first + i] = data
                    if finals[i].nbytes >= _LEAST_BYTES:
                        before = rows[result.finals.t, result.finals.columns]
                        finals[i] = min(pack_finals(finals[i], before, form), finals[i], key=_size)
            forms.append(text)
        return packed, result._replace(finals=result.finals._replace(leaves=finals), forms=forms)

    def _form_of(self, leaf: _Leaf, rows: Any, starts: Any) -> tuple[Form | None, str]:
        """Return how to pack these rows, and the text for it."""
        if self._mode == "never":
            return None, "off: compress=False"
        if rows.dtype.kind == "b":  # the head does not unpack them: it would have to check that each is 0 or 1
            return None, "off: bools"
        if rows.nbytes < _LEAST_BYTES:
            return None, "off: small"
        rate = self._link_bytes_per_s()
        if self._mode == "auto" and not rate:
            return None, "off: the link is not measured yet"
        byte_s = _UNLIMITED if self._mode == "always" else 1 / rate
        if self._clock() >= leaf.measure_at:
            self._measure(leaf, rows, starts)
        form = choose(leaf.measured, byte_s)
        if form is not None:
            return form, f"{form}{self._lacks}"
        is_small = any(measured.share <= _GAIN for measured in leaf.measured.values())
        return None, "off: the link is fast" if is_small else _INCOMPRESSIBLE

    def _measure(self, leaf: _Leaf, rows: Any, starts: Any) -> None:
        began = self._clock()
        stack: Stack | None = stacks.find(rows, starts)
        sample = rows[: max(2, _SAMPLE_BYTES // rows[0].nbytes)]
        leaf.measured.clear()
        for codec in dict.fromkeys(("", self._codec)):
            if stack is not None or codec:
                pack(rows[:1], Form(stack, codec))  # imports what it needs
                self._timed(leaf, Form(stack, codec), sample)
        now = self._clock()
        leaf.measure_at = now + max(_AGAIN_S, _AGAIN_COST * (now - began))

    def _timed(self, leaf: _Leaf, form: Form, rows: Any) -> bytes:
        began = self._cpu_clock()
        data = pack(rows, form)
        leaf.update(form, Measured((self._cpu_clock() - began) / rows.nbytes, len(data) / rows.nbytes))
        return data


def _size(values: Any) -> int:
    return len(values) if isinstance(values, bytes) else int(values.nbytes)
