"""Turn a recording of torch operators into an ONNX graph. `operators` has a converter for each operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from clusterenv.policy.onnx.errors import NotExportable
from clusterenv.policy.onnx.model import Graph, element_type
from clusterenv.policy.onnx.trace import Recording, Rows, Step, Value

__all__ = ["Converter", "needed", "numpy_dtype"]

Size = int | Rows


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    try:
        found = np.dtype(name)
        element_type(found)
    except TypeError:
        raise NotExportable(f"ONNX has no arrays of {name}") from None
    return found


def needed(recording: Recording) -> tuple[list[Step], set[int]]:
    """Return the steps on which the outputs depend, and the numbers of all values that are used."""
    used = {value.number for value in recording.outputs}
    steps = []
    for step in reversed(recording.steps):
        if any(value is not None and value.number in used for value in step.outputs):
            steps.append(step)
            used.update(value.number for value in _values(step.arguments))
    return steps[::-1], used


def _values(arguments: Sequence[Any]) -> list[Value]:
    found = []
    for argument in arguments:
        if isinstance(argument, Value):
            found.append(argument)
        elif isinstance(argument, list):
            found += _values(argument)
    return found


class Converter:
    """Writes nodes. A value is known by its number in the recording, and by its name in the graph."""

    def __init__(self, graph: Graph, rows_of: str) -> None:
        self.graph = graph
        self.names: dict[int, str] = {}
        self._rows_of = rows_of  # an input whose first axis are the rows
        self._rows: str | None = None

    def run(self, steps: Sequence[Step], table: dict[str, Any]) -> None:
        for step in steps:
            name = step.operator.partition(".")[0]
            convert = table.get(step.operator, table.get(name))
            if convert is None:
                raise NotExportable(f"the operator aten.{name} has no counterpart here")
            given = convert(self, step.outputs, *step.arguments)
            for value, made in zip(step.outputs, given if isinstance(given, list) else [given], strict=False):
                if value is not None and made is not None:
                    self.names[value.number] = made

    # -- values -----------------------------------------------------------------------------------------------

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.graph.node(op, inputs, 1, **attributes)[0]

    def name(self, value: Value) -> str:
        if value.number not in self.names:
            raise NotExportable("it uses a second result of an operator that is not computed here")
        return self.names[value.number]

    def constant(self, value: Any, dtype: Any) -> str:
        return self.graph.constant(np.asarray(value, dtype=dtype))

    def numbers(self, values: Sequence[int]) -> str:
        return self.constant(list(values), np.int64)

    def cast(self, value: Value, dtype: torch.dtype) -> str:
        """Return the value in this dtype."""
        name = self.name(value)
        return name if value.dtype == dtype else self.node("Cast", name, to=element_type(numpy_dtype(dtype)))

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """Return a tensor or a number in this dtype."""
        if isinstance(value, Value):
            return self.cast(value, dtype)
        if isinstance(value, Rows):
            scalar = self.node("Squeeze", self.sizes([value]))
            return self.node("Cast", scalar, to=element_type(numpy_dtype(dtype)))
        return self.constant(value, numpy_dtype(dtype))

    # -- shapes -----------------------------------------------------------------------------------------------

    def sizes(self, sizes: Sequence[Size]) -> str:
        """Return a vector of sizes, some of which may depend on the number of rows."""
        if not any(isinstance(size, Rows) for size in sizes):
            return self.numbers([size for size in sizes if isinstance(size, int)])
        parts = []
        for size in sizes:
            if isinstance(size, Rows):
                part = self._number_of_rows()
                part = part if size.per_row == 1 else self.node("Mul", part, self.numbers([size.per_row]))
                parts.append(part if not size.plus else self.node("Add", part, self.numbers([size.plus])))
            else:
                parts.append(self.numbers([size]))
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    def reshape(self, name: str, shape: Sequence[Size]) -> str:
        free = [size for size in shape if isinstance(size, Rows)]
        if len(free) == 1 and 0 not in shape:  # the one size that is left to compute
            return self.node("Reshape", name, self.numbers([-1 if isinstance(size, Rows) else size for size in shape]))
        return self.node("Reshape", name, self.sizes(shape), allowzero=1)

    def expand(self, name: str, shape: Sequence[Size]) -> str:
        return self.node("Expand", name, self.sizes(shape))

    def _number_of_rows(self) -> str:
        if self._rows is None:
            self._rows = self.node("Shape", self._rows_of, start=0, end=1)
        return self._rows
