"""Notice that tensors have changed: `TorchPolicy.token` must differ whenever the weights do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Changes"]


class Changes:
    """Count how often a list of tensors was found changed.

    torch numbers in-place changes of a tensor, but not all of them: fused optimizers, writes through `.data`, CUDA
    graphs and numpy views leave `_version` as it is. Equal numbers therefore say nothing, and the values are compared
    with a copy. Different numbers need no comparison, which would wait for a GPU.
    """

    def __init__(self) -> None:
        self._count = 0
        self._stamp: Any = None
        self._copies: list[Any] = []

    def count(self, tensors: Sequence[Any]) -> int:
        """Return a number that is larger than the last one if the tensors have changed since."""
        stamp = [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]
        values = [tensor.detach() for tensor in tensors]
        if stamp != self._stamp or not all(map(torch.equal, values, self._copies)):
            self._count += 1
            self._stamp = stamp
            self._copies = [value.clone() for value in values]
        return self._count
