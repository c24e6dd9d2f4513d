"""Export the acting part of a torch module on the head: trace it, convert it, and compare it with torch.

Enters: a copy of the module, its forward pass, sampled observations. Leaves: an `OnnxRecipe`, or `NotExportable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from clusterenv.policy.acting.base import PAD
from clusterenv.policy.acting.shapes import pack
from clusterenv.policy.acting.torch_actor import Forward, to_tensor
from clusterenv.policy.onnx.actor import OnnxRecipe, OnnxWeight, flatten_state
from clusterenv.policy.onnx.convert import Converter, needed, numpy_dtype
from clusterenv.policy.onnx.errors import NotExportable
from clusterenv.policy.onnx.layers import KEEP, TABLE
from clusterenv.policy.onnx.model import Graph, element_type
from clusterenv.policy.onnx.trace import Recording, Rows, Value, record
from clusterenv.rollout import map_arrays

__all__ = ["SAMPLES", "export"]

SAMPLES = 5 * PAD
"""How many observations an export needs."""

_TOLERANCE = 1e-5

Initial = Callable[[int], Any]


def export(
    module: Any, forward: Forward, obs: Any, initial: Initial | None, names: Sequence[str], family: str
) -> OnnxRecipe:
    """Return the recipe of an actor that gives what `forward(module, ...)` gives; raise NotExportable if there is none.

    Args:
        module: a copy, whose weights are changed here.
        obs: SAMPLES observations, as arrays [SAMPLES, ...].
        initial: `initial_state` of a recurrent policy.
        names: of the weights that are sent.
    """
    first_row = None if initial is None else _first_row(initial)
    state = module.state_dict(keep_vars=True)
    weights = {name: state[name] for name in names}
    try:
        recipe = _convert(module, forward, obs, first_row, weights, family)
        _verify(recipe, module, forward, obs, weights)
    except NotExportable:
        raise
    except Exception as error:  # torch, the user's code and ONNX Runtime raise various exceptions
        raise NotExportable(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return recipe


def _first_row(initial: Initial) -> Any:
    """Return the state of one row before its first observation, as arrays."""
    states = [map_arrays(lambda leaf: leaf.numpy(), initial(rows)) for rows in (PAD, 3)]
    row = map_arrays(lambda leaf: leaf[0].copy(), states[0])
    for state in states:
        for leaf, expected in zip(flatten_state(state), flatten_state(row), strict=True):
            if not np.array_equal(leaf, np.broadcast_to(expected, leaf.shape)):
                raise NotExportable("initial_state(rows) is not the same for every row")
    return row


# -- tracing and converting -----------------------------------------------------------------------------------


def _convert(
    module: Any, forward: Forward, obs: Any, first_row: Any, weights: dict[str, Any], family: str
) -> OnnxRecipe:
    paths = list(_paths(obs))
    leaves = [_at(obs, path) for path in paths]
    states = list(flatten_state(first_row))

    def run(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        arrived = map_arrays(lambda _: next(given), obs)
        before = map_arrays(lambda _: next(given), first_row)
        params, after = _forward(forward, module, arrived, before, next(given) if states else None)
        return [params, *flatten_state(after)]

    def batch(rows: int) -> list[Any]:
        tensors = [to_tensor(leaf[:rows].copy()) for leaf in leaves]
        if states:
            tensors += [torch.from_numpy(np.repeat(row[None], rows, axis=0)) for row in states]
            tensors.append(torch.ones(rows))
        return [*tensors, *weights.values()]

    recording = record(run, [batch(PAD), batch(3 * PAD)], KEEP)
    return _Writer(recording, leaves, states).recipe(paths, list(weights), first_row, family)


class _Writer:
    """Writes the graph of a recording. Its given values are observations, state, starts, weights, in this order."""

    def __init__(self, recording: Recording, leaves: list[Any], states: list[Any]) -> None:
        self._recording = recording
        self._leaves, self._states = leaves, states
        self._steps, self._used = needed(recording)
        self._graph = Graph()

    def recipe(self, paths: list[list[str | int]], weights: list[str], first_row: Any, family: str) -> OnnxRecipe:
        recording, graph = self._recording, self._graph
        given = iter(recording.given)
        obs = [(f"o{i}", value) for i, value in zip(range(len(paths)), given, strict=False)]
        states = [(f"s{i}", value) for i, value in zip(range(len(self._states)), given, strict=False)]
        starts = next(given) if states else None
        # The first input gives the number of rows, so it is always one of the graph.
        used = [i for i, (_, value) in enumerate(obs) if i == 0 or value.number in self._used]
        converter = Converter(graph, "o0")
        for i in used:
            name, value = obs[i]
            self._input(converter, name, value, self._leaves[i].dtype)
        for name, value in states:
            self._input(converter, name, value, numpy_dtype(value.dtype))
        if starts is not None:
            self._input(converter, "starts", starts, np.dtype(np.bool_))
        sent = self._weights(converter, weights, list(given))
        for number, constant in recording.constants.items():
            if number in self._used:
                converter.names[number] = graph.constant(constant)
        converter.run(self._steps, TABLE)
        outputs = []
        for value in recording.outputs:
            outputs.append(converter.node("Identity", converter.name(value)))
            graph.output(outputs[-1], numpy_dtype(value.dtype), _sizes(value))
        has_convolutions = any(step.operator.startswith("convolution") for step in self._steps)
        kept = [(obs[i][0], paths[i]) for i in used]
        return OnnxRecipe(graph.body(), kept, first_row, outputs, sent, has_convolutions, family)

    def _input(self, converter: Converter, name: str, value: Value, dtype: np.dtype[Any]) -> None:
        """Declare an input of this dtype; the graph itself converts it as `to_tensor` does."""
        self._graph.input(name, dtype, _sizes(value))
        wanted = numpy_dtype(value.dtype)
        converter.names[value.number] = (
            name if dtype == wanted else converter.node("Cast", name, to=element_type(wanted))
        )

    def _weights(self, converter: Converter, names: list[str], values: list[Value]) -> list[OnnxWeight]:
        sent = []
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            if value.number in self._used:
                converter.names[value.number] = f"w{i}"
                sizes = [size for size in value.shape if isinstance(size, int)]
                sent.append(OnnxWeight(name, f"w{i}", numpy_dtype(value.dtype).name, sizes))
        return sent


def _sizes(value: Value) -> list[int | str]:
    return [f"{size.per_row}rows{size.plus:+d}" if isinstance(size, Rows) else size for size in value.shape]


def _paths(obs: Any, path: Sequence[str | int] = ()) -> Iterator[list[str | int]]:
    """Yield the keys that lead to each leaf, in the order of `map_arrays`."""
    if isinstance(obs, dict):
        for key, value in obs.items():
            yield from _paths(value, (*path, key))
    elif isinstance(obs, (tuple, list)):
        for i, value in enumerate(obs):
            yield from _paths(value, (*path, i))
    else:
        yield list(path)


def _at(obs: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _forward(forward: Forward, module: Any, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
    if starts is None:
        params, state = forward(module, obs), None
    else:
        params, state = forward(module, obs, state, starts)
    return (pack(params) if isinstance(params, tuple) or params.dim() != 2 else params), state


# -- comparing ------------------------------------------------------------------------------------------------


def _verify(recipe: OnnxRecipe, module: Any, forward: Forward, obs: Any, weights: dict[str, Any]) -> None:
    """Raise NotExportable if the exported actor and torch disagree, with these weights or with others."""
    actor = recipe.build()
    rng = np.random.default_rng(0)
    tame = map_arrays(_tamed, obs)
    for i, batches in enumerate((((0, PAD), (2 * PAD, 5 * PAD)), ((0, 2 * PAD), (2 * PAD, 3 * PAD)))):
        if i:  # all of them: a weight that the graph does not have may be one of its constants
            with torch.no_grad():
                for tensor in weights.values():
                    tensor.copy_(torch.from_numpy(_changed(tensor.detach().numpy(), rng)))
        actor.load({name: tensor.detach().numpy() for name, tensor in weights.items()})
        for begin, end in batches:
            _compare(actor, recipe, module, forward, map_arrays(lambda a, b=begin, e=end: a[b:e], tame))


def _compare(actor: Any, recipe: OnnxRecipe, module: Any, forward: Forward, obs: Any) -> None:
    rows = len(_at(obs, next(_paths(obs))))
    ours = actor.initial_state(rows)
    theirs = map_arrays(torch.from_numpy, actor.initial_state(rows))
    starts = np.ones(rows, dtype=np.bool_)
    for _ in range(1 if recipe.state is None else 3):
        params, ours = actor.forward(obs, ours, starts)
        given = None if recipe.state is None else torch.from_numpy(starts.astype(np.float32))
        with torch.inference_mode():
            wanted, theirs = _forward(forward, module, map_arrays(lambda a: to_tensor(a.copy()), obs), theirs, given)
        _agree(wanted, params, "its output")
        for a, b in zip(flatten_state(theirs), flatten_state(ours), strict=True):
            _agree(a, b, "its state")
        starts = np.arange(rows) % 3 == 0


def _agree(wanted: Any, given: Any, what: str) -> None:
    wanted = wanted.numpy()
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        raise NotExportable(f"{what} has another shape or dtype with ONNX Runtime")
    if not wanted.size:
        return
    a, b = (array.reshape(len(array), -1).astype(np.float64) for array in (wanted, given))
    finite = np.isfinite(a).all(axis=1)  # the others would end the rollout in torch too
    error = np.abs(a - b)[finite].max(axis=1) / np.maximum(1.0, np.abs(a[finite]).max(axis=1))
    if not (error <= _TOLERANCE).all():
        raise NotExportable(f"{what} differs from torch's by {error.max():.2g} with ONNX Runtime")


def _tamed(values: Any) -> Any:
    """Limit every other row to small values: spaces without sensible bounds give samples that saturate a network."""
    if values.dtype.kind != "f":
        return values
    values = values.copy()
    values[::2] = values[::2].clip(-10.0, 10.0)
    return values


def _changed(values: Any, rng: np.random.Generator) -> Any:
    """Return other weights of the same kind: those that are not negative (variances) stay so."""
    if values.dtype.kind != "f" or not values.size:
        return values
    size = float(np.sqrt(np.mean(np.square(values)))) or 0.3  # larger changes would make a network ill-conditioned
    changed = values + 0.3 * size * rng.standard_normal(values.shape, dtype=np.float32)
    return (np.abs(changed) if (values >= 0).all() else changed).astype(values.dtype)
