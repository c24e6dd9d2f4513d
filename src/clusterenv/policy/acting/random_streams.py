"""Random streams per slot: a slot's samples do not depend on which worker runs it or on that worker's other slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from clusterenv.policy.acting.distributions import Noise

__all__ = ["Streams"]

_POLICY = 0x706F6C696379  # keeps these streams apart from those that seed environments
_DRIFT = _POLICY + 1


class Streams:
    """Generators per slot, seeded again for each incarnation."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[tuple[int, int], tuple[int, np.random.Generator]] = {}

    def draw(self, slots: list[int], incarnations: list[int], steps: int, kind: Noise, size: int) -> Any:
        """Return noise [steps, len(slots), size], float32: the next numbers of each slot's stream."""
        block = np.empty((steps, len(slots), size), dtype=np.float32)
        for k, (slot, incarnation) in enumerate(zip(slots, incarnations, strict=True)):
            generator = self._generator(_POLICY, slot, incarnation)
            if kind == "normal":
                block[:, k] = generator.standard_normal((steps, size), dtype=np.float32)
            elif kind == "uniform":
                block[:, k] = generator.random((steps, size), dtype=np.float32)
            else:
                block[:, k] = generator.standard_exponential((steps, size), dtype=np.float32)
        if kind == "gumbel":
            np.maximum(block, np.finfo(np.float32).tiny, out=block)
            np.log(block, out=block)
            np.negative(block, out=block)
        return block

    def pick(self, slots: list[int], incarnations: list[int], steps: int, share: int) -> list[tuple[int, int]]:
        """Return (t, column) of states to sample for drift, by t: one in `share` of each slot's, at least one."""
        picked = []
        for k, (slot, incarnation) in enumerate(zip(slots, incarnations, strict=True)):
            times = self._generator(_DRIFT, slot, incarnation).choice(steps, size=max(1, steps // share), replace=False)
            picked += [(int(t), k) for t in times]
        return sorted(picked)

    def _generator(self, domain: int, slot: int, incarnation: int) -> np.random.Generator:
        known = self._generators.get((domain, slot))
        if known is None or known[0] != incarnation:
            sequence = np.random.SeedSequence((domain, self._seed, slot, incarnation))
            known = self._generators[domain, slot] = (incarnation, np.random.Generator(np.random.PCG64(sequence)))
        return known[1]
