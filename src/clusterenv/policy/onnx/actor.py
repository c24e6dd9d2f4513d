"""Act with an exported policy: an ONNX graph, run by ONNX Runtime. Imported by workers, which need no torch.

`OnnxRecipe` is plain data, so it also reaches nodes that accept no pickled code; weights follow with each version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.policy.onnx.model import Graph, model_bytes, tensor_field, value_field
from clusterenv.policy.weights.encoding import Weights
from clusterenv.rollout import map_arrays

__all__ = ["OnnxRecipe", "OnnxWeight", "flatten_state", "preload"]


class OnnxWeight(NamedTuple):
    name: str
    """In the module's `state_dict`."""
    value: str
    """In the graph."""
    dtype: str
    shape: list[int]


class OnnxRecipe(NamedTuple):
    graph: bytes
    """The fields of a `GraphProto`, without the weights."""
    obs: list[tuple[str, list[str | int]]]
    """For each input: its name, and the keys that lead to it in an observation."""
    state: Any
    """Of a recurrent policy: the state of one row before its first observation. Its inputs are s0, s1, ..."""
    outputs: list[str]
    """The distribution's parameters, then the next state."""
    weights: list[OnnxWeight]
    are_weights_constant: bool
    """Whether each version gets its own session, in which weights are constants: slow to make, but convolutions
    rearrange constant weights once and not in every call. Else weights are inputs of one session."""
    family: str
    """Name of the distribution, from which a worker makes the family itself."""

    def build(self) -> OnnxActor:
        return OnnxActor(self)


def _runtime() -> Any:
    """Import ONNX Runtime, without its telemetry: it would start a thread, and send data from every node."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    return onnxruntime


def preload() -> None:
    """Import ONNX Runtime and run a graph, so that the next one starts faster, in this process and in forked ones."""
    with contextlib.suppress(Exception):  # not installed, or broken: a policy that needs it says so
        _run_once()


def _run_once() -> None:
    graph = Graph()
    graph.input("o0", "float32", ["rows", 1])
    (out,) = graph.node("Tanh", graph.node("Gemm", ["o0", graph.constant(np.ones((1, 1), np.float32))]))
    graph.output(out, "float32", ["rows", 1])
    actor = OnnxActor(OnnxRecipe(graph.body(), [("o0", [])], None, [out], [], False, ""))
    actor.forward(np.ones((1, 1), np.float32), None, None)


class OnnxActor:
    def __init__(self, recipe: OnnxRecipe) -> None:
        self._recipe = recipe
        self._runtime = _runtime()
        self._starts = "starts" if recipe.state is not None else None
        self._states = [f"s{i}" for i in range(len(list(flatten_state(recipe.state))))]
        self._only_obs = recipe.obs[0][0] if len(recipe.obs) == 1 and not recipe.obs[0][1] else None
        self._rows = -1  # of the outputs that are bound
        self._session: Any = None
        if not recipe.are_weights_constant:
            inputs = [value_field(weight.value, weight.dtype, weight.shape) for weight in recipe.weights]
            self._start(model_bytes(recipe.graph, inputs))

    def _start(self, model: bytes) -> None:
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised
        self._session = self._runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._bind = self._binding.bind_cpu_input
        self._run = self._session.run_with_iobinding
        self._results = self._binding.copy_outputs_to_cpu
        self._rows = -1

    def load(self, weights: Weights) -> None:
        recipe = self._recipe
        for weight in recipe.weights:
            if list(weights[weight.name].shape) != weight.shape:
                raise PolicyError(
                    f"the weights {weight.name!r} have shape {weights[weight.name].shape}, the module that was "
                    f"attached has {tuple(weight.shape)}: its architecture changed; make a new collector"
                )
        # Copies: the memory from which weights are loaded will hold others.
        arrays = {weight.value: np.array(weights[weight.name], weight.dtype, order="C") for weight in recipe.weights}
        if recipe.are_weights_constant:
            self._start(model_bytes(recipe.graph, [tensor_field(name, array) for name, array in arrays.items()]))
        else:
            self._loaded = arrays  # the binding does not keep them alive
            for name, array in arrays.items():
                self._bind(name, array)

    def forward(self, obs: Any, state: Any, starts: Any) -> tuple[Any, Any]:
        bind = self._bind
        if self._only_obs is not None:
            obs = obs if obs.flags.c_contiguous else np.ascontiguousarray(obs)
            bind(self._only_obs, obs)
            rows = len(obs)
        else:
            kept = [(name, np.ascontiguousarray(_at(obs, path))) for name, path in self._recipe.obs]
            for name, leaf in kept:
                bind(name, leaf)
            rows = len(kept[0][1])
        if self._starts is None:
            if rows != self._rows:
                self._expect(rows)
            self._run(self._binding)
            return self._results()[0], None
        leaves = [np.ascontiguousarray(leaf) for leaf in (starts, *flatten_state(state))]
        for name, leaf in zip((self._starts, *self._states), leaves, strict=True):
            bind(name, leaf)
        if rows != self._rows:
            self._expect(rows)
        self._run(self._binding)
        params, *after = self._results()
        following = iter(after)
        return params, map_arrays(lambda _: next(following), self._recipe.state)

    def _expect(self, rows: int) -> None:
        """Bind the outputs anew: those of an earlier call have its number of rows."""
        self._binding.clear_binding_outputs()
        for name in self._recipe.outputs:
            self._binding.bind_output(name)
        self._rows = rows

    def initial_state(self, rows: int) -> Any:
        return map_arrays(lambda row: np.repeat(row[None], rows, axis=0), self._recipe.state)

    def like_state(self, state: Any) -> Any:
        return state


def flatten_state(state: Any) -> Iterator[Any]:
    """Yield the leaves, in the order of `map_arrays`."""
    if isinstance(state, dict):
        state = state.values()
    elif state is None:
        return
    elif not isinstance(state, (tuple, list)):
        yield state
        return
    for part in state:
        yield from flatten_state(part)


def _at(obs: Any, path: list[str | int]) -> Any:
    for key in path:
        obs = obs[key]
    return obs
