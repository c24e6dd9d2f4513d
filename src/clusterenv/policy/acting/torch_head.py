"""Run a torch module in the head's process, on its own device: the actor of `collector(act="head")` with a GPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from clusterenv.policy.acting.shapes import pack
from clusterenv.policy.acting.torch_actor import Forward, as_input
from clusterenv.policy.weights.encoding import Weights
from clusterenv.rollout import map_arrays

__all__ = ["TorchHeadActor", "device_of"]


class TorchHeadActor:
    """Acts with a copy of the user's module, in eval mode; the user's own one stays as it is.

    Args:
        names: of the weights that acting needs; `load` copies these from the user's module, within the device.
    """

    def __init__(
        self, module: Any, forward: Forward, initial: Callable[[int], Any] | None, names: tuple[str, ...]
    ) -> None:
        self._source, self._names = module, names
        self._module = copy.deepcopy(module).eval().requires_grad_(False)
        self._forward, self._initial = forward, initial
        self._device = device_of(module)

    def load(self, weights: Weights) -> None:
        source, target = self._source.state_dict(), self._module.state_dict()
        with torch.no_grad():
            for name in self._names:
                target[name].copy_(source[name])

    def forward(self, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
        # Moved before it is converted: bytes of images become floats on the device.
        tensors = map_arrays(lambda array: as_input(torch.from_numpy(array).to(self._device)), obs)
        with torch.inference_mode():
            if self._initial is None:
                params = self._forward(self._module, tensors)
            else:
                started = torch.from_numpy(starts.astype(np.float32)).to(self._device)
                params, state = self._forward(self._module, tensors, state, started)
            return (pack(params) if isinstance(params, tuple) or params.dim() != 2 else params).cpu().numpy(), state

    def initial_state(self, rows: int) -> Any:
        if self._initial is None:
            return None
        return map_arrays(lambda tensor: tensor.to(self._device), self._initial(rows))

    def like_state(self, state: Any) -> Any:
        return map_arrays(lambda array: torch.from_numpy(array).to(self._device), state)


def device_of(module: Any) -> torch.device:
    """Return the device of the module's first parameter or buffer."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device
