"""An episode that ends where a fragment does, because its slot goes on elsewhere. Pure but for the memory it marks."""

from __future__ import annotations

import numpy as np

from clusterenv.memory.fragments import Side
from clusterenv.wire.requests import Finals, FragmentResult

__all__ = ["cut"]


def cut(side: Side, first: int, count: int, result: FragmentResult) -> FragmentResult:
    """Truncate the episodes that run on after this fragment; what they are bootstrapped from is its last observation.

    `first`, `count`: the columns of `side` that the fragment has.
    """
    t, columns = result.num_steps - 1, slice(first, first + count)
    if t < 0:
        return result
    ended = side.terminations[t, columns] | side.truncations[t, columns]
    open_ones = np.flatnonzero(side.valid[t, columns] & ~ended)
    side.truncations[t, first + open_ones] = True
    when, who, known = result.finals
    last = [leaf[t + 1, first + open_ones] for leaf in side.obs]
    finals = Finals(
        np.append(when, np.full(len(open_ones), t)),
        np.append(who, open_ones),
        [np.concatenate(pair) for pair in zip(known, last, strict=True)],
    )
    return result._replace(finals=finals)
