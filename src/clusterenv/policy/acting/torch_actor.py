"""Run a torch module on a worker's CPU: build it from its structure and load each version's weights.

`TorchPolicy` makes a `TorchRecipe` on the head; it is sent once, without weights, and builds a `TorchActor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clusterenv.errors import PolicyError
from clusterenv.policy.acting.shapes import from_distribution, pack
from clusterenv.policy.weights.encoding import Weights
from clusterenv.rollout import map_arrays

__all__ = ["Forward", "FromDist", "TorchRecipe", "as_input", "hollow", "to_tensor"]

Forward = Callable[..., Any]


@dataclass
class TorchRecipe:
    module: Any
    forward: Forward
    state_fn: Callable[[int], Any] | None

    def build(self) -> TorchActor:
        _fill(self.module)
        return TorchActor(self)


class TorchActor:
    def __init__(self, recipe: TorchRecipe) -> None:
        self._module = recipe.module.eval()
        _call_layers_directly(self._module)
        self._forward = recipe.forward
        self._state_fn = recipe.state_fn

    def load(self, weights: Weights) -> None:
        state = self._module.state_dict()
        with torch.no_grad():
            for name, array in weights.items():
                if tuple(state[name].shape) != array.shape:
                    raise PolicyError(
                        f"the weights {name!r} have shape {array.shape}, the module that was attached has "
                        f"{tuple(state[name].shape)}: its architecture changed; make a new collector"
                    )
                state[name].copy_(torch.from_numpy(np.array(array)))

    def forward(self, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
        # No parameter requires gradients (`_snapshot`), so no graph is built; entering inference mode would cost more.
        tensors = to_tensor(obs) if obs.__class__ is np.ndarray else map_arrays(to_tensor, obs)
        if self._state_fn is None:
            params = self._forward(self._module, tensors)
        else:
            started = torch.from_numpy(starts.astype(np.float32))
            params, state = self._forward(self._module, tensors, state, started)
        if params.__class__ is tuple or params.dim() != 2:
            params = pack(params)
        return params.numpy(), state

    def initial_state(self, rows: int) -> Any:
        return None if self._state_fn is None else self._state_fn(rows)

    def like_state(self, state: Any) -> Any:
        return map_arrays(torch.from_numpy, state)


class FromDist:
    """Wraps a user's `dist` as a forward pass."""

    def __init__(self, dist: Forward) -> None:
        self._dist = dist

    def __call__(self, module: Any, obs: Any, *recurrent: Any) -> Any:
        if recurrent:
            given, state = self._dist(module, obs, *recurrent)
            return from_distribution(given)[1], state
        return from_distribution(self._dist(module, obs))[1]


def _call_layers_directly(module: Any) -> None:
    """Skip the hook handling of `Module.__call__` in plain `Sequential`s: a fifth of a small network's forward pass."""
    for sequence in module.modules():
        if type(sequence) is torch.nn.Sequential and not any(
            layer._forward_hooks or layer._forward_pre_hooks for layer in sequence
        ):
            sequence.forward = _Chain([layer.forward for layer in sequence])  # type: ignore[method-assign]


class _Chain:
    def __init__(self, calls: list[Callable[[Any], Any]]) -> None:
        self._calls = calls

    def __call__(self, value: Any) -> Any:
        for call in self._calls:
            value = call(value)
        return value


def hollow(module: Any) -> Any:
    """Remove the weights from the module: they are sent with each version, once per machine and not to each worker."""
    _replace_tensors(module, lambda tensor: tensor.to("meta"))
    return module


def _fill(module: Any) -> None:
    def zeros(tensor: Any) -> Any:
        # Not zeros_like: on a meta tensor it imports sympy, half a second for each worker.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()

    _replace_tensors(module, zeros)


def _replace_tensors(module: Any, replacement: Callable[[Any], Any]) -> None:
    """Replace the tensors of the `state_dict`. Tensors that parts of the module share stay shared."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and name not in part._non_persistent_buffers_set:
                    if id(tensor) not in made:
                        new = replacement(tensor)
                        new = torch.nn.Parameter(new, False) if tensors is part._parameters else new
                        made[id(tensor)] = (tensor, new)  # keeps the old one alive, so that its id is not reused
                    tensors[name] = made[id(tensor)][1]


def to_tensor(array: Any) -> Any:
    return as_input(torch.from_numpy(array))


def as_input(tensor: Any) -> Any:
    """Return observations as modules get them: floats and 8-bit images as float32, other integers as they are."""
    if tensor.dtype in (torch.float64, torch.float16, torch.uint8, torch.bool):
        return tensor.float()
    return tensor
